/*
 * The embedded node's own processes (see node.py).
 *
 *   nodetool guard CONTROL_FD LIFE_FD CGROUP      outside the node: makes the namespaces, cleans up when LIFE_FD closes
 *   nodetool enter OPTIONS -- ARGV...             runs a command in namespaces and a cgroup (like nsenter), waits for it
 *   NODETOOL=serve:FD                             init of a node or a container: reaps, does what FD asks for
 *   NODETOOL=monitor:FD:CGROUP_PROCS_FD:UID_BASE  a container's monitor: makes its namespaces and init, waits for it
 *
 * Requests are datagrams of NUL-separated words; the answer is the errno in decimal.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORDS 256

static void die(const char *what)
{
	dprintf(2, "nodetool: cannot %s: %s\n", what, strerror(errno));
	_exit(125);
}

static void check(int result, const char *what)
{
	if (result < 0)
		die(what);
}

static void join_cgroup(int procs_fd)
{
	check(write(procs_fd, "0", 1), "join cgroup");
}

/* ---- serve: init of a node or container -------------------------------------------------------------------------- */

static int do_mount(char **w, int n)
{
	const char *data = n > 5 && *w[5] ? w[5] : NULL;

	return n < 5 ? EINVAL : mount(*w[1] ? w[1] : NULL, w[2], *w[3] ? w[3] : NULL, strtoul(w[4], NULL, 0), data) ? errno : 0;
}

static int do_pivot(const char *root)
{
	if (chdir(root) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
		return errno;
	return 0;
}

static void unblock_all(void)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

/* exec FD0_TARGET EXE ENV_COUNT ENV... ARGV...: becomes that program; answers first. */
static int do_exec(int control, char **w, int n, int passed)
{
	int envs = n > 2 ? atoi(w[2]) : -1;

	if (envs < 0 || 3 + envs >= n)
		return EINVAL;
	if (passed >= 0 && dup2(passed, 3) < 0)
		return errno;
	w[n] = NULL;
	check(send(control, "0", 1, MSG_NOSIGNAL), "answer");
	char **environment = calloc(envs + 1, sizeof(char *));
	memcpy(environment, w + 3, envs * sizeof(char *));
	unblock_all();
	execve(w[1], w + 3 + envs, environment);
	die("execute the container's init");
	return 0;
}

static int answer(int control, char **w, int n, int passed)
{
	if (!strcmp(w[0], "mount"))
		return do_mount(w, n);
	if (!strcmp(w[0], "umount") && n > 1)
		return umount2(w[1], MNT_DETACH) ? errno : 0;
	if (!strcmp(w[0], "open") && n > 1)
		return open(w[1], O_RDWR | O_NOCTTY | O_CLOEXEC) < 0 ? errno : 0;
	if (!strcmp(w[0], "hostname") && n > 1)
		return sethostname(w[1], strlen(w[1])) ? errno : 0;
	if (!strcmp(w[0], "pivot") && n > 1)
		return do_pivot(w[1]);
	if (!strcmp(w[0], "exec"))
		return do_exec(control, w, n, passed);
	return strcmp(w[0], "ping") ? EINVAL : 0;
}

static int receive(int fd, char *text, size_t size, int *passed)
{
	union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))]; } u;
	struct iovec io = { text, size };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = u.room, .msg_controllen = sizeof u.room };
	int got = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);

	*passed = -1;
	for (struct cmsghdr *c = got >= 0 ? CMSG_FIRSTHDR(&m) : NULL; c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			memcpy(passed, CMSG_DATA(c), sizeof *passed);
	return got;
}

static void request(int control)
{
	char text[65536], reply[16], *words[MAX_WORDS + 1];
	int passed, n = 0, got = receive(control, text, sizeof text - 1, &passed);

	if (got <= 0)
		_exit(0);                                               /* whoever built the node is gone: so are we */
	text[got] = 0;
	for (char *p = text; p < text + got && n < MAX_WORDS; p += strlen(p) + 1)
		words[n++] = p;
	snprintf(reply, sizeof reply, "%d", answer(control, words, n, passed));
	if (passed >= 0)
		close(passed);
	send(control, reply, strlen(reply), MSG_NOSIGNAL);
}

static void serve(int control)
{
	struct pollfd fds[2] = { { control, POLLIN, 0 }, { -1, POLLIN, 0 } };
	struct signalfd_siginfo info;
	sigset_t child;

	prctl(PR_SET_NAME, "init");
	fcntl(control, F_SETFD, FD_CLOEXEC);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_SETMASK, &child, NULL);
	fds[1].fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	check(send(control, "hello", 5, MSG_NOSIGNAL), "say hello");
	for (;;) {
		if (poll(fds, 2, -1) < 0)
			continue;
		if (fds[1].revents) {
			while (read(fds[1].fd, &info, sizeof info) > 0)
				;
			while (waitpid(-1, NULL, WNOHANG) > 0)
				;
		}
		if (fds[0].revents)
			request(control);
	}
}

/* The init is executed afresh, so that its command line is its own. */
static void become_init(int control, const char *title)
{
	char mode[32];
	char *argv[] = { (char *)title, NULL }, *envp[] = { mode, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", NULL };

	snprintf(mode, sizeof mode, "NODETOOL=serve:%d", control);
	fcntl(control, F_SETFD, 0);
	execve("/proc/self/exe", argv, envp);
	die("execute init");
}

static void private_mounts(void)
{
	check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make mounts private");
}

/* ---- monitor ---------------------------------------------------------------------------------------------------- */

static void write_id_map(pid_t pid, const char *file, int base)
{
	char path[64];
	int fd;

	snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	check(fd, path);
	if (dprintf(fd, "0 %d 65536\n", base) < 0)
		die(path);
	close(fd);
}

static void container_init(int control, int procs_fd, int go, int id_base)
{
	char byte;

	join_cgroup(procs_fd);
	close(procs_fd);
	check(read(go, &byte, 1), "wait for the id map");
	close(go);
	if (id_base)
		check(setresgid(0, 0, 0) | setresuid(0, 0, 0), "become the container's root");
	check(unshare(CLONE_NEWCGROUP), "unshare the cgroup namespace");  /* its root is the cgroup just joined */
	private_mounts();
	setsid();
	become_init(control, "/sbin/init");
}

/* id_base: 0 for a privileged container, else the first host uid of an unprivileged one. */
static int monitor(int control, int procs_fd, int id_base)
{
	struct clone_args args = { .exit_signal = SIGCHLD };
	int status, go[2];
	pid_t init;

	prctl(PR_SET_NAME, "lxc-start");
	check(unshare(CLONE_NEWNS), "unshare the monitor's mounts");  /* lxc.monitor.unshare = 1 */
	private_mounts();
	check(pipe2(go, O_CLOEXEC), "make a pipe");
	args.flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | (id_base ? CLONE_NEWUSER : 0);
	init = syscall(SYS_clone3, &args, sizeof args);
	check(init, "clone");
	if (!init)
		container_init(control, procs_fd, go[0], id_base);
	if (id_base) {
		write_id_map(init, "uid_map", id_base);
		write_id_map(init, "gid_map", id_base);
	}
	check(write(go[1], "g", 1), "start the init");
	close(go[0]);
	close(go[1]);
	close(procs_fd);
	close(control);
	while (waitpid(init, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* ---- guard ------------------------------------------------------------------------------------------------------ */

static int thaw_fds[64], thaw_count, alloc_directory = -1;

struct watch { int fd; char name[256]; };

/* Sleeps until the last holder of an allocation is gone, and writes down when that was. */
static void *watch_allocation(void *argument)
{
	struct watch *w = argument;
	struct timespec t;
	char path[300];
	int out;

	while (flock(w->fd, LOCK_SH) && errno == EINTR)
		;
	clock_gettime(CLOCK_MONOTONIC, &t);
	snprintf(path, sizeof path, "%s.freed", w->name);
	out = openat(alloc_directory, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (out >= 0) {
		dprintf(out, "%lld\n", t.tv_sec * 1000LL + t.tv_nsec / 1000000);
		close(out);
	}
	close(w->fd);
	free(w);
	return NULL;
}

static void *watch_directory(void *unused)
{
	char events[16384] __attribute__((aligned(8))), path[64];
	int notify = inotify_init1(IN_CLOEXEC);
	pthread_attr_t attributes;
	pthread_t thread;
	ssize_t got;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 65536);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	snprintf(path, sizeof path, "/proc/self/fd/%d", alloc_directory);
	check(inotify_add_watch(notify, path, IN_MOVED_TO), "watch the allocations");
	while ((got = read(notify, events, sizeof events)) > 0)
		for (char *p = events; p < events + got;) {
			struct inotify_event *event = (struct inotify_event *)p;
			struct watch *w = calloc(1, sizeof *w);

			p += sizeof *event + event->len;
			if (!w)
				continue;
			snprintf(w->name, sizeof w->name, "%s", event->name);
			w->fd = openat(alloc_directory, w->name, O_RDONLY | O_CLOEXEC);
			if (w->fd < 0 || pthread_create(&thread, &attributes, watch_allocation, w))
				free(w);
		}
	return unused;
}

/* Descriptors come with a word: "thaw" a file system at the end, watch the "alloc" directory. */
static void take_over(const char *word, int fd)
{
	pthread_t thread;

	if (!strncmp(word, "thaw", 4) && thaw_count < 64)
		thaw_fds[thaw_count++] = fd;
	else if (!strncmp(word, "alloc", 5) && alloc_directory < 0) {
		alloc_directory = fd;
		errno = pthread_create(&thread, NULL, watch_directory, NULL);
		check(errno ? -1 : 0, "start a thread");
	} else
		close(fd);
}

static void thaw_all(void)
{
	while (thaw_count) {
		ioctl(thaw_fds[--thaw_count], FITHAW, 0);
		close(thaw_fds[thaw_count]);
	}
}

static int remove_tree(const char *path)
{
	char below[4096];
	struct dirent *entry;
	DIR *dir = opendir(path);

	while (dir && (entry = readdir(dir)))
		if (entry->d_type == DT_DIR && strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) {
			snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
			remove_tree(below);
		}
	if (dir)
		closedir(dir);
	return rmdir(path);
}

static void write_text(const char *directory, const char *name, const char *text)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof path, "%s/%s", directory, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (write(fd, text, strlen(text)) < 0)
		dprintf(2, "nodetool: cannot write %s: %s\n", path, strerror(errno));
	close(fd);
}

static void remove_cgroup(const char *path)
{
	write_text(path, "cgroup.kill", "1");
	for (int tries = 0; remove_tree(path) && errno == EBUSY && tries < 5000; tries++)
		usleep(1000);                                           /* exiting tasks leave their cgroup a little later */
}

static void node_init(int control, const char *cgroup)
{
	char path[4096];
	int fd;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(path, sizeof path, "%s/cgroup.procs", cgroup);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	check(fd, "open the node's cgroup");
	join_cgroup(fd);
	check(unshare(CLONE_NEWCGROUP | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC), "unshare");
	private_mounts();
	unblock_all();
	become_init(control, "/sbin/init");
}

static int guard(int control, int life, const char *cgroup)
{
	struct pollfd fds[2] = { { life, POLLIN, 0 }, { -1, POLLIN, 0 } };
	struct clone_args args = { .exit_signal = SIGCHLD };
	sigset_t all;
	pid_t init;
	char text[64] = "";
	int passed;

	setsid();
	prctl(PR_SET_NAME, "node-guard");
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);                             /* Ctrl-C is for the tests, not for the cleaner */
	args.flags = CLONE_NEWPID;                                      /* not unshare: threads could not be made after it */
	init = syscall(SYS_clone3, &args, sizeof args);
	check(init, "clone");
	if (!init)
		close(life), node_init(control, cgroup);
	close(control);
	fds[1].fd = syscall(SYS_pidfd_open, init, 0);
	check(fds[1].fd, "open a pidfd");
	while (!fds[1].revents) {
		if (poll(fds, 2, -1) < 0)
			continue;
		if (fds[0].revents && receive(life, text, sizeof text, &passed) <= 0)
			break;
		if (fds[0].revents && passed >= 0)
			take_over(text, passed);
		fds[0].revents = 0;
	}
	thaw_all();
	kill(init, SIGKILL);
	while (waitpid(init, NULL, 0) < 0 && errno == EINTR)
		;
	remove_cgroup(cgroup);
	return 0;
}

/* ---- enter ------------------------------------------------------------------------------------------------------ */

static const struct { const char *name; int type; } namespaces[] = {
	{ "user", CLONE_NEWUSER }, { "cgroup", CLONE_NEWCGROUP }, { "ipc", CLONE_NEWIPC }, { "uts", CLONE_NEWUTS }, { "pid", CLONE_NEWPID },
	{ "mnt", CLONE_NEWNS },
};
enum { NAMESPACES = sizeof namespaces / sizeof *namespaces };

static void join_namespaces(const char *target, const char *without)
{
	char path[64];
	int fds[NAMESPACES];

	for (int i = 0; i < NAMESPACES; i++) {
		snprintf(path, sizeof path, "/proc/%s/ns/%s", target, namespaces[i].name);
		fds[i] = strstr(without, namespaces[i].name) ? -1 : open(path, O_RDONLY | O_CLOEXEC);
		if (fds[i] < 0 && !strstr(without, namespaces[i].name))
			die("open a namespace");
	}
	for (int i = 0; i < NAMESPACES; i++)
		if (fds[i] >= 0)
			check(setns(fds[i], namespaces[i].type), "enter a namespace");
}

static int pass_on(pid_t child, const sigset_t *signals)
{
	siginfo_t info;
	int status;

	for (;;) {
		int sig = sigwaitinfo(signals, &info);

		if (sig == SIGCHLD && waitpid(child, &status, WNOHANG) == child)
			break;
		/* What a terminal sends goes to the whole foreground group: the child has it already. */
		if (sig > 0 && sig != SIGCHLD && info.si_code != SI_KERNEL)
			kill(child, sig);
	}
	if (WIFSIGNALED(status)) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
		signal(WTERMSIG(status), SIG_DFL);
		unblock_all();
		kill(getpid(), WTERMSIG(status));
		pause();
	}
	return WEXITSTATUS(status);
}

/* fork(); a pid other than 0 is the one that the child gets in its innermost PID namespace. */
static pid_t fork_as(pid_t pid)
{
	struct clone_args args = { .exit_signal = SIGCHLD };
	pid_t child;

	if (pid) {
		args.set_tid = (__u64)(unsigned long)&pid;
		args.set_tid_size = 1;
	}
	for (int tries = 0; tries < 2000; tries++) {
		child = syscall(SYS_clone3, &args, sizeof args);
		if (child >= 0 || errno != EEXIST)
			break;
		usleep(1000);                                           /* its last owner is dead, yet not reaped */
	}
	return child;
}

static int enter(int argc, char **argv)
{
	const char *target = NULL, *exe = NULL, *directory = "/", *without = "user", *uid = NULL;
	int cgroup_fd = -1, report_fd = -1, keep_report = 0, wanted_pid = 0, i;
	static const int forwarded[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGCHLD };
	sigset_t signals, before;
	pid_t child;

	for (i = 2; i + 1 < argc && strcmp(argv[i], "--"); i += 2) {
		if (!strcmp(argv[i], "--target")) target = argv[i + 1];
		else if (!strcmp(argv[i], "--exe")) exe = argv[i + 1];
		else if (!strcmp(argv[i], "--cwd")) directory = argv[i + 1];
		else if (!strcmp(argv[i], "--without")) without = argv[i + 1];
		else if (!strcmp(argv[i], "--uid")) uid = argv[i + 1];
		else if (!strcmp(argv[i], "--cgroup-fd")) cgroup_fd = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--report-fd")) report_fd = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--keep-report")) keep_report = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--pid")) wanted_pid = atoi(argv[i + 1]);
		else errno = EINVAL, die(argv[i]);
	}
	if (!target || i + 1 >= argc)
		errno = EINVAL, die("understand the arguments");
	argv += i + 1;
	join_namespaces(target, without);
	sigemptyset(&signals);
	for (size_t s = 0; s < sizeof forwarded / sizeof *forwarded; s++)
		sigaddset(&signals, forwarded[s]);
	sigprocmask(SIG_BLOCK, &signals, &before);
	child = fork_as(wanted_pid);
	check(child, "fork");
	if (child) {
		close_range(0, ~0u, 0);
		return pass_on(child, &signals);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (cgroup_fd >= 0) {
		join_cgroup(cgroup_fd);
		close(cgroup_fd);
	}
	if (report_fd >= 0) {
		check(send(report_fd, "hello", 5, MSG_NOSIGNAL), "report");
		fcntl(report_fd, F_SETFD, keep_report ? 0 : FD_CLOEXEC);
	}
	check(chdir(directory), "change directory");
	if (!strstr(without, "user"))
		check(setresgid(0, 0, 0) | setresuid(0, 0, 0), "become the container's root");
	if (uid)
		check(setresgid(atoi(uid), atoi(uid), atoi(uid)) | setresuid(atoi(uid), atoi(uid), atoi(uid)), "set the user");
	execvp(exe ? exe : argv[0], argv);
	dprintf(2, "nodetool: cannot execute %s: %s\n", exe ? exe : argv[0], strerror(errno));
	_exit(127);
}

int main(int argc, char **argv)
{
	const char *mode = getenv("NODETOOL");
	int a, b, c;

	if (argc > 2 && !strcmp(argv[1], "enter"))
		return enter(argc, argv);
	if (mode && sscanf(mode, "serve:%d", &a) == 1)
		serve(a);
	if (mode && sscanf(mode, "monitor:%d:%d:%d", &a, &b, &c) == 3)
		return monitor(a, b, c);
	if (argc == 5 && !strcmp(argv[1], "guard"))
		return guard(atoi(argv[2]), atoi(argv[3]), argv[4]);
	dprintf(2, "nodetool: see the comment at the top of nodetool.c\n");
	return 125;
}
