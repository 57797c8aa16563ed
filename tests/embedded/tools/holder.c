/*
 * A process that holds stand-in GPUs in every way that has been seen in the field (see Holder in node.py).
 *
 * HOLDER_SPEC: lines "KEY VALUE", bytes as %XX where needed.  HOLDER_READY_FD: a datagram socket on which every process
 * of the tree says "role=R pid=P node_pid=N tid=T start=S", or "error=TEXT", when it is complete.  The command line is
 * whatever it was executed with.  SIGUSR1 pulls the trigger (touch, fault, exit, fork).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STANDIN "/run/nvidia-standin"
#define MAX_LINES 128
#define MAX_FDS 200

static struct { char *key, *value; } spec[MAX_LINES];
static int spec_count, ready_fd = -1;
static int held[MAX_FDS], held_count;
static char *fault_page;
static int faulter;
static const char *role = "holder";

/* ---- specification ---------------------------------------------------------------------------------------------- */

static char *decode(char *text)
{
	char *out = text, hex[3] = "";

	for (char *in = text; *in; in++, out++) {
		*out = *in;
		if (*in == '%' && in[1] && in[2]) {
			hex[0] = in[1], hex[1] = in[2];
			*out = (char)strtol(hex, NULL, 16);
			in += 2;
		}
	}
	*out = 0;
	return text;
}

static void read_spec(void)
{
	char *text = strdup(getenv("HOLDER_SPEC") ? getenv("HOLDER_SPEC") : ""), *save, *line, *space;

	ready_fd = getenv("HOLDER_READY_FD") ? atoi(getenv("HOLDER_READY_FD")) : -1;
	for (line = strtok_r(text, "\n", &save); line && spec_count < MAX_LINES; line = strtok_r(NULL, "\n", &save)) {
		space = strchr(line, ' ');
		if (space)
			*space = 0;
		spec[spec_count].key = line;
		spec[spec_count++].value = space ? decode(space + 1) : "";
	}
}

static const char *option(const char *key)
{
	for (int i = 0; i < spec_count; i++)
		if (!strcmp(spec[i].key, key))
			return spec[i].value;
	return NULL;
}

static int amount(const char *key) { return option(key) ? atoi(option(key)) : 0; }

/* ---- reports ---------------------------------------------------------------------------------------------------- */

static void say(const char *format, ...)
{
	char text[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	if (ready_fd >= 0)
		send(ready_fd, text, strlen(text), MSG_NOSIGNAL);
}

static void fail(const char *what, const char *object)
{
	int error = errno;

	say("error=cannot %s %s: %s", what, object, strerror(error));
	dprintf(2, "holder: cannot %s %s: %s\n", what, object, strerror(error));
	_exit(120);
}

/* The pid in the node's PID namespace: what "self" is in a procfs of that namespace. */
static int node_pid(void)
{
	char text[32] = "";

	if (readlink(STANDIN "/proc/self", text, sizeof text - 1) <= 0)
		return getpid();
	return atoi(text);
}

static unsigned long long start_time(void)
{
	char text[2048] = "", *end;
	unsigned long long start = 0;
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);

	if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
		fail("read", "/proc/self/stat");
	close(fd);
	end = strrchr(text, ')');
	if (!end || sscanf(end + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
			   &start) != 1)
		fail("parse", "/proc/self/stat");
	return start;
}

static void report(const char *who)
{
	say("role=%s pid=%d node_pid=%d tid=%d start=%llu", who, getpid(), node_pid(), gettid(), start_time());
}

/* ---- ways of holding -------------------------------------------------------------------------------------------- */

static int keep(int fd)
{
	if (held_count == MAX_FDS)
		errno = EMFILE, fail("keep", "a descriptor");
	return held[held_count++] = fd;
}

static void open_nodes(void)
{
	for (int i = 0; i < spec_count; i++)
		if (!strcmp(spec[i].key, "open") && keep(open(spec[i].value, O_RDWR | O_NOCTTY)) < 0)
			fail("open", spec[i].value);
}

static void map_nodes(void)
{
	for (int i = 0; i < spec_count; i++) {
		if (strcmp(spec[i].key, "map"))
			continue;
		int fd = open(spec[i].value, O_RDWR | O_NOCTTY);
		if (fd < 0)
			fail("open", spec[i].value);
		if (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) == MAP_FAILED)
			fail("map", spec[i].value);
		close(fd);
	}
}

static void lock_record(const char *text, int number)
{
	char name[64], temporary[PATH_MAX], path[PATH_MAX];
	int fd;

	snprintf(name, sizeof name, "%d-%llu-%d-%d", node_pid(), start_time(), gettid(), number);
	snprintf(temporary, sizeof temporary, STANDIN "/alloc/.%s", name);
	snprintf(path, sizeof path, STANDIN "/alloc/%s", name);
	fd = open(temporary, O_RDWR | O_CREAT | O_EXCL, 0666);
	if (fd < 0)
		fail("create", temporary);
	fchmod(fd, 0666);
	if (write(fd, text, strlen(text)) < 0 || flock(fd, LOCK_EX) || rename(temporary, path))
		fail("write", path);
	keep(fd);
}

/* "alloc MINOR:MIB:KINDS" and "import NAME". */
static void allocate(void)
{
	char text[512], kinds[64];
	unsigned minor;
	unsigned long long mib;

	for (int i = 0; i < spec_count; i++) {
		if (!strcmp(spec[i].key, "alloc") && sscanf(spec[i].value, "%u:%llu:%63s", &minor, &mib, kinds) == 3)
			snprintf(text, sizeof text, "%d %llu %u %llu %s\n", node_pid(), start_time(), minor, mib, kinds);
		else if (!strcmp(spec[i].key, "import"))
			snprintf(text, sizeof text, "import %d %llu %s\n", node_pid(), start_time(), spec[i].value);
		else
			continue;
		lock_record(text, i);
	}
}

static void send_fds(int socket)
{
	char room[CMSG_SPACE(sizeof held)] = "";
	struct iovec io = { "x", 1 };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = room,
			    .msg_controllen = CMSG_SPACE(held_count * sizeof(int)) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(held_count * sizeof(int));
	memcpy(CMSG_DATA(c), held, held_count * sizeof(int));
	if (sendmsg(socket, &m, MSG_NOSIGNAL) < 0)
		fail("send", "descriptors");
}

static void receive_fds(int socket)
{
	char room[CMSG_SPACE(sizeof held)] = "", byte;
	struct iovec io = { &byte, 1 };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room };

	if (recvmsg(socket, &m, 0) <= 0)
		fail("receive", "descriptors");
}

/* All descriptors exist only in the queue of a socket that nobody reads. */
static void put_in_flight(void)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
		fail("make", "a socket pair");
	send_fds(pair[0]);
	while (held_count)
		close(held[--held_count]);
}

static struct sockaddr_un address(const char *path)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };

	snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
	return a;
}

static void pass_descriptors(void)
{
	struct sockaddr_un a;
	int fd;

	if (!option("listen") && !option("connect"))
		return;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (option("listen")) {
		a = address(option("listen"));
		if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 1))
			fail("listen on", option("listen"));
		report("listening");
		receive_fds(accept(fd, NULL, NULL));
		role = "received";
	} else {
		a = address(option("connect"));
		if (connect(fd, (struct sockaddr *)&a, sizeof a))
			fail("connect to", option("connect"));
		send_fds(fd);
	}
	close(fd);
}

static void prepare_fault(void)
{
	int fd;

	if (!option("fault"))
		return;
	fd = open(option("fault"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, 65536))
		fail("open", option("fault"));
	fault_page = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fault_page == MAP_FAILED)
		fail("map", option("fault"));
	close(fd);
}

static void acquire(void)
{
	open_nodes();
	map_nodes();
	allocate();
	prepare_fault();
	if (amount("inflight"))
		put_in_flight();
}

/* ---- life and death --------------------------------------------------------------------------------------------- */

static void set_comm(const char *key)
{
	if (option(key))
		prctl(PR_SET_NAME, option(key));
}

static void take_user(void)
{
	int uid = amount("uid");

	if (uid && (setresgid(uid, uid, uid) || setresuid(uid, uid, uid)))
		fail("become", option("uid"));
}

static char state_of(int tid)
{
	char path[64], text[512] = "", *end;
	int fd;

	snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
		fail("read", path);
	close(fd);
	end = strrchr(text, ')');
	return end ? end[2] : 0;
}

static void *fault(void *unused)
{
	__atomic_store_n(&faulter, gettid(), __ATOMIC_RELEASE);
	fault_page[0] = 1;
	return unused;
}

/* In D state for the thaw, and not for a moment of something else. */
static int waits_for_thaw(int tid)
{
	char path[64], text[128] = "";
	int fd;

	if (state_of(tid) != 'D')
		return 0;
	snprintf(path, sizeof path, "/proc/self/task/%d/wchan", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof text - 1) < 0)
		fail("read", path);
	close(fd);
	return strstr(text, "rwsem") != NULL;
}

/* A writer of the memory map, queued behind the stuck fault, is what blocks every reader of cmdline and maps. */
static void *unmap(void *unused)
{
	int tid;

	while (!(tid = __atomic_load_n(&faulter, __ATOMIC_ACQUIRE)) || !waits_for_thaw(tid))
		usleep(500);
	munmap(fault_page, 4096);
	return unused;
}

static void start_thread(void *(*run)(void *), void *argument)
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 65536);
	errno = pthread_create(&thread, &attributes, run, argument);
	if (errno)
		fail("start", "a thread");
}

static void child_life(void);

static void pull_trigger(void)
{
	if (fault_page) {
		start_thread(unmap, NULL);
		start_thread(fault, NULL);
	}
	if (option("touch"))
		close(open(option("touch"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
	if (amount("fork_on_trigger") && !fork())
		child_life();
	if (amount("exit_on_trigger"))
		_exit(0);
}

static sigset_t awaited(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	if (option("term_ms"))
		sigaddset(&set, SIGTERM);
	return set;
}

static void wait_for_signals(void)
{
	sigset_t set = awaited();
	struct timespec delay = { amount("term_ms") / 1000, amount("term_ms") % 1000 * 1000000L };

	for (;;)
		switch (sigwaitinfo(&set, NULL)) {
		case SIGUSR1:
			pull_trigger();
			break;
		case SIGTERM:
			while (nanosleep(&delay, &delay) && errno == EINTR)
				;
			_exit(0);
		}
}

static void prepare_signals(void)
{
	sigset_t set = awaited();

	sigprocmask(SIG_SETMASK, &set, NULL);
	signal(SIGTERM, amount("ignore_term") ? SIG_IGN : SIG_DFL);
	signal(SIGHUP, amount("ignore_hup") ? SIG_IGN : SIG_DFL);
}

static void make_children(const char *key, void (*life)(void))
{
	for (int n = amount(key); n > 0; n--) {
		pid_t pid = fork();
		if (pid < 0)
			fail("fork", key);
		if (!pid)
			life();
	}
}

static void grandchild_life(void)
{
	set_comm("grandchild_comm");
	report("grandchild");
	wait_for_signals();
}

static void child_life(void)
{
	if (amount("child_setsid"))
		setsid();
	if (amount("child_ignore_term"))
		signal(SIGTERM, SIG_IGN);
	set_comm("child_comm");
	make_children("grandchildren", grandchild_life);
	report("child");
	wait_for_signals();
}

static void crowd_life(void)
{
	close(ready_fd);
	wait_for_signals();
}

static void zombie_life(void)
{
	_exit(0);
}

static void *idle_thread(void *unused)
{
	for (;;)
		pause();
	return unused;
}

/* The last step of whichever thread speaks for the process. */
static void settle(void)
{
	make_children("children", child_life);
	make_children("zombies", zombie_life);
	make_children("crowd", crowd_life);
	for (int n = amount("threads"); n > 0; n--)
		start_thread(idle_thread, NULL);
	take_user();
	pass_descriptors();
	report(role);
	if (amount("die"))
		raise(SIGKILL);
	if (amount("stop"))
		raise(SIGSTOP);
	wait_for_signals();
}

static void *survivor(void *unused)
{
	while (state_of(getpid()) != 'Z')
		usleep(500);
	settle();
	return unused;
}

/* The descriptors are in this thread's own table only. */
static void *private_table(void *unused)
{
	if (unshare(CLONE_FILES))
		fail("unshare", "files");
	acquire();
	settle();
	return unused;
}

static void body(void)
{
	const char *how = option("mode") ? option("mode") : "plain";

	set_comm("comm");
	prepare_signals();
	if (amount("setsid"))
		setsid();
	if (!strcmp(how, "private-table")) {
		start_thread(private_table, NULL);
		idle_thread(NULL);
	}
	acquire();
	if (!strcmp(how, "dead-leader")) {
		start_thread(survivor, NULL);
		syscall(SYS_exit, 0);
	}
	settle();
}

/* A supervisor that restarts its child whenever it dies, "respawn N" times (-1: for ever). */
static void supervise(int rounds)
{
	set_comm("supervisor_comm");
	report("supervisor");
	for (;;) {
		pid_t pid = fork();
		if (pid < 0)
			fail("fork", "the supervised process");
		if (!pid) {
			body();
		}
		while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
			;
		if (rounds >= 0 && !rounds--)
			_exit(0);
	}
}

static void detach(void)
{
	if (fork())
		_exit(0);
	setsid();
	if (fork())
		_exit(0);
}

int main(void)
{
	read_spec();
	signal(SIGUSR1, SIG_DFL);
	if (getpid() == 1)
		signal(SIGCHLD, SIG_IGN);                               /* as a container's init it reaps */
	if (amount("daemon"))
		detach();
	if (option("respawn"))
		supervise(amount("respawn"));
	body();
}
