/*
 * A stand-in for libcuda.so.1 on top of the embedded node's stand-in driver (tests/embedded/nvml/nvml.c): with it the
 * real-GPU suite can be rehearsed on a machine without GPU (rehearsal.py).  It opens every GPU node in cuInit, as CUDA
 * does, and holds "memory" as locked records below /run/nvidia-standin/alloc.  Pinned host memory is a memfd: a process
 * that owns a large one lives on for a while after SIGKILL without any descriptor, as with the real driver.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STANDIN "/run/nvidia-standin"
#define MAX_GPUS 8
#define MAX_RECORDS 256
#define CONTEXT_MIB 512ULL
#define PATTERN 0xA5
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, CANNOT_MAP = 205, UNKNOWN = 999 };

static struct { unsigned minor; char uuid[64], node[64], name[64]; unsigned long long total_mib, used_mib; } gpus[MAX_GPUS];
static char records[MAX_RECORDS][64];
static int gpu_count, record_count, current;

/* Our pid as the node counts it. */
static int node_pid(void)
{
	char text[32] = "";

	return readlink(STANDIN "/proc/self", text, sizeof text - 1) < 0 ? 0 : atoi(text);
}

static int write_record(const char *text)
{
	char temporary[PATH_MAX], path[PATH_MAX];
	char *name = records[record_count];
	int fd;

	if (record_count == MAX_RECORDS)
		return OUT_OF_MEMORY;
	snprintf(name, sizeof records[0], "cuda-%d-%d", node_pid(), record_count++);
	snprintf(temporary, sizeof temporary, STANDIN "/alloc/.%s", name);
	snprintf(path, sizeof path, STANDIN "/alloc/%s", name);
	fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);      /* the lock lasts as long as this is open */
	if (fd < 0 || write(fd, text, strlen(text)) < 0 || flock(fd, LOCK_EX) || rename(temporary, path))
		return UNKNOWN;
	return SUCCESS;
}

static int take(int device, unsigned long long mib)
{
	char text[128];

	if (gpus[device].used_mib + mib > gpus[device].total_mib)
		return OUT_OF_MEMORY;
	gpus[device].used_mib += mib;
	snprintf(text, sizeof text, "%d 1 %u %llu compute\n", node_pid(), gpus[device].minor, mib);
	return write_record(text);
}

int cuInit(unsigned flags)
{
	FILE *file = fopen(STANDIN "/gpus", "re");
	char line[512], pci[64];

	(void)flags;
	if (!file)
		return NO_DEVICE;
	if (open("/dev/nvidiactl", O_RDWR | O_NOCTTY | O_CLOEXEC) < 0 ||
	    open("/dev/nvidia-uvm", O_RDWR | O_NOCTTY | O_CLOEXEC) < 0)
		return NO_DEVICE;
	while (gpu_count < MAX_GPUS && fgets(line, sizeof line, file))
		if (sscanf(line, "%u %63s %63s %llu %63s %63[^\n]", &gpus[gpu_count].minor, gpus[gpu_count].uuid, pci,
			   &gpus[gpu_count].total_mib, gpus[gpu_count].node, gpus[gpu_count].name) == 6 &&
		    open(gpus[gpu_count].node, O_RDWR | O_NOCTTY | O_CLOEXEC) >= 0)
			gpu_count++;
	fclose(file);
	return gpu_count ? SUCCESS : NO_DEVICE;
}

int cuGetErrorName(int status, const char **name)
{
	*name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == CANNOT_MAP ? "CUDA_ERROR_MAP_FAILED" :
		status == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
	return SUCCESS;
}

int cuDeviceGetCount(int *count) { *count = gpu_count; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "%s", gpus[device].name); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = gpus[device].total_mib << 20; return SUCCESS; }

int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
	const char *text = gpus[device].uuid + strlen("GPU-");
	unsigned byte;

	for (int i = 0; i < 16; i++, text += 2) {
		text += *text == '-';
		if (sscanf(text, "%2x", &byte) != 1)
			return INVALID_VALUE;
		uuid[i] = byte;
	}
	return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
	*context = (void *)(long)(device + 1);
	return take(device, CONTEXT_MIB);
}

int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return SUCCESS; }
int cuCtxSynchronize(void) { usleep(1000); return SUCCESS; }

/* A device pointer tells which record it is. */
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
	*pointer = (unsigned long long)(record_count + 1) << 44;
	return take(current, bytes >> 20);
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
	int fd = memfd_create("pinned", MFD_CLOEXEC);

	(void)flags;
	*address = address;
	return fd < 0 || posix_fallocate(fd, 0, bytes / 2) ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t bytes)
{
	(void)pointer, (void)value, (void)bytes;
	return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long pointer, size_t bytes)
{
	(void)pointer;
	memset(to, PATTERN, bytes);
	return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	*total_bytes = gpus[current].total_mib << 20;
	*free_bytes = *total_bytes - (gpus[current].used_mib << 20);
	return SUCCESS;
}

struct ipc_handle { char name[64]; };

int cuIpcGetMemHandle(struct ipc_handle *handle, unsigned long long pointer)
{
	memcpy(handle->name, records[(pointer >> 44) - 1], sizeof handle->name);
	return SUCCESS;
}

/* STANDIN_CUDA_NO_IPC: as if CUDA wanted both processes in one PID namespace. */
int cuIpcOpenMemHandle_v2(unsigned long long *pointer, struct ipc_handle handle, unsigned flags)
{
	char text[160], self[64] = "", inode[32] = "";
	int fd = open(STANDIN "/pidns", O_RDONLY | O_CLOEXEC);

	(void)flags;
	if (fd < 0 || read(fd, inode, sizeof inode - 1) < 0 || readlink("/proc/self/ns/pid", self, sizeof self - 1) < 0)
		return UNKNOWN;
	close(fd);
	inode[strcspn(inode, "\n")] = 0;
	if (getenv("STANDIN_CUDA_NO_IPC") && !strstr(self, inode))
		return CANNOT_MAP;
	*pointer = (unsigned long long)(record_count + 1) << 44;
	snprintf(text, sizeof text, "import %d 1 %.63s\n", node_pid(), handle.name);
	return write_record(text);
}
