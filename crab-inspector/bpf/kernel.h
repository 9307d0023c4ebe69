/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/*
 * The few kernel structures that are read, with the few fields that are read.
 * CO-RE finds the true offsets when the object is loaded.
 */
#pragma once

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u16 __be16;
typedef __u16 __le16;
typedef __u32 __be32;
typedef __u32 __le32;
typedef __u64 __be64;
typedef __u64 __le64;
typedef __u32 __wsum;
typedef __u16 __sum16;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef _Bool bool;
#define true 1
#define false 0

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
};

#define BPF_ANY 0

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernel_siginfo {
	int si_signo;
};

struct kernfs_node {
	u64 id;
};

struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup *ancestors[];
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

struct super_block {
	u32 s_dev;
	unsigned long s_magic;
};

struct inode {
	u16 i_mode;
	u32 i_rdev;
	unsigned int i_nlink;
	unsigned long i_ino;
	struct super_block *i_sb;
};

struct file {
	unsigned int f_mode;
	struct inode *f_inode;
	void *private_data;
};

struct address_space {
	struct inode *host;
};

struct kiocb {
	struct file *ki_filp;
};

struct iov_iter {
	bool data_source;
};

struct in6_addr {
	union {
		u8 u6_addr8[16];
	} in6_u;
};

struct sock_common {
	u32 skc_daddr;
	u16 skc_dport;
	u16 skc_family;
	struct in6_addr skc_v6_daddr;
};

struct sock {
	struct sock_common __sk_common;
};

struct socket {
	struct sock *sk;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

/* Whole: its size counts where it lies in an array. */
struct upid {
	int nr;
	void *ns;
};

struct pid {
	unsigned int level;
	struct upid numbers[];
};

struct thread_info {
	unsigned long flags;
	u32 status;
};

struct btrfs_key {
	u64 objectid;
};

struct btrfs_root {
	struct btrfs_key root_key;
};

struct btrfs_fs_info {
	u64 generation;
};

struct xfs_mount {
	struct super_block *m_super;
};

struct xfs_inode {
	struct xfs_mount *i_mount;
};

struct xfs_trans {
	struct xfs_mount *t_mountp;
};

struct signal_struct {
	int nr_threads;
};

struct rq {
	u64 nr_switches;
};

struct cfs_rq {
	struct rq *rq;
};

struct sched_entity {
	struct cfs_rq *cfs_rq;
};

struct task_struct {
	unsigned int flags;
	struct thread_info thread_info;
	int pid;
	int tgid;
	u64 start_boottime;
	struct sched_entity se;
	struct pid *thread_pid;
	struct css_set *cgroups;
	struct files_struct *files;
	struct signal_struct *signal;
};

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	u64 regs[31];
	u64 sp, pc, pstate;
};
struct pt_regs {
	u64 regs[31];
	u64 sp, pc, pstate;
	u64 orig_x0;
	int syscallno;
};
#else
#error "unknown architecture"
#endif

#pragma clang attribute pop
