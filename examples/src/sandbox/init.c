/*
 * Pid 1 of a sandbox, and the small process that runs one command in it.
 *
 *   crab-init               reaps children for ever
 *   crab-init exec CWD ...  runs a command and reports how it ended
 *
 * Standard input is a pipe to the launcher in both uses: it carries records of
 * two 32-bit integers, {kind, value}. CRIU must be able to save and restore
 * everything from here on, so it is closed as soon as it is not needed, nothing
 * else of the host's stays open, and the executable lies in the sandbox's root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum kind { READY = 1, STARTED = 2, EXITED = 3, FAILED = 4 };

static void say(int fd, int32_t kind, int32_t value)
{
	int32_t record[2] = { kind, value };

	/* Shorter than PIPE_BUF, so it is whole or not at all. */
	while (write(fd, record, sizeof record) < 0 && errno == EINTR)
		;
}

static void close_from(unsigned first)
{
	syscall(SYS_close_range, first, ~0U, 0);
}

static int open_null(int onto)
{
	int fd = open("/dev/null", O_RDWR);

	if (fd < 0)
		return -1;
	if (fd != onto) {
		if (dup2(fd, onto) < 0)
			return -1;
		close(fd);
	}
	return 0;
}

static int init(void)
{
	sigset_t all, child;

	/* A signal with no handler does not reach pid 1; blocked ones wake nobody. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);

	setsid();
	close_from(3);
	if (open_null(1) < 0 || open_null(2) < 0) {
		say(0, FAILED, errno);
		return 1;
	}
	say(0, READY, getpid());
	if (open_null(0) < 0)
		return 1;

	for (;;) {
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		sigwaitinfo(&child, NULL);
	}
}

/* The launcher's direct child ends at once, so that the command belongs to pid 1. */
static int run(const char *cwd, char **command)
{
	int status, report;
	pid_t pid;

	report = fcntl(0, F_DUPFD_CLOEXEC, 3);
	if (report < 0)
		return 1;
	if (dup2(report, 3) < 0 || fcntl(3, F_SETFD, FD_CLOEXEC) < 0)
		return 1;
	report = 3;
	close_from(4);

	pid = fork();
	if (pid != 0) {
		if (pid < 0)
			say(report, FAILED, errno);
		return pid < 0;
	}

	if (open_null(0) < 0 || chdir(cwd) < 0) {
		say(report, FAILED, errno);
		return 1;
	}
	setsid();
	pid = fork();
	if (pid < 0) {
		say(report, FAILED, errno);
		return 1;
	}
	if (pid == 0) {
		signal(SIGPIPE, SIG_DFL);
		execv(command[0], command);
		say(report, FAILED, errno);
		_exit(127);
	}
	say(report, STARTED, getpid());

	/* The output belongs to the command alone. */
	open_null(1);
	open_null(2);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return 1;
	say(report, EXITED, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
	return 0;
}

int main(int argc, char **argv)
{
	umask(022);
	/* A launcher that is gone must not end the command that it started. */
	signal(SIGPIPE, SIG_IGN);
	if (argc == 1)
		return init();
	if (argc >= 4)
		return run(argv[2], argv + 3);
	return 2;
}
