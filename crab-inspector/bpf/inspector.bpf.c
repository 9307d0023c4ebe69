/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/*
 * Notes what the tasks of sandboxes do, so that nobody has to look at them while nothing happens.
 *
 * Everything is noted in map state, per sandbox and per interval between two looks. There is no queue that could run
 * over. A task is named by the time it started: whether it is older than a version is then a comparison, and neither
 * forks nor moves between cgroups have to be followed.
 */
#include "kernel.h"
#include "shared.h"
#include "syscalls.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define PF_IO_WORKER 0x00000010
#define PF_WQ_WORKER 0x00000020
#define PF_KTHREAD 0x00200000

#define NOBODY ((u64)-1)
/* In place of a sandbox: what the CPU runs. */
#define NOT_KNOWN ((u32)-1)

/* Inode of a sandbox's cgroup to its index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_SANDBOXES);
	__type(key, u64);
	__type(value, u32);
} sandboxes SEC(".maps");

/* The depths at which the cgroups of sandboxes lie, plus one; 0 ends the list. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOST_LEVELS);
	__type(key, u32);
	__type(value, u32);
} levels SEC(".maps");

/* The current interval of each sandbox. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOST_SANDBOXES);
	__type(key, u32);
	__type(value, u64);
} epochs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOST_SANDBOXES * SLOTS);
	__type(key, u32);
	__type(value, struct slot);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct on_cpu);
} running SEC(".maps");

/* The number of a btrfs subvolume to the sandbox whose root it is. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_SANDBOXES);
	__type(key, u64);
	__type(value, u32);
} roots SEC(".maps");

/* A device, as the kernel numbers it, to the sandbox whose files lie on it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_SANDBOXES);
	__type(key, u64);
	__type(value, u32);
} devices SEC(".maps");

/* Counts what others than sandboxes may have done to files of any of them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, OUTSIDES);
	__type(key, u32);
	__type(value, u64);
} outside SEC(".maps");

static __always_inline struct slot *slot_of(u32 sandbox)
{
	u64 *epoch = bpf_map_lookup_elem(&epochs, &sandbox);
	u32 index;

	if (!epoch)
		return 0;
	index = sandbox * SLOTS + (*epoch & (SLOTS - 1));
	return bpf_map_lookup_elem(&slots, &index);
}

/* The sandbox of the current task: its index plus one, or 0. */
static __always_inline u32 current_sandbox(void)
{
	u32 i, *found, *level;
	u64 cgroup;

#pragma unroll
	for (i = 0; i < MOST_LEVELS; i++) {
		u32 key = i;

		level = bpf_map_lookup_elem(&levels, &key);
		if (!level || !*level)
			return 0;
		cgroup = bpf_get_current_ancestor_cgroup_id(*level - 1);
		if (!cgroup)
			continue;
		found = bpf_map_lookup_elem(&sandboxes, &cgroup);
		if (found)
			return *found + 1;
	}
	return 0;
}

/* The same for any cgroup. */
static __always_inline u32 cgroup_sandbox(struct cgroup *own)
{
	struct cgroup *at;
	u32 i, *found, *level;
	int depth = BPF_CORE_READ(own, level);
	u64 id;

#pragma unroll
	for (i = 0; i < MOST_LEVELS; i++) {
		u32 key = i;

		level = bpf_map_lookup_elem(&levels, &key);
		if (!level || !*level)
			return 0;
		if ((int)*level - 1 > depth)
			continue;
		if (bpf_core_read(&at, sizeof(at), &own->ancestors[*level - 1]))
			continue;
		id = BPF_CORE_READ(at, kn, id);
		found = bpf_map_lookup_elem(&sandboxes, &id);
		if (found)
			return *found + 1;
	}
	return 0;
}

static __always_inline u32 task_sandbox(struct task_struct *task)
{
	return cgroup_sandbox(BPF_CORE_READ(task, cgroups, dfl_cgrp));
}

/* A lost race between two writers must not lose the older task: both try until the older one stands. */
static __always_inline bool lower(u64 *place, u64 value)
{
	u64 was = *(volatile u64 *)place;
	int i;

#pragma unroll
	for (i = 0; i < 8; i++) {
		u64 seen;

		if (was <= value)
			return false;
		seen = __sync_val_compare_and_swap(place, was, value);
		if (seen == was)
			return true;
		was = seen;
	}
	/* Beaten eight times in a row: count as older than everything. */
	*(volatile u64 *)place = 0;
	return true;
}

static __always_inline void acted(struct slot *slot, u64 started, u32 task, s32 what)
{
	if (lower(&slot->oldest_actor, started)) {
		slot->actor = task;
		slot->act = what;
	}
}

static __always_inline void leave(struct slot *slot, u32 what, s32 act)
{
	if ((slot->left & what) == what)
		return;
	__sync_fetch_and_or(&slot->left, what);
	if (what & LEFT_KERNEL)
		slot->left_act = act;
	if (what & LEFT_FILES)
		slot->files_act = act;
}

SEC("tp_btf/signal_generate")
int BPF_PROG(on_signal, int sig, struct kernel_siginfo *info, struct task_struct *task, int group, int result)
{
	struct slot *slot;
	u32 sandbox;

	/*
	 * That of a child which ended reaches who waits for it; a handler shows by its return. 1: ignored, which the
	 * one that continues a stopped task does its work in spite of.
	 */
	if (sig == SIG_CHILD || (result == 1 && sig != SIG_CONTINUE))
		return 0;
	sandbox = task_sandbox(task);
	if (sandbox && (slot = slot_of(sandbox - 1))) {
		acted(slot, task->start_boottime, task->pid, -sig);
		if (sig > 0 && sig < 32 && (DUMPS_CORE >> sig & 1))
			leave(slot, LEFT_FILES, 0);
	}
	return 0;
}

/* A number that stands for a task and hardly ever for several together. */
static __always_inline u64 task_number(struct task_struct *task)
{
	return (task->start_boottime ^ (u64)task->pid << 40) * 0x9e3779b97f4a7c15ULL | 1;
}

/* The child has its cgroup, and did not run yet. */
SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_fork, struct task_struct *parent, struct task_struct *child)
{
	u32 sandbox = task_sandbox(child);
	struct slot *slot;

	if (sandbox && (slot = slot_of(sandbox - 1)))
		__sync_fetch_and_add(&slot->tasks, task_number(child));
	return 0;
}

/* To end is no system call that returns. */
SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
	u32 sandbox = task_sandbox(task);
	struct slot *slot;

	if (sandbox && (slot = slot_of(sandbox - 1))) {
		__sync_fetch_and_add(&slot->tasks, -task_number(task));
		acted(slot, task->start_boottime, task->pid, NR_EXIT);
	}
	return 0;
}

/* A task that is moved in need not run for it. */
SEC("tp_btf/cgroup_attach_task")
int BPF_PROG(on_move, struct cgroup *to, const char *path, struct task_struct *task, bool all)
{
	u32 sandbox = cgroup_sandbox(to);
	struct slot *slot;

	if (sandbox && (slot = slot_of(sandbox - 1))) {
		lower(&slot->oldest_runner, task->start_boottime);
		/* Several threads are not told one by one: what is added for them never goes away. */
		__sync_fetch_and_add(&slot->tasks, BPF_CORE_READ(task, signal, nr_threads) == 1 ? task_number(task) : 2);
	}
	return 0;
}

/* Whether a task is the first of its pid namespace, below the host's. */
static __always_inline bool is_init(struct task_struct *task)
{
	struct pid *pid = BPF_CORE_READ(task, thread_pid);
	unsigned int level = BPF_CORE_READ(pid, level);
	int nr = 0;

	if (!level)
		return false;
	bpf_core_read(&nr, sizeof(nr), &pid->numbers[level & 31].nr);
	return nr == 1;
}

/* Whether a system call took nothing in and changed nothing: the task could have been woken by a freeze just as well. */
static __always_inline bool inert(struct task_struct *task, struct pt_regs *regs, long nr, long ret)
{
	/* It will be restarted, as if nothing had happened. */
	if (ret <= -512 && ret >= -516)
		return true;
	switch (nr) {
	CASE_WAIT_FOR_FILES:
		return ret == 0 || ret == -4;
	case NR_NANOSLEEP:
	case NR_CLOCK_NANOSLEEP:
		return ret == 0 || ret == -4;
	case NR_RESTART_SYSCALL:
		return ret == 0 || ret == -4 || ret == -110 /* ETIMEDOUT */;
	case NR_FUTEX:
		if (ret == 0) {
			long op = ARG1(regs) & 127;

			return op == 1 || op == 10; /* it woke nobody */
		}
		return ret == -110 || ret == -11 /* EAGAIN */ || ret == -4;
	case NR_RT_SIGTIMEDWAIT:
		if (ret == SIG_CHILD)
			return is_init(task);
		return ret == -11 || ret == -4;
	case NR_WAIT4:
		if (ret > 0)
			return is_init(task);
		return ret == 0 || ret == -10 /* ECHILD */ || ret == -4;
	case NR_WAITID:
		if (ret == 0)
			return is_init(task);
		return ret == -10 || ret == -4;
	case NR_BRK:
	case NR_MUNMAP:
		return true;
	case NR_MMAP: {
		long flags = ARG3(regs);

		return (flags & 0x20) && (flags & 0xf) == 2; /* anonymous, private */
	}
	case NR_MADVISE:
		return ARG2(regs) != 9; /* MADV_REMOVE reaches the file */
	case NR_READ:
	case NR_READV:
	case NR_RECVFROM:
	case NR_RECVMSG:
	case NR_RECVMMSG:
	case NR_ACCEPT:
	case NR_ACCEPT4:
		return ret == -11;
	}
	return false;
}

static __always_inline struct file *file_at(struct task_struct *task, long fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = 0;

	if (fd < 0 || (u64)fd >= BPF_CORE_READ(table, max_fds))
		return 0;
	bpf_probe_read_kernel(&file, sizeof(file), &files[fd]);
	return file;
}

static __always_inline void set_bit(u64 *words, u64 mixed)
{
	u64 *word = &words[(mixed >> 6) & (PIPE_WORDS - 1)], bit = 1ULL << (mixed & 63);

	if (!(*word & bit))
		__sync_fetch_and_or(word, bit);
}

static __always_inline void note_pipe(struct slot *slot, u64 inode)
{
	u64 mixed = inode * 0x9e3779b97f4a7c15ULL;

	set_bit(slot->pipes, mixed >> 51);
	set_bit(slot->pipes, mixed >> 38);
	set_bit(slot->pipes, mixed >> 25);
}

static __always_inline void note_destination(struct slot *slot, struct sock *sk, u16 family)
{
	struct destination to = {};
	u32 i, count = slot->destination_count;

	to.family = family;
	to.port = BPF_CORE_READ(sk, __sk_common.skc_dport);
	if (family == 2)
		*(u32 *)to.address = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	else
		bpf_core_read(to.address, sizeof(to.address), &sk->__sk_common.skc_v6_daddr);
#pragma unroll
	for (i = 0; i < MOST_DESTINATIONS; i++) {
		struct destination *known = &slot->destinations[i];

		if (i < count && known->port == to.port && *(u64 *)known->address == *(u64 *)to.address &&
		    *(u64 *)(known->address + 8) == *(u64 *)(to.address + 8))
			return;
	}
	leave(slot, LEFT_SENT, 0);
	i = __sync_fetch_and_add(&slot->destination_count, 1);
	if (i < MOST_DESTINATIONS)
		slot->destinations[i] = to;
	else
		leave(slot, LEFT_SENT_OVERFLOW, 0);
}

static __always_inline void note_socket(struct slot *slot, struct file *file)
{
	struct socket *socket = BPF_CORE_READ(file, private_data);
	struct sock *sk = BPF_CORE_READ(socket, sk);
	u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);
	u32 first = 0;

	switch (family) {
	case 1:
		leave(slot, LEFT_UNIX, 0);
		return;
	case 2:
		first = BPF_CORE_READ(sk, __sk_common.skc_daddr) & 0xff;
		leave(slot, LEFT_INET, 0);
		if (first != 127)
			note_destination(slot, sk, family);
		return;
	case 10: {
		u8 to[16];
		u64 *half = (u64 *)to;

		bpf_core_read(to, sizeof(to), &sk->__sk_common.skc_v6_daddr);
		leave(slot, LEFT_INET, 0);
		/* ::1, and 127.0.0.0/8 in its mapped form */
		if (half[0] == 0 && (half[1] == bpf_be(1) || ((half[1] & 0xffffffff) == 0xffff0000 && to[12] == 127)))
			return;
		note_destination(slot, sk, family);
		return;
	}
	case 16: /* netlink: what it changes belongs to the network namespace */
		return;
	default:
		leave(slot, LEFT_INET | LEFT_UNIX | LEFT_SENT | LEFT_SENT_OVERFLOW, 0);
	}
}

/* Data went through a file descriptor: into what does it go that outlives the task? */
static __always_inline void note_data(struct task_struct *task, struct slot *slot, long fd, bool out)
{
	struct file *file = file_at(task, fd);
	struct inode *inode;
	u16 kind;

	if (!file) {
		leave(slot, LEFT_UNREADABLE, 0);
		return;
	}
	inode = BPF_CORE_READ(file, f_inode);
	kind = BPF_CORE_READ(inode, i_mode) & 0170000;
	if (kind == 0010000)
		note_pipe(slot, BPF_CORE_READ(inode, i_ino));
	else if (kind == 0140000 && out)
		note_socket(slot, file);
	else if (kind == 0020000 && BPF_CORE_READ(inode, i_rdev) >> 20 != 1)
		leave(slot, LEFT_DEVICE, 0);
}

static __always_inline void note_open(struct task_struct *task, struct slot *slot, long fd, long nr)
{
	struct file *file = file_at(task, fd);
	struct inode *inode;
	unsigned long magic;

	if (!file) {
		leave(slot, LEFT_UNREADABLE, 0);
		return;
	}
	if (!(BPF_CORE_READ(file, f_mode) & 2))
		return;
	inode = BPF_CORE_READ(file, f_inode);
	magic = BPF_CORE_READ(inode, i_sb, s_magic);
	/* /proc, /sys and cgroups: memory of others, limits, settings. */
	if (magic == 0x9fa0 || magic == 0x62656572 || magic == 0x63677270)
		leave(slot, LEFT_KERNEL, nr);
	/* Memory that another process shares without a name, opened through /proc. */
	if (magic == 0x01021994 && !BPF_CORE_READ(inode, i_nlink))
		leave(slot, LEFT_KERNEL, nr);
}

/* What a system call leaves behind that outlives its task. */
static __always_inline void note_left(struct task_struct *task, struct slot *slot, struct pt_regs *regs, long nr,
				      long ret)
{
	switch (nr) {
	case NR_CONNECT:
		if (ret == 0 || ret == -115 /* EINPROGRESS */)
			note_data(task, slot, ARG0(regs), true);
		return;
	}
	if (ret < 0)
		return;
	switch (nr) {
	case NR_READ:
	case NR_READV:
		note_data(task, slot, ARG0(regs), false);
		return;
	case NR_WRITE:
	case NR_WRITEV:
	case NR_SENDTO:
	case NR_SENDMSG:
	case NR_SENDMMSG:
	case NR_VMSPLICE:
		note_data(task, slot, ARG0(regs), true);
		return;
	case NR_SENDFILE:
		note_data(task, slot, ARG0(regs), true);
		note_data(task, slot, ARG1(regs), false);
		return;
	case NR_SPLICE:
		note_data(task, slot, ARG0(regs), false);
		note_data(task, slot, ARG2(regs), true);
		return;
	case NR_TEE:
		note_data(task, slot, ARG1(regs), true);
		return;
	CASE_OPEN:
	case NR_OPENAT:
	case NR_OPENAT2:
		note_open(task, slot, ret, nr);
		return;
	/* On another task, or for others. */
	case NR_PRLIMIT64:
		if (ARG0(regs) && ARG2(regs))
			leave(slot, LEFT_KERNEL, nr);
		return;
	case NR_SCHED_SETAFFINITY:
	case NR_SCHED_SETPARAM:
	case NR_SCHED_SETSCHEDULER:
	case NR_SCHED_SETATTR:
		if (ARG0(regs))
			leave(slot, LEFT_KERNEL, nr);
		return;
	case NR_SETPRIORITY:
	case NR_IOPRIO_SET:
		if (ARG1(regs))
			leave(slot, LEFT_KERNEL, nr);
		return;
	case NR_PTRACE:
	case NR_PROCESS_VM_WRITEV:
	case NR_SHMGET:
	case NR_SHMAT:
	case NR_SHMCTL:
	case NR_SEMGET:
	case NR_SEMOP:
	case NR_SEMTIMEDOP:
	case NR_SEMCTL:
	case NR_MSGGET:
	case NR_MSGSND:
	case NR_MSGRCV:
	case NR_MSGCTL:
	case NR_MQ_OPEN:
	case NR_MQ_UNLINK:
	case NR_MOUNT:
	case NR_UMOUNT2:
	case NR_PIVOT_ROOT:
	case NR_MOVE_MOUNT:
	case NR_MOUNT_SETATTR:
	case NR_SETHOSTNAME:
	case NR_SETDOMAINNAME:
	case NR_ADD_KEY:
	case NR_REQUEST_KEY:
	case NR_KEYCTL:
	case NR_PIDFD_GETFD:
	case NR_PROCESS_MADVISE:
	case NR_IO_URING_SETUP:
	case NR_BPF:
	case NR_SWAPON:
	case NR_IO_SUBMIT:
		leave(slot, LEFT_KERNEL, nr);
		return;
	}
}

#define NO_FILE 0
#define OTHER_FILE 1
#define STREAM 2

/* Whether what is behind a descriptor is a stream to somewhere or a switch of the kernel, or a file. */
static __always_inline int kind_of(struct task_struct *task, long fd, bool *writable)
{
	struct file *file = file_at(task, fd);
	struct inode *inode;
	unsigned long magic;
	u16 kind;

	if (!file)
		return NO_FILE;
	*writable = BPF_CORE_READ(file, f_mode) & 2;
	inode = BPF_CORE_READ(file, f_inode);
	kind = BPF_CORE_READ(inode, i_mode) & 0170000;
	if (kind == 0010000 || kind == 0140000 || kind == 0020000)
		return STREAM;
	magic = BPF_CORE_READ(inode, i_sb, s_magic);
	return magic == 0x9fa0 || magic == 0x62656572 || magic == 0x63677270 ? STREAM : OTHER_FILE;
}

/* O_CREAT, O_TRUNC, __O_TMPFILE: the same numbers on both architectures */
#define MAKES_FILES 020001100

/* Errors that may come after something was done: a file that was made for a descriptor that then could not be had. */
static __always_inline bool fails_late(long ret)
{
	return ret == -5 /* EIO */ || ret == -22 /* EINVAL */ || ret == -28 /* ENOSPC */ || ret == -122 /* EDQUOT */;
}

/* What a system call that succeeded, or failed late, may have done to files: everything that is not known to do nothing. */
static __always_inline u32 files_touched(struct task_struct *task, struct pt_regs *regs, long nr, long ret)
{
	bool writable = false;
	long fd;

	switch (nr) {
	case -1: /* a return from a signal handler, or a call that a tracer suppressed */
	CASE_HARMLESS:
		return 0;
	case NR_WRITE:
	case NR_WRITEV:
	case NR_SENDFILE:
	case NR_IOCTL:
		fd = ARG0(regs);
		break;
	case NR_SPLICE:
		fd = ARG2(regs);
		break;
	case NR_OPENAT:
	case NR_OPEN_BY_HANDLE_AT:
		if (!(ARG2(regs) & MAKES_FILES))
			return 0;
		fd = ret;
		break;
#if defined(__TARGET_ARCH_x86)
	case NR_OPEN:
		if (!(ARG1(regs) & MAKES_FILES))
			return 0;
		fd = ret;
		break;
#endif
	case NR_MADVISE:
		return ARG2(regs) == 9 ? LEFT_FILES : 0;
	case NR_MMAP:
		/* Anonymous, or private. */
		if ((ARG3(regs) & 0x20) || !(ARG3(regs) & 1))
			return 0;
		if (kind_of(task, ARG4(regs), &writable) != NO_FILE && !writable)
			return 0;
		return LEFT_MAPPED | LEFT_FILES;
	case NR_IO_SUBMIT:
	case NR_IO_URING_SETUP:
		return LEFT_ASYNC | LEFT_FILES;
	default:
		return LEFT_FILES;
	}
	return kind_of(task, fd, &writable) == STREAM ? 0 : LEFT_FILES;
}

/*
 * A task leaves its CPU, perhaps in the middle of a system call that has done some of what it does: a write that waits
 * for a reader. Its return may be far.
 */
static __always_inline void interrupted(struct task_struct *task, struct slot *slot, u64 started)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	long nr = (int)SYSCALL_NR(regs);
	u32 touched;

	if (task->flags & PF_KTHREAD || nr == NR_EXIT || nr == NR_EXIT_GROUP)
		return;
	/* Of a file that is about to be opened nothing is known. */
	touched = files_touched(task, regs, nr, -1);
	if (touched)
		leave(slot, touched, nr);
	switch (nr) {
	CASE_GIVES:
		break;
	/* All that was asked for, or nothing: what has come is gone from where it was. */
	case NR_RECVFROM:
		if (!(ARG3(regs) & MSG_WAITALL))
			return;
		break;
	case NR_RECVMSG:
		if (!(ARG2(regs) & MSG_WAITALL))
			return;
		break;
	case NR_RECVMMSG:
		if (ARG3(regs) & MSG_WAITFORONE)
			return;
		break;
	default:
		return;
	}
	acted(slot, started, task->pid, nr);
}

/* Notes switches on this CPU that were not reported since the last one that was. */
static __always_inline void count_switches(struct on_cpu *cpu, struct task_struct *prev)
{
	struct rq *queue;
	u64 switches;

	if (!bpf_core_field_exists(prev->se.cfs_rq))
		return;
	queue = prev->se.cfs_rq->rq;
	switches = queue->nr_switches;
	if (cpu->switches && switches != cpu->switches + 1)
		cpu->unreported++;
	cpu->queue = (u64)queue;
	cpu->switches = switches;
}

/*
 * Run on demand. Whether some CPU switched since the last switch that was reported of it, or may have: what it runs is
 * then not known. Some kernels have threads whose switches they do not report, neither to them nor away from them.
 */
SEC("raw_tp/sched_switch")
int unreported(void *context)
{
	u32 zero = 0, i;

	for (i = 0; i < MOST_CPUS; i++) {
		struct on_cpu *cpu = bpf_map_lookup_percpu_elem(&running, &zero, i);
		u64 switches = 0;

		if (!cpu)
			break;
		if (cpu->queue) {
			struct rq *queue = (struct rq *)cpu->queue;

			bpf_core_read(&switches, sizeof(switches), &queue->nr_switches);
			if (switches != *(volatile u64 *)&cpu->switches)
				return 1;
		} else if (cpu->sandbox == NOT_KNOWN) {
			return 1;
		}
	}
	return i == MOST_CPUS;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	u32 zero = 0, sandbox;
	struct on_cpu *cpu = bpf_map_lookup_elem(&running, &zero);
	struct slot *slot;
	u64 now;

	if (!cpu)
		return 0;
	count_switches(cpu, prev);
	now = bpf_ktime_get_boot_ns();
	sandbox = prev->pid ? task_sandbox(prev) : 0;
	if (sandbox && (slot = slot_of(sandbox - 1))) {
		u64 started = prev->start_boottime;

		lower(&slot->oldest_runner, started);
		interrupted(prev, slot, started);
		if (started < slot->begin) {
			/*
			 * Some kernels report no switch away from certain threads. Where that is how this task came on the
			 * CPU, the last switch that was seen was to another one, and this one came later: the time since
			 * then is at least what it used. Before the first switch `since` is 0, which is over any bound.
			 */
			if (now > cpu->since)
				__sync_fetch_and_add(&slot->cpu, now - cpu->since);
		}
	}
	sandbox = next->pid ? task_sandbox(next) : 0;
	if (sandbox && (slot = slot_of(sandbox - 1)))
		lower(&slot->oldest_runner, next->start_boottime);
	cpu->started = next->start_boottime;
	cpu->since = now;
	cpu->sandbox = sandbox;
	return 0;
}

static __always_inline void count_outside(u32 what)
{
	u64 *count = bpf_map_lookup_elem(&outside, &what);

	if (count)
		__sync_fetch_and_add(count, 1);
}

/* Whether a task of the host says of itself that it changes no file of a sandbox: crab_core::keep_house. */
static __always_inline bool does_housework(void)
{
	union {
		char name[16];
		u64 words[2];
	} own = {}, housekeeper = { HOUSEKEEPER };

	bpf_get_current_comm(own.name, sizeof(own.name));
	return own.words[0] == housekeeper.words[0] && own.words[1] == housekeeper.words[1];
}

/* Whether a task of the host does something that changes no file of a subvolume that was there before. */
static __always_inline bool keeps_house(struct task_struct *task)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	long nr = SYSCALL_NR(regs);

	if (nr == NR_SYNC || nr == NR_SYNCFS || nr == NR_FSYNC || nr == NR_FDATASYNC)
		return true;
	if (nr != NR_IOCTL)
		return does_housework();
	switch ((u32)ARG1(regs)) {
	case 0x50009417: /* SNAP_CREATE_V2 */
	case 0x50009418: /* SUBVOL_CREATE_V2 */
	case 0x5000940f: /* SNAP_DESTROY */
	case 0x5000943f: /* SNAP_DESTROY_V2 */
		return true;
	}
	return does_housework();
}

/* Room is reserved for a change of metadata, in the context of who asks for it. */
SEC("tp_btf/btrfs_space_reservation")
int BPF_PROG(on_btrfs_room, struct btrfs_fs_info *fs, const char *type, u64 what, u64 bytes, int reserve)
{
	struct task_struct *task;
	struct slot *slot;
	u32 sandbox;

	if (!reserve)
		return 0;
	sandbox = current_sandbox();
	if (sandbox) {
		slot = slot_of(sandbox - 1);
		if (slot)
			leave(slot, LEFT_FILES, 0);
		return 0;
	}
	task = bpf_get_current_task_btf();
	/* A thread of the kernel works off what was seen when it was asked for, or shows below. */
	if (!(task->flags & PF_KTHREAD) && !keeps_house(task))
		count_outside(OUTSIDE_BTRFS);
	return 0;
}

/* Data of a file will be written, whoever does it: through a system call, a mapping, a loop device. */
SEC("tp_btf/btrfs_inode_mod_outstanding_extents")
int BPF_PROG(on_btrfs_data, struct btrfs_root *root, u64 inode, int more, unsigned int sum)
{
	u64 id = root->root_key.objectid;
	struct slot *slot;
	u32 *sandbox;

	if (more <= 0 || id < 256)
		return 0;
	sandbox = bpf_map_lookup_elem(&roots, &id);
	if (!sandbox)
		return 0;
	if (*sandbox == SHARED_ROOT) {
		count_outside(OUTSIDE_BTRFS);
		return 0;
	}
	slot = slot_of(*sandbox);
	if (slot)
		leave(slot, LEFT_FILES, 0);
	return 0;
}

/*
 * Other file systems than btrfs are known by their device. What a sandbox's own tasks do to files shows by their system
 * calls, and a read that sets an access time is not to count. So changes of metadata count where others make them, and
 * data that is written counts whoever writes it: through a mapping, or a loop device.
 */
enum change {
	/* Metadata that a thread of the kernel changes when it writes back what was written before. */
	OF_TIMES,
	OF_SPACE,
	/* Metadata else. */
	OF_NAMES,
	OF_DATA,
};

static __always_inline void device_changed(u32 device, enum change change)
{
	struct task_struct *task;
	struct slot *slot;
	u32 own, *sandbox;
	u64 key = device;

	sandbox = bpf_map_lookup_elem(&devices, &key);
	if (!sandbox)
		return;
	own = current_sandbox();
	task = bpf_get_current_task_btf();
	if (own && (change == OF_DATA || task->flags & PF_IO_WORKER)) {
		slot = slot_of(own - 1);
		if (slot)
			leave(slot, LEFT_FILES, 0);
	}
	/* What one sandbox does is not another's, though they share a device: it has no way to the other's files. */
	if (own)
		return;
	/* Not even what looks like an access time is let pass: a store to a mapping may be no more than that. */
	if (task->flags & PF_WQ_WORKER && (change == OF_SPACE || change == OF_TIMES))
		return;
	if (does_housework())
		return;
	if (*sandbox == SHARED_ROOT) {
		count_outside(OUTSIDE_DEVICES);
		return;
	}
	slot = slot_of(*sandbox);
	if (slot)
		leave(slot, LEFT_FILES, 0);
}

static __always_inline u32 device_of(struct inode *inode)
{
	return BPF_CORE_READ(inode, i_sb, s_dev);
}

/* Why ext4 begins to write its journal. */
static __always_inline enum change ext4_change(int why)
{
	switch (why) {
	case 1: /* an inode that is dirty */
		return OF_TIMES;
	case 2: /* pages are written back */
	case 3: /* blocks are given to them */
	case 11: /* blocks that were set aside are used */
		return OF_SPACE;
	}
	return OF_NAMES;
}

SEC("raw_tp/ext4_journal_start_inode")
int BPF_PROG(on_ext4_inode, struct inode *inode, int blocks, int reserved, int revoked, int why)
{
	device_changed(device_of(inode), ext4_change(why));
	return 0;
}

SEC("raw_tp/ext4_journal_start_sb")
int BPF_PROG(on_ext4, struct super_block *fs, int blocks, int reserved, int revoked, int why)
{
	device_changed(BPF_CORE_READ(fs, s_dev), ext4_change(why));
	return 0;
}

SEC("raw_tp/ext4_da_write_begin")
int BPF_PROG(on_ext4_write, struct inode *inode)
{
	device_changed(device_of(inode), OF_DATA);
	return 0;
}

SEC("raw_tp/ext4_write_begin")
int BPF_PROG(on_ext4_write_at_once, struct inode *inode)
{
	device_changed(device_of(inode), OF_DATA);
	return 0;
}

SEC("raw_tp/xfs_trans_alloc")
int BPF_PROG(on_xfs, struct xfs_trans *transaction)
{
	device_changed(BPF_CORE_READ(transaction, t_mountp, m_super, s_dev), OF_TIMES);
	return 0;
}

SEC("raw_tp/xfs_file_buffered_write")
int BPF_PROG(on_xfs_write, struct kiocb *io)
{
	device_changed(device_of(BPF_CORE_READ(io, ki_filp, f_inode)), OF_DATA);
	return 0;
}

SEC("raw_tp/xfs_free_file_space")
int BPF_PROG(on_xfs_hole, struct xfs_inode *inode)
{
	device_changed(BPF_CORE_READ(inode, i_mount, m_super, s_dev), OF_DATA);
	return 0;
}

/* A page that is clean is stored to, through a mapping or by a write. */
SEC("raw_tp/writeback_dirty_folio")
int BPF_PROG(on_dirty, void *folio, struct address_space *mapping)
{
	device_changed(device_of(BPF_CORE_READ(mapping, host)), OF_DATA);
	return 0;
}

SEC("raw_tp/iomap_dio_rw_begin")
int BPF_PROG(on_direct, struct kiocb *io, struct iov_iter *iter)
{
	if (BPF_CORE_READ(iter, data_source))
		device_changed(device_of(BPF_CORE_READ(io, ki_filp, f_inode)), OF_DATA);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(on_syscall, struct pt_regs *regs, long ret)
{
	struct task_struct *task = bpf_get_current_task_btf();
	bool compat = IS_COMPAT(task);
	long nr = SYSCALL_NR(regs);
	struct slot *slot;
	u32 sandbox;

	/* Most of all calls of some programs, and never of interest to anybody: before anything is looked up. */
	if (!compat) {
		switch (nr) {
		CASE_ALWAYS_INERT:
			return 0;
		}
	}
	sandbox = current_sandbox();
	if (!sandbox)
		return 0;
	slot = slot_of(sandbox - 1);
	if (!slot)
		return 0;
	if (compat) {
		leave(slot, LEFT_COMPAT | LEFT_FILES, 0);
		return 0;
	}
	if (ret >= 0 || fails_late(ret))
		leave(slot, files_touched(task, regs, nr, ret), nr);
	if (inert(task, regs, nr, ret))
		return 0;
	acted(slot, task->start_boottime, task->pid, nr);
	note_left(task, slot, regs, nr, ret);
	return 0;
}
