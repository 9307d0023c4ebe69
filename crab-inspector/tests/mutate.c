/*
 * Changes files below the current folder, in the way that its argument names. The folder holds `f` (1 MiB of 'f'),
 * `g` (the same of 'g'), `d/old`, `link` and `x` (with user.a). Exit status 77: this host has no such way.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define NEW "changed!"
#define LEN 8

static void check(long result, const char *what)
{
	if (result >= 0)
		return;
	if (errno == ENOSYS || errno == EOPNOTSUPP)
		exit(77);
	perror(what);
	exit(1);
}

static int open_f(int flags)
{
	int fd = open("f", flags);

	check(fd, "open f");
	return fd;
}

static char *map_f(void)
{
	char *map = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, open_f(O_RDWR), 0);

	check(map == MAP_FAILED ? -1 : 0, "mmap");
	return map;
}

static int pipe_with_new(void)
{
	int p[2];

	check(pipe(p), "pipe");
	check(write(p[1], NEW, LEN), "write to pipe");
	return p[0];
}

static void uring(unsigned flags)
{
	struct io_uring_params p = { .flags = flags, .sq_thread_idle = 2000 };
	int fd = syscall(SYS_io_uring_setup, 4, &p), file = open_f(O_WRONLY);

	check(fd, "io_uring_setup");
	char *sq = mmap(NULL, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
			IORING_OFF_SQ_RING);
	char *cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
			MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_CQ_RING);
	struct io_uring_sqe *sqe = mmap(NULL, p.sq_entries * sizeof(*sqe), PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQES);
	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = IORING_OP_WRITE;
	sqe->fd = file;
	sqe->addr = (uintptr_t)NEW;
	sqe->len = LEN;
	((unsigned *)(sq + p.sq_off.array))[0] = 0;
	__atomic_store_n((unsigned *)(sq + p.sq_off.tail), 1, __ATOMIC_RELEASE);
	if (flags & IORING_SETUP_SQPOLL) {
		for (int i = 0; i < 5000 && !__atomic_load_n((unsigned *)(cq + p.cq_off.tail), __ATOMIC_ACQUIRE); i++) {
			if (__atomic_load_n((unsigned *)(sq + p.sq_off.flags), __ATOMIC_ACQUIRE) & IORING_SQ_NEED_WAKEUP)
				syscall(SYS_io_uring_enter, fd, 1, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0);
			usleep(1000);
		}
	} else {
		check(syscall(SYS_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0), "io_uring_enter");
	}
	int res = ((struct io_uring_cqe *)(cq + p.cq_off.cqes))->res;
	if (res != LEN) {
		fprintf(stderr, "io_uring: %d\n", res);
		exit(1);
	}
}

/* A child that has the file mapped and waits. */
static pid_t mapper(char **map)
{
	*map = map_f();
	pid_t child = fork();

	check(child, "fork");
	if (!child) {
		pause();
		_exit(0);
	}
	munmap(*map, 1 << 20);
	return child;
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";
#define IS(name) (!strcmp(how, name))
	struct iovec vector = { NEW, LEN };
	char *map;

	if (IS("write")) check(write(open_f(O_WRONLY), NEW, LEN), how);
	else if (IS("append")) check(write(open_f(O_WRONLY | O_APPEND), NEW, LEN), how);
	else if (IS("pwrite")) check(pwrite(open_f(O_WRONLY), NEW, LEN, 5000), how);
	else if (IS("writev")) check(writev(open_f(O_WRONLY), &vector, 1), how);
	else if (IS("pwritev")) check(pwritev(open_f(O_WRONLY), &vector, 1, 7), how);
	else if (IS("pwritev2")) check(pwritev2(open_f(O_WRONLY), &vector, 1, 7, RWF_DSYNC), how);
	else if (IS("sendfile")) check(sendfile(open_f(O_WRONLY), open("g", O_RDONLY), NULL, 100), how);
	else if (IS("copy_file_range")) check(copy_file_range(open("g", O_RDONLY), NULL, open_f(O_WRONLY), NULL, 5000, 0), how);
	else if (IS("splice")) check(splice(pipe_with_new(), NULL, open_f(O_WRONLY), NULL, LEN, 0), how);
	else if (IS("vmsplice")) {
		int p[2];
		check(pipe(p), "pipe");
		check(vmsplice(p[1], &vector, 1, 0), how);
		check(splice(p[0], NULL, open_f(O_WRONLY), NULL, LEN, 0), how);
	}
	else if (IS("aio")) {
		aio_context_t context = 0;
		struct iocb one = { .aio_fildes = open_f(O_WRONLY), .aio_lio_opcode = IOCB_CMD_PWRITE,
				    .aio_buf = (uintptr_t)NEW, .aio_nbytes = LEN }, *list = &one;
		struct io_event event;
		check(syscall(SYS_io_setup, 4, &context), how);
		check(syscall(SYS_io_submit, context, 1, &list), how);
		check(syscall(SYS_io_getevents, context, 1, 1, &event, NULL), how);
	}
	else if (IS("io_uring")) uring(0);
	else if (IS("io_uring_sqpoll")) uring(IORING_SETUP_SQPOLL);
	else if (IS("direct")) {
		void *block;
		check(-posix_memalign(&block, 4096, 4096), how);
		memset(block, 'n', 4096);
		check(pwrite(open_f(O_WRONLY | O_DIRECT), block, 4096, 8192), how);
	}
	else if (IS("truncate")) check(truncate("f", 1000), how);
	else if (IS("ftruncate")) check(ftruncate(open_f(O_RDWR), 2 << 20), how);
	else if (IS("open_trunc")) check(open("f", O_WRONLY | O_TRUNC), how);
	else if (IS("creat")) check(creat("new", 0600), how);
	else if (IS("open_creat")) check(open("new", O_RDONLY | O_CREAT, 0600), how);
	else if (IS("openat2")) {
		struct { uint64_t flags, mode, resolve; } request = { O_CREAT | O_WRONLY, 0600, 0 };
		check(syscall(437, AT_FDCWD, "new", &request, sizeof(request)), how);
	}
	else if (IS("tmpfile_link")) {
		char path[64];
		int fd = open(".", O_TMPFILE | O_RDWR, 0600);
		check(fd, how);
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		check(linkat(AT_FDCWD, path, AT_FDCWD, "new", AT_SYMLINK_FOLLOW), how);
	}
	else if (IS("fallocate")) check(fallocate(open_f(O_RDWR), 0, 1 << 20, 1 << 20), how);
	else if (IS("punch_hole")) check(fallocate(open_f(O_RDWR), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 8192), how);
	else if (IS("zero_range")) check(fallocate(open_f(O_RDWR), FALLOC_FL_ZERO_RANGE, 4096, 8192), how);
	else if (IS("madvise_remove")) check(madvise(map_f() + 4096, 4096, MADV_REMOVE), how);
	else if (IS("mmap_store")) memcpy(map_f() + 100, NEW, LEN);
	else if (IS("mmap_store_late")) {
		map = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, open_f(O_RDWR), 0);
		check(map == MAP_FAILED ? -1 : 0, how);
		check(mprotect(map, 1 << 20, PROT_READ | PROT_WRITE), how);
		memcpy(map + 100, NEW, LEN);
	}
	else if (IS("read_into_mapping")) check(read(pipe_with_new(), map_f() + 200, LEN), how);
	else if (IS("process_vm_writev")) {
		pid_t child = mapper(&map);
		struct iovec remote = { map + 300, LEN };
		check(process_vm_writev(child, &vector, 1, &remote, 1, 0), how);
		kill(child, SIGKILL);
	}
	else if (IS("ptrace")) {
		pid_t child = mapper(&map);
		int status;
		check(ptrace(PTRACE_ATTACH, child, 0, 0), how);
		waitpid(child, &status, 0);
		check(ptrace(PTRACE_POKEDATA, child, map + 400, 0x6e6e6e6e), how);
		kill(child, SIGKILL);
	}
	else if (IS("mkdir")) check(mkdir("new", 0700), how);
	else if (IS("mknod")) check(mknod("new", S_IFIFO | 0600, 0), how);
	else if (IS("symlink")) check(symlink("f", "new"), how);
	else if (IS("link")) check(link("f", "new"), how);
	else if (IS("rename")) check(rename("f", "new"), how);
	else if (IS("exchange")) check(renameat2(AT_FDCWD, "f", AT_FDCWD, "g", RENAME_EXCHANGE), how);
	else if (IS("unlink")) check(unlink("f"), how);
	else if (IS("rmdir")) check(unlink("d/old") | rmdir("d"), how);
	else if (IS("truncate_unlink")) { check(truncate("d/old", 0), how); check(unlink("d/old"), how); }
	else if (IS("rename_over_unlink")) { check(rename("g", "d/old"), how); check(unlink("d/old"), how); }
	else if (IS("chmod")) check(chmod("f", 0601), how);
	else if (IS("fchmod")) check(fchmod(open_f(O_RDONLY), 0601), how);
	else if (IS("fchmodat2")) check(syscall(452, AT_FDCWD, "f", 0601, 0), how);
	else if (IS("chown")) check(chown("f", 7, 8), how);
	else if (IS("lchown")) check(lchown("link", 7, 8), how);
	else if (IS("utimensat")) {
		struct timespec times[2] = { { 1000, 0 }, { 1000, 0 } };
		check(utimensat(AT_FDCWD, "f", times, 0), how);
	}
	else if (IS("setxattr")) check(setxattr("f", "user.a", NEW, LEN, 0), how);
	else if (IS("fsetxattr")) check(fsetxattr(open_f(O_RDONLY), "user.a", NEW, LEN, 0), how);
	else if (IS("removexattr")) check(removexattr("x", "user.a"), how);
	else if (IS("setxattrat")) {
		struct { uint64_t value; uint32_t size, flags; } request = { (uintptr_t)NEW, LEN, 0 };
		check(syscall(463, AT_FDCWD, "f", 0, "user.a", &request, sizeof(request)), how);
	}
	else if (IS("clone")) check(ioctl(open_f(O_WRONLY), FICLONE, open("g", O_RDONLY)), how);
	else if (IS("setflags")) {
		int flags, fd = open_f(O_RDONLY);
		check(ioctl(fd, FS_IOC_GETFLAGS, &flags), how);
		flags |= FS_NOATIME_FL;
		check(ioctl(fd, FS_IOC_SETFLAGS, &flags), how);
	}
	else if (IS("bind")) {
		struct sockaddr_un name = { AF_UNIX, "new" };
		check(bind(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&name, sizeof(name)), how);
	}
	else if (IS("open_by_handle")) {
		struct { struct file_handle head; char rest[128]; } handle = { { 128 } };
		int mount;
		check(name_to_handle_at(AT_FDCWD, "f", &handle.head, &mount, 0), how);
		check(write(open_by_handle_at(open(".", O_RDONLY), &handle.head, O_WRONLY), NEW, LEN), how);
	}
	else if (IS("inherited")) {
		int fd = open_f(O_WRONLY);
		if (!fork()) { if (write(fd, NEW, LEN) != LEN) _exit(1); _exit(0); }
		wait(NULL);
	}
	else if (IS("passed")) {
		int pair[2], fd = open_f(O_WRONLY);
		char space[CMSG_SPACE(sizeof(int))] = { 0 }, byte = 0;
		struct iovec one = { &byte, 1 };
		struct msghdr message = { .msg_iov = &one, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space) };
		check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), how);
		struct cmsghdr *part = CMSG_FIRSTHDR(&message);
		part->cmsg_level = SOL_SOCKET; part->cmsg_type = SCM_RIGHTS; part->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(part), &fd, sizeof(int));
		check(sendmsg(pair[0], &message, 0), how);
		if (!fork()) {
			check(recvmsg(pair[1], &message, 0), how);
			memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
			_exit(write(fd, NEW, LEN) != LEN);
		}
		wait(NULL);
	}
	else if (IS("output")) { dup2(open_f(O_WRONLY), 1); check(write(1, NEW, LEN), how); }
	else if (IS("killed")) {
		/* The writer dies right after, by a signal. */
		if (!fork()) { write(open_f(O_WRONLY), NEW, LEN); kill(getpid(), SIGKILL); }
		wait(NULL);
	}
	else if (IS("core")) {
		struct rlimit all = { RLIM_INFINITY, RLIM_INFINITY };
		check(setrlimit(RLIMIT_CORE, &all), how);
		if (!fork()) abort();
		int status;
		wait(&status);
		if (!WCOREDUMP(status)) return 77;
	}
	else if (IS("odd_name")) check(creat("\xff\xfe \n", 0600), how);
	else if (IS("long_path")) {
		char name[201] = { 0 };
		memset(name, 'n', 200);
		for (int i = 0; i < 19; i++) { mkdir(name, 0700); check(chdir(name), how); }
		check(creat("end", 0600), how);
	}
#if defined(__x86_64__)
	else if (IS("compat")) {
		long result;
		char *low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
		memcpy(low, NEW, LEN);
		__asm__ volatile("int $0x80" : "=a"(result) : "a"(4), "b"(open_f(O_WRONLY)), "c"(low), "d"(LEN) : "memory");
		if (result != LEN) return 77;
	}
#endif
	else if (IS("live")) {
		/* Stores to a page that is dirty and writable already, once for each line. */
		char line[16];
		map = map_f();
		map[0]++;
		puts("ready"); fflush(stdout);
		while (read(0, line, 1) == 1) { map[0]++; puts("done"); fflush(stdout); }
	}
	else return 77;
	return 0;
}
