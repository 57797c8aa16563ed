/* A holder that moves faster than anybody looks: `restless MODE DEVICE MINOR MIB` opens DEVICE and nvidia-uvm, has MIB of
 * memory by the stand-in's books (../nvml/nvml.c), prints "ready", and then
 *   chain   every process forks the next one and ends
 *   move    the descriptor gets a new number all the time
 *   tasks   a table that only one thread has goes from thread to thread
 * until it is killed. For `move` and `tasks` the pid stays.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACK 65536
#define THREAD (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM)

static const char *device, *minor, *mib;
static char *stacks;
static unsigned started;

static void ready(void)
{
	if (write(1, "ready\n", 6) != 6)
		_exit(4);
}

static int open_or_die(const char *path, int flags)
{
	int fd = open(path, flags, 0666);
	if (fd < 0) {
		perror(path);
		_exit(3);
	}
	return fd;
}

static unsigned long long start_time(void)
{
	char text[2048] = {0};
	int fd = open_or_die("/proc/self/stat", O_RDONLY);
	if (read(fd, text, sizeof text - 1) < 0)
		_exit(5);
	close(fd);
	const char *at = strrchr(text, ')') + 2;
	for (int field = 3; field < 22; field++)
		at = strchr(at, ' ') + 1;
	return strtoull(at, NULL, 10);
}

/* A record of memory: locked for as long as anybody has this descriptor. */
static void book(void)
{
	char link[32] = {0}, name[128], text[128];
	if (readlink("/run/nvidia-standin/proc/self", link, sizeof link - 1) < 0)
		_exit(6);
	unsigned long long since = start_time();
	snprintf(name, sizeof name, "/run/nvidia-standin/alloc/%s-%llu-%s-0", link, since, link);
	int fd = open_or_die(name, O_RDWR | O_CREAT);
	int length = snprintf(text, sizeof text, "%s %llu %s %s compute\n", link, since, minor, mib);
	if (write(fd, text, length) != length || flock(fd, LOCK_EX))
		_exit(7);
}

static int open_device(void)
{
	open_or_die("/dev/nvidia-uvm", O_RDWR | O_NOCTTY);
	int fd = open_or_die(device, O_RDWR | O_NOCTTY);
	book();
	return fd;
}

static void chain(void)
{
	open_device();
	signal(SIGCHLD, SIG_IGN);
	ready();
	close(0);
	close(1);
	close(2);
	for (;;)
		if (fork() > 0)
			_exit(0);
}

static void move(void)
{
	int fd = open_device();
	ready();
	for (unsigned seed = 1;;) {
		seed = seed * 1103515245 + 12345;
		int next = fcntl(fd, F_DUPFD, 10 + (seed >> 16) % 900);
		close(fd);
		fd = next;
	}
}

static int next_task(void *unused)
{
	char *stack = stacks + (__atomic_fetch_add(&started, 1, __ATOMIC_SEQ_CST) % 64 + 1) * STACK;
	clone(next_task, stack - 64, THREAD, unused);
	syscall(SYS_exit, 0);
	return 0;
}

static int first_task(void *unused)
{
	unshare(CLONE_FILES);
	open_device();
	ready();
	return next_task(unused);
}

static void tasks(void)
{
	stacks = mmap(NULL, 70 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	clone(first_task, stacks + 69 * STACK, THREAD, NULL);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	device = argv[2];
	minor = argv[3];
	mib = argv[4];
	if (!strcmp(argv[1], "chain"))
		chain();
	else if (!strcmp(argv[1], "move"))
		move();
	else if (!strcmp(argv[1], "tasks"))
		tasks();
	return 2;
}
