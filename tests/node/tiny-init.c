/*
 * A container's init that boots in no time: reaps, and does on signals what systemd does.
 *
 * SIGRTMIN+3, SIGPWR, SIGINT: halt (all other processes die with the namespace).  SIGRTMIN+5: reboot.
 * `tiny-init reboot|poweroff` asks for it from inside.  With /etc/slow present halting takes until that file is gone.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>

static void wait_while_slow(void)
{
	char buffer[4096];
	int fd = inotify_init1(IN_CLOEXEC);

	inotify_add_watch(fd, "/etc", IN_DELETE | IN_MOVED_FROM);
	while (!access("/etc/slow", F_OK) && read(fd, buffer, sizeof buffer) > 0)
		;
	close(fd);
}

static void end(int how)
{
	wait_while_slow();
	reboot(how);
	_exit(0);
}

int main(int argc, char **argv)
{
	sigset_t set;

	if (getpid() != 1)
		return kill(1, argc > 1 && !strcmp(argv[1], "reboot") ? SIGRTMIN + 5 : SIGRTMIN + 3) != 0;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGPWR);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGRTMIN + 3);
	sigaddset(&set, SIGRTMIN + 5);
	sigprocmask(SIG_BLOCK, &set, NULL);
	for (;;) {
		int number = sigwaitinfo(&set, NULL);

		if (number == SIGCHLD)
			while (waitpid(-1, NULL, WNOHANG) > 0)
				;
		else if (number == SIGRTMIN + 5)
			end(RB_AUTOBOOT);
		else if (number > 0)
			end(RB_POWER_OFF);
	}
}
