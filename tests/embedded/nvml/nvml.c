/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1, for tests and the demo only.
 *
 * The real pynvml loads it through the loader's own path.  Layouts and symbol names follow the public NVML ABI as
 * nvidia-ml-py 11.525 .. 13.x uses it.  Everything it knows is under /run/nvidia-standin, read again at every call:
 *
 *   gpus               one GPU per line, in index order: MINOR UUID PCI TOTAL_MIB NODE NAME...
 *   pidns              inode of the PID namespace in which client pids are counted (the node's)
 *   proc               a procfs of that namespace
 *   alloc/NAME         "PID START MINOR MIB KINDS": memory of a client, held as long as somebody holds an exclusive
 *                      flock on it (an open file description: it survives fork, and lives while in flight in a socket);
 *                      "import PID START NAME": a CUDA-IPC importer of NAME, who is charged when the exporter is gone
 *   alloc/NAME.freed   when the lock was first seen gone (CLOCK_MONOTONIC, ms); written by this library
 *   control            misbehaviours, "KEY VALUE" or "KEY.MINOR VALUE" per line; node.py has the list
 *   state/persistence.MINOR   what nvmlDeviceSetPersistenceMode set
 *
 * Compile with -DOLD_DRIVER for a library without the _v3 process lists and without the v2 memory call.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define STANDIN "/run/nvidia-standin"
#define EXPORT __attribute__((visibility("default")))
#define MIB 1048576ULL
#define MAX_GPUS 16
#define MAX_CLIENTS 4096
#define NOT_AVAILABLE (~0ULL)

enum {
	OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, UNKNOWN = 999,
};
enum { COMPUTE = 1, GRAPHICS = 2, MPS = 4 };

struct gpu {
	unsigned minor;
	unsigned long long total_mib;
	char uuid[96], pci[32], node[64], name[96];
	int fd;
};
struct client { unsigned pid; unsigned long long bytes; };
struct usage {
	struct client clients[3][MAX_CLIENTS];
	size_t count[3];
	unsigned long long used;
};
struct allocation {
	char name[NAME_MAX + 1], exporter[NAME_MAX + 1];
	unsigned pid, minor, kinds;
	unsigned long long mib;
	int held;
};

struct memory_v1 { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process_v1 { unsigned pid; unsigned long long bytes; };
struct process_v2 { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct pci_v2 { char bus_id[16]; unsigned domain, bus, device, device_id, subsystem_id, reserved[4]; };
struct pci_v3 { char bus_id_legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
struct field_value {
	unsigned field, scope;
	long long timestamp, latency_us;
	unsigned type, result;
	union { double d; unsigned ui; unsigned long long ull; } value;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu gpus[MAX_GPUS];
static unsigned gpu_count;
static int references, control_fd = -1;

/* ---- control file ---------------------------------------------------------------------------------------------- */

static __thread char control_text[65536];

static size_t read_file(const char *path, char *buffer, size_t size)
{
	ssize_t got = 0, n;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	while (fd >= 0 && (size_t)got < size - 1 && (n = read(fd, buffer + got, size - 1 - got)) > 0)
		got += n;
	if (fd >= 0)
		close(fd);
	buffer[got] = 0;
	return got;
}

static void load_control(void)
{
	read_file(STANDIN "/control", control_text, sizeof control_text);
}

static int find_line(const char *key, char *value, size_t size)
{
	size_t length = strlen(key);

	for (const char *line = control_text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
		if (!strncmp(line, key, length) && line[length] == ' ') {
			snprintf(value, size, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
			return 1;
		}
	return 0;
}

/* The value of KEY.MINOR, or else of KEY; minor < 0 asks for the plain key only. */
static int control(const char *key, int minor, char *value, size_t size)
{
	char specific[128];

	snprintf(specific, sizeof specific, "%s.%d", key, minor);
	return (minor >= 0 && find_line(specific, value, size)) || find_line(key, value, size);
}

static double number(const char *key, int minor, double otherwise)
{
	char value[64];

	return control(key, minor, value, sizeof value) ? strtod(value, NULL) : otherwise;
}

/* "nvmlDeviceGetMemoryInfo_v2" is named by itself, by its base name and by "*". */
static int names(const char *word, const char *function)
{
	char base[128];
	char *end;

	snprintf(base, sizeof base, "%s", function);
	if ((end = strstr(base, "WithFlags")) || ((end = strrchr(base, '_')) && end[1] == 'v' && isdigit(end[2])))
		*end = 0;
	return !strcmp(word, "*") || !strcmp(word, function) || !strcmp(word, base);
}

static int listed(const char *key, const char *function, int minor)
{
	char value[1024], *save, *word;

	if (!control(key, minor, value, sizeof value))
		return 0;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save))
		if (names(word, function))
			return 1;
	return 0;
}

static void sleep_ms(double ms)
{
	struct timespec left = { (time_t)(ms / 1000), (long)((ms - 1000 * (long)(ms / 1000)) * 1e6) };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

static void hang_in_d_state(void)
{
	char path[PATH_MAX];
	int fd;

	if (!control("hang_d_path", -1, path, sizeof path))
		return;
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);      /* blocks on a frozen file system */
	if (fd >= 0)
		close(fd);
}

/* What the control file has in store for this call: may hang, die, wait; or the error to return (0: none). */
static int misbehave(const char *function, int minor)
{
	char value[1024], *save, *word, *equals;

	load_control();
	if (!*control_text)
		return OK;
	if (listed("delay", function, minor))
		sleep_ms(number("delay_ms", minor, 0));
	if (!strncmp(function, "nvmlInit", 8))
		sleep_ms(number("init_delay_ms", -1, 0));
	if (listed("hang_d", function, minor))
		hang_in_d_state();
	while (listed("hang", function, minor))                     /* "for ever": until the control file says otherwise */
		sleep_ms(20), load_control();
	if (listed("crash", function, minor))
		raise(SIGSEGV);
	if (listed("exit", function, minor))
		_exit(3);
	if (minor >= 0 && number("lost", minor, 0))
		return GPU_IS_LOST;
	if (!control("error", minor, value, sizeof value))
		return OK;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save))
		if ((equals = strchr(word, '='))) {
			*equals = 0;
			if (names(word, function))
				return atoi(equals + 1);
		}
	return OK;
}

/* ---- pids as the caller's PID namespace shows them -------------------------------------------------------------- */

static unsigned long namespace_of(const char *path)
{
	struct stat st;

	return stat(path, &st) ? 0 : (unsigned long)st.st_ino;
}

/* Fills at most max pids, outermost (the node's) first. */
static int nested_pids(const char *who, unsigned *pids, int max)
{
	char path[96], text[4096], *line, *end;
	int count = 0;

	snprintf(path, sizeof path, STANDIN "/proc/%s/status", who);
	if (!read_file(path, text, sizeof text) || !(line = strstr(text, "\nNSpid:")))
		return 0;
	for (line += 7; count < max; line = end) {
		unsigned long pid = strtoul(line, &end, 10);
		if (end == line || memchr(line, '\n', end - line))
			break;
		pids[count++] = pid;
	}
	return count;
}

/* The pid to show for a client with that node pid; 0: not visible from here (the real driver shortens the list). */
static unsigned visible_pid(unsigned pid)
{
	static __thread unsigned long host, mine;
	unsigned theirs[32], own[32];
	char who[16], path[96], text[32];
	int depth, level;

	read_file(STANDIN "/pidns", text, sizeof text);
	host = strtoul(text, NULL, 10);
	mine = namespace_of("/proc/self/ns/pid");
	if (!host || host == mine)
		return pid;
	snprintf(who, sizeof who, "%u", pid);
	snprintf(path, sizeof path, STANDIN "/proc/%u/ns/pid", pid);
	level = nested_pids("self", own, 32);
	depth = nested_pids(who, theirs, 32);
	return level > 0 && depth >= level && namespace_of(path) == mine ? theirs[level - 1] : 0;
}

/* ---- who holds what --------------------------------------------------------------------------------------------- */

static unsigned parse_kinds(const char *text)
{
	return (strstr(text, "compute") ? COMPUTE : 0) | (strstr(text, "graphics") ? GRAPHICS : 0) |
	       (strstr(text, "mps") ? MPS : 0);
}

static int read_allocation(const char *name, struct allocation *a)
{
	char path[PATH_MAX], text[512], kinds[64] = "";
	unsigned long long start;
	ssize_t n;
	int fd;

	memset(a, 0, sizeof *a);
	snprintf(a->name, sizeof a->name, "%s", name);
	snprintf(path, sizeof path, STANDIN "/alloc/%s", name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, text, sizeof text - 1);
	text[n > 0 ? n : 0] = 0;
	/* Shared here, exclusive there: two readers never take each other for a holder. */
	a->held = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
	close(fd);
	if (sscanf(text, "import %u %llu %255s", &a->pid, &start, a->exporter) == 3)
		return 1;
	if (sscanf(text, "%u %llu %u %llu %63s", &a->pid, &start, &a->minor, &a->mib, kinds) != 5)
		return 0;
	a->kinds = parse_kinds(kinds);
	return 1;
}

static long long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* Milliseconds since the last holder went, counted from when this was first noticed. */
static long long freed_since(const char *name)
{
	char path[PATH_MAX], text[32];
	long long now = now_ms(), then = 0;
	int fd;

	snprintf(path, sizeof path, STANDIN "/alloc/%s.freed", name);
	if (read_file(path, text, sizeof text) && (then = atoll(text)))
		return now - then;
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd >= 0) {
		snprintf(text, sizeof text, "%lld\n", now);
		if (write(fd, text, strlen(text)) < 0)
			unlink(path);
		close(fd);
	}
	return 0;
}

/* What the driver has not given back yet of an allocation without holder. */
static unsigned long long draining_mib(const struct allocation *a)
{
	double delay = number("free_delay_ms", a->minor, 0), rate = number("fall_mib_per_ms", a->minor, 0);
	double step = number("fall_step_mib", a->minor, 1), leak = number("leak_mib", a->minor, 0);
	double left = 0, since = freed_since(a->name);

	if (since < delay)
		return a->mib;
	if (rate > 0)
		left = a->mib - step * (long long)((since - delay) * rate / (step > 0 ? step : 1));
	if (left < leak)
		left = leak;
	return left > a->mib ? a->mib : left < 0 ? 0 : (unsigned long long)left;
}

static void add_client(struct usage *u, unsigned kinds, unsigned pid, unsigned long long bytes)
{
	for (int list = 0; list < 3; list++) {
		size_t i = 0;

		if (!(kinds & (1u << list)))
			continue;
		while (i < u->count[list] && u->clients[list][i].pid != pid)
			i++;
		if (i == MAX_CLIENTS)
			continue;
		if (i == u->count[list])
			u->clients[list][u->count[list]++] = (struct client){ pid, 0 };
		u->clients[list][i].bytes += bytes;
	}
}

static unsigned live_importer(const char *exporter, struct allocation *all, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (all[i].held && !strcmp(all[i].exporter, exporter))
			return all[i].pid;
	return 0;
}

/* Lines "extra_clients[.MINOR] PID:MIB:KINDS ..." are put into the lists, whatever they say. */
static void add_extra_clients(struct usage *u, int minor)
{
	char value[4096], *save, *word, kinds[64];
	unsigned long long mib;
	unsigned pid;

	if (!control("extra_clients", minor, value, sizeof value))
		return;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save))
		if (sscanf(word, "%u:%llu:%63s", &pid, &mib, kinds) == 3)
			add_client(u, parse_kinds(kinds), pid, mib * MIB);
}

static int hidden(unsigned pid, int minor)
{
	char value[1024], *save, *word;

	if (!control("hide_clients", minor, value, sizeof value))
		return 0;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save))
		if (!strcmp(word, "*") || strtoul(word, NULL, 10) == pid)
			return 1;
	return 0;
}

static void account(struct usage *u, const struct allocation *a, struct allocation *all, size_t count)
{
	unsigned pid = a->pid, kinds = a->kinds, shown, importer;
	unsigned long long mib = a->mib;

	if (!a->held && (importer = live_importer(a->name, all, count)))
		pid = importer, kinds = COMPUTE;
	else if (!a->held) {
		mib = draining_mib(a);
		if (!mib || !number("list_draining", a->minor, 0))
			kinds = 0;
	}
	u->used += (mib + (kinds ? (unsigned long long)number("context_mib", a->minor, 0) : 0)) * MIB;
	shown = kinds && !hidden(pid, a->minor) ? visible_pid(pid) : 0;
	if (shown)
		add_client(u, kinds, shown, mib * MIB);
}

static struct usage *read_usage(const struct gpu *gpu)
{
	struct usage *u = calloc(1, sizeof *u);
	struct allocation *all = NULL;
	size_t count = 0, room = 0;
	struct dirent *entry;
	DIR *dir = opendir(STANDIN "/alloc");

	while (u && dir && (entry = readdir(dir))) {
		if (strchr(entry->d_name, '.'))                         /* ".", "..", temporary and .freed files */
			continue;
		if (count == room) {
			room = room ? 2 * room : 64;
			all = realloc(all, room * sizeof *all);
			if (!all)
				abort();
		}
		count += read_allocation(entry->d_name, &all[count]);
	}
	for (size_t i = 0; u && i < count; i++)
		if (!*all[i].exporter && all[i].minor == gpu->minor)
			account(u, &all[i], all, count);
	if (u) {
		u->used += (unsigned long long)number("ghost_mib", gpu->minor, 0) * MIB;
		add_extra_clients(u, gpu->minor);
	}
	if (dir)
		closedir(dir);
	free(all);
	return u;
}

/* ---- life of the library ---------------------------------------------------------------------------------------- */

static void close_nodes(void)
{
	for (unsigned i = 0; i < gpu_count; i++)
		if (gpus[i].fd >= 0)
			close(gpus[i].fd), gpus[i].fd = -1;
	if (control_fd >= 0)
		close(control_fd), control_fd = -1;
	gpu_count = 0;
}

static int open_nodes(void)
{
	char text[8192], *save, *line;

	if (!read_file(STANDIN "/gpus", text, sizeof text))
		return DRIVER_NOT_LOADED;
	control_fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC | O_NOCTTY);
	if (control_fd < 0)
		return DRIVER_NOT_LOADED;
	for (line = strtok_r(text, "\n", &save); line && gpu_count < MAX_GPUS; line = strtok_r(NULL, "\n", &save)) {
		struct gpu *g = &gpus[gpu_count];

		if (sscanf(line, "%u %95s %31s %llu %63s %95[^\n]", &g->minor, g->uuid, g->pci, &g->total_mib, g->node,
			   g->name) != 6)
			continue;
		g->fd = open(g->node, O_RDWR | O_CLOEXEC | O_NOCTTY);
		if (g->fd >= 0 || number("lost", g->minor, 0))          /* a GPU whose node is missing is not seen at all */
			gpu_count++;
	}
	return OK;
}

static int initialise(const char *function)
{
	int result = misbehave(function, -1);

	if (result)
		return result;
	pthread_mutex_lock(&lock);
	if (!references)
		result = open_nodes();
	if (result)
		close_nodes();
	else
		references++;
	pthread_mutex_unlock(&lock);
	return result;
}

EXPORT int nvmlInit(void) { return initialise("nvmlInit"); }
EXPORT int nvmlInit_v2(void) { return initialise("nvmlInit_v2"); }
EXPORT int nvmlInitWithFlags(unsigned flags) { (void)flags; return initialise("nvmlInitWithFlags"); }

EXPORT int nvmlShutdown(void)
{
	int result = misbehave("nvmlShutdown", -1);

	if (result)
		return result;
	pthread_mutex_lock(&lock);
	if (!references)
		result = UNINITIALIZED;
	else if (!--references)
		close_nodes();
	pthread_mutex_unlock(&lock);
	return result;
}

EXPORT const char *nvmlErrorString(int result)
{
	static const char *const texts[] = {
		"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
		"Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
		"Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
		"Corrupted infoROM", "GPU is lost", "GPU requires restart",
		"The operating system has blocked the request.", "RM has detected an NVML/RM version mismatch.",
		"Device is currently in use", "Insufficient Memory", "No data",
	};

	return result >= 0 && (size_t)result < sizeof texts / sizeof *texts ? texts[result] : "Unknown Error";
}

static int begin(const char *function, const struct gpu *gpu)
{
	int result = misbehave(function, gpu ? (int)gpu->minor : -1);

	return result ? result : references ? OK : UNINITIALIZED;
}

#define SYSTEM_CALL() do { int r_ = begin(__func__, NULL); if (r_) return r_; } while (0)
#define DEVICE_CALL(gpu) \
	do { if (!(gpu)) return INVALID_ARGUMENT; int r_ = begin(__func__, gpu); if (r_) return r_; } while (0)

static int give_text(char *buffer, unsigned length, const char *text)
{
	if (!buffer)
		return INVALID_ARGUMENT;
	if (strlen(text) >= length)
		return INSUFFICIENT_SIZE;
	strcpy(buffer, text);
	return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned length)
{
	char version[80] = "580.159";

	SYSTEM_CALL();
	control("driver_version", -1, version, sizeof version);
	return give_text(buffer, length, version);
}

EXPORT int nvmlSystemGetNVMLVersion(char *buffer, unsigned length)
{
	SYSTEM_CALL();
	return give_text(buffer, length, "13.580.159");
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { SYSTEM_CALL(); *version = 13000; return OK; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { SYSTEM_CALL(); *version = 13000; return OK; }

EXPORT int nvmlSystemGetProcessName(unsigned pid, char *buffer, unsigned length)
{
	char path[64], comm[64];

	SYSTEM_CALL();
	snprintf(path, sizeof path, "/proc/%u/comm", pid);
	if (!read_file(path, comm, sizeof comm))
		return NOT_FOUND;
	comm[strcspn(comm, "\n")] = 0;
	return give_text(buffer, length, comm);
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetCount(unsigned *count) { SYSTEM_CALL(); *count = gpu_count; return OK; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { SYSTEM_CALL(); *count = gpu_count; return OK; }

static int by_index(const char *function, unsigned index, struct gpu **gpu)
{
	int result = begin(function, index < gpu_count ? &gpus[index] : NULL);

	if (result)
		return result;
	if (index >= gpu_count)
		return INVALID_ARGUMENT;
	*gpu = &gpus[index];
	return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, struct gpu **gpu) { return by_index(__func__, index, gpu); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) { return by_index(__func__, index, gpu); }

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **gpu)
{
	SYSTEM_CALL();
	for (unsigned i = 0; i < gpu_count; i++)
		if (uuid && !strcasecmp(uuid, gpus[i].uuid))
			return by_index(__func__, i, gpu);
	return NOT_FOUND;
}

static void parse_pci(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
	*domain = *bus = *device = 0;
	if (sscanf(text, "%x:%x:%x", domain, bus, device) != 3)
		*domain = 0, sscanf(text, "%x:%x", bus, device);
}

static int by_pci(const char *function, const char *pci, struct gpu **gpu)
{
	unsigned want[3], have[3];
	int result = begin(function, NULL);

	if (result)
		return result;
	if (!pci)
		return INVALID_ARGUMENT;
	parse_pci(pci, &want[0], &want[1], &want[2]);
	for (unsigned i = 0; i < gpu_count; i++) {
		parse_pci(gpus[i].pci, &have[0], &have[1], &have[2]);
		if (!memcmp(want, have, sizeof want))
			return by_index(function, i, gpu);
	}
	return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *pci, struct gpu **gpu) { return by_pci(__func__, pci, gpu); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, struct gpu **gpu) { return by_pci(__func__, pci, gpu); }

EXPORT int nvmlDeviceGetIndex(struct gpu *gpu, unsigned *index) { DEVICE_CALL(gpu); *index = gpu - gpus; return OK; }
EXPORT int nvmlDeviceGetMinorNumber(struct gpu *gpu, unsigned *minor)
{
	DEVICE_CALL(gpu);
	*minor = gpu->minor;
	return OK;
}

EXPORT int nvmlDeviceGetName(struct gpu *gpu, char *buffer, unsigned length)
{
	DEVICE_CALL(gpu);
	return give_text(buffer, length, gpu->name);
}

EXPORT int nvmlDeviceGetUUID(struct gpu *gpu, char *buffer, unsigned length)
{
	DEVICE_CALL(gpu);
	return give_text(buffer, length, gpu->uuid);
}

EXPORT int nvmlDeviceGetSerial(struct gpu *gpu, char *buffer, unsigned length)
{
	(void)buffer, (void)length;
	DEVICE_CALL(gpu);
	return NOT_SUPPORTED;
}

static void fill_pci_v3(const struct gpu *gpu, struct pci_v3 *pci)
{
	memset(pci, 0, sizeof *pci);
	parse_pci(gpu->pci, &pci->domain, &pci->bus, &pci->device);
	pci->device_id = 0x233510de, pci->subsystem_id = 0x18be10de;
	snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
	snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
		 pci->device & 0xff);
}

EXPORT int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_v3 *pci)
{
	DEVICE_CALL(gpu);
	fill_pci_v3(gpu, pci);
	return OK;
}

static int give_pci_v2(const struct gpu *gpu, struct pci_v2 *pci)
{
	struct pci_v3 full;

	fill_pci_v3(gpu, &full);
	memset(pci, 0, sizeof *pci);
	memcpy(pci->bus_id, full.bus_id_legacy, sizeof pci->bus_id);
	pci->domain = full.domain, pci->bus = full.bus, pci->device = full.device;
	pci->device_id = full.device_id, pci->subsystem_id = full.subsystem_id;
	return OK;
}

EXPORT int nvmlDeviceGetPciInfo(struct gpu *gpu, struct pci_v2 *pci) { DEVICE_CALL(gpu); return give_pci_v2(gpu, pci); }
EXPORT int nvmlDeviceGetPciInfo_v2(struct gpu *gpu, struct pci_v2 *pci)
{
	DEVICE_CALL(gpu);
	return give_pci_v2(gpu, pci);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int mig_on(const struct gpu *gpu) { return number("mig", gpu->minor, 0) != 0; }

static int figures(const struct gpu *gpu, struct memory_v2 *memory)
{
	struct usage *u;

	if (mig_on(gpu))
		return NOT_SUPPORTED;
	u = read_usage(gpu);
	if (!u)
		return UNKNOWN;
	memory->total = gpu->total_mib * MIB;
	memory->reserved = (unsigned long long)number("reserve_mib", gpu->minor, 615) * MIB;
	memory->used = u->used;
	memory->free = memory->total > memory->reserved + u->used ? memory->total - memory->reserved - u->used : 0;
	free(u);
	return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory_v1 *memory)
{
	struct memory_v2 all;
	int result;

	DEVICE_CALL(gpu);
	result = figures(gpu, &all);
	if (result)
		return result;
	*memory = (struct memory_v1){ all.total, all.free, all.used + all.reserved };   /* v1 counts the reserve as used */
	return OK;
}

#ifndef OLD_DRIVER
EXPORT int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory_v2 *memory)
{
	DEVICE_CALL(gpu);
	if (memory->version != 0x02000028)
		return 25;                                              /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
	return figures(gpu, memory);
}
#endif

EXPORT int nvmlDeviceGetBAR1MemoryInfo(struct gpu *gpu, struct memory_v1 *bar1)
{
	DEVICE_CALL(gpu);
	bar1->total = 262144 * MIB;
	bar1->used = (unsigned long long)number("bar1_used_mib", gpu->minor, 1) * MIB;
	bar1->free = bar1->total - bar1->used;
	return OK;
}

/* ---- client lists ----------------------------------------------------------------------------------------------- */

static int memory_hidden(const struct gpu *gpu, unsigned pid)
{
	char value[1024], *save, *word;

	if (mig_on(gpu))
		return 1;
	if (!control("memory_na", gpu->minor, value, sizeof value))
		return 0;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save))
		if (!strcmp(word, "*") || strtoul(word, NULL, 10) == pid)
			return 1;
	return 0;
}

/* "grow N": the first grow_times fetches of this process (default: all) find N clients more than the size call. */
static void grow(struct usage *u, int list, const struct gpu *gpu)
{
	static unsigned done;
	unsigned more = number("grow", gpu->minor, 0);

	if (!more || __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED) >= number("grow_times", gpu->minor, 1e9))
		return;
	for (unsigned i = 0; i < more; i++)
		add_client(u, 1u << list, 4190000 + i, MIB);
}

static int give_list(const char *function, int list, struct gpu *gpu, unsigned *count, void *out, size_t size)
{
	struct usage *u;
	int result;

	if (!gpu || !count)
		return INVALID_ARGUMENT;
	result = begin(function, gpu);
	if (result)
		return result;
	u = read_usage(gpu);
	if (!u)
		return UNKNOWN;
	if (out)
		grow(u, list, gpu);
	result = u->count[list] > (out ? *count : 0) ? INSUFFICIENT_SIZE : OK;
	for (size_t i = 0; out && !result && i < u->count[list]; i++) {
		struct client *c = &u->clients[list][i];
		struct process_v2 *slot = (struct process_v2 *)((char *)out + i * size);

		slot->pid = c->pid;
		slot->bytes = memory_hidden(gpu, c->pid) ? NOT_AVAILABLE : c->bytes;
		if (size == sizeof *slot)
			slot->gpu_instance = slot->compute_instance = ~0u;
	}
	*count = u->count[list];
	free(u);
	return result;
}

#define LIST(symbol, list, type) \
	EXPORT int symbol(struct gpu *gpu, unsigned *count, type *out) \
	{ return give_list(#symbol, list, gpu, count, out, sizeof(type)); }

LIST(nvmlDeviceGetComputeRunningProcesses, 0, struct process_v1)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 0, struct process_v2)
LIST(nvmlDeviceGetGraphicsRunningProcesses, 1, struct process_v1)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 1, struct process_v2)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, 2, struct process_v1)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 2, struct process_v2)
#ifndef OLD_DRIVER
LIST(nvmlDeviceGetComputeRunningProcesses_v3, 0, struct process_v2)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 1, struct process_v2)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 2, struct process_v2)
#endif

/* ---- modes and links -------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending)
{
	DEVICE_CALL(gpu);
	if (number("mig", gpu->minor, 0) < 0)                       /* -1: a GPU that knows no MIG */
		return NOT_SUPPORTED;
	*current = *pending = mig_on(gpu);
	return OK;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count) { DEVICE_CALL(gpu); *count = 7; return OK; }

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct gpu **mig)
{
	(void)index, (void)mig;
	DEVICE_CALL(gpu);
	return NOT_FOUND;
}

EXPORT int nvmlDeviceGetComputeMode(struct gpu *gpu, unsigned *mode)
{
	DEVICE_CALL(gpu);
	*mode = number("compute_mode", gpu->minor, 0);
	return OK;
}

static void persistence_path(const struct gpu *gpu, char *path, size_t size)
{
	snprintf(path, size, STANDIN "/state/persistence.%u", gpu->minor);
}

EXPORT int nvmlDeviceGetPersistenceMode(struct gpu *gpu, unsigned *mode)
{
	char path[128], text[16];

	DEVICE_CALL(gpu);
	persistence_path(gpu, path, sizeof path);
	*mode = read_file(path, text, sizeof text) ? atoi(text) != 0 : number("persistence", gpu->minor, 0) != 0;
	return OK;
}

EXPORT int nvmlDeviceSetPersistenceMode(struct gpu *gpu, unsigned mode)
{
	char path[128];
	int fd, good;

	DEVICE_CALL(gpu);
	persistence_path(gpu, path, sizeof path);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (fd < 0)
		return 4;                                               /* NVML_ERROR_NO_PERMISSION */
	good = write(fd, mode ? "1\n" : "0\n", 2) == 2;
	close(fd);
	return good ? OK : UNKNOWN;
}

EXPORT int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field_value *values)
{
	DEVICE_CALL(gpu);
	for (int i = 0; i < count; i++) {
		double action = number("recovery_action", gpu->minor, 0);

		values[i].result = values[i].field == 230 && action >= 0 ? OK : NOT_SUPPORTED;
		values[i].timestamp = now_ms() * 1000, values[i].latency_us = 0;
		values[i].type = 1;                                     /* NVML_VALUE_TYPE_UNSIGNED_INT */
		values[i].value.ull = 0;
		if (!values[i].result)
			values[i].value.ui = (unsigned)action;
	}
	return OK;
}

/* "nvlink 50:51 ...": link 0 of each of the two is up and leads to the other. */
static const struct gpu *linked_to(const struct gpu *gpu)
{
	char value[256], *save, *word;
	unsigned a, b, other;

	if (!control("nvlink", -1, value, sizeof value))
		return NULL;
	for (word = strtok_r(value, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
		if (sscanf(word, "%u:%u", &a, &b) != 2 || (a != gpu->minor && b != gpu->minor))
			continue;
		other = a == gpu->minor ? b : a;
		for (unsigned i = 0; i < gpu_count; i++)
			if (gpus[i].minor == other)
				return &gpus[i];
	}
	return NULL;
}

EXPORT int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *active)
{
	DEVICE_CALL(gpu);
	if (link >= 36)
		return INVALID_ARGUMENT;
	if (!control("nvlink", -1, (char[256]){ 0 }, 256))
		return NOT_SUPPORTED;
	*active = !link && linked_to(gpu);
	return OK;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct gpu *gpu, unsigned link, struct pci_v3 *pci)
{
	const struct gpu *other;

	DEVICE_CALL(gpu);
	other = link ? NULL : linked_to(gpu);
	if (!other)
		return NOT_SUPPORTED;
	fill_pci_v3(other, pci);
	return OK;
}
