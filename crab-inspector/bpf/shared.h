/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* What the programs and the library both know. The library's side is src/bpf/layout.rs. */
#pragma once

/* So many sandboxes can be watched at once. */
#define MOST_SANDBOXES 1024
/* So many intervals of a sandbox are kept apart here; the library reads each before it is used anew. */
#define SLOTS 8
/* Pipes are noted in a filter of so many words; its bits for a pipe are in layout.rs too. */
#define PIPE_WORDS 128
#define MOST_DESTINATIONS 4
/* Different depths of cgroups under which sandboxes lie. */
#define MOST_LEVELS 4

/* The name of a thread that changes no file of a sandbox: crab_core::HOUSEKEEPER. */
#define HOUSEKEEPER "crab-housework"

/* In place of a sandbox: several share the number of their root, or the device that it lies on. */
#define SHARED_ROOT ((u32)-1)
/* What is counted of others than sandboxes: changes to btrfs, and to devices that several sandboxes share. */
#define OUTSIDE_BTRFS 0
#define OUTSIDE_DEVICES 1
#define OUTSIDES 2
/* More CPUs than this are not looked through. */
#define MOST_CPUS 1024

/* What stays behind of a task that is gone. */
enum left {
	/* A system call changed state that the kernel holds. */
	LEFT_KERNEL = 1 << 0,
	/* Data or a connection went to a socket: local internet, unix, another family. */
	LEFT_INET = 1 << 2,
	LEFT_UNIX = 1 << 3,
	/* A terminal or another device was written to. */
	LEFT_DEVICE = 1 << 4,
	/* A task used the 32-bit system calls, whose numbers are not known here. */
	LEFT_COMPAT = 1 << 5,
	/* Data left the sandbox, or may have. */
	LEFT_SENT = 1 << 6,
	/* More destinations than fit. */
	LEFT_SENT_OVERFLOW = 1 << 7,
	/* A file descriptor could not be followed to its file. */
	LEFT_UNREADABLE = 1 << 8,
	/* A file may have changed. */
	LEFT_FILES = 1 << 9,
	/* A file was mapped so that stores to memory change it. */
	LEFT_MAPPED = 1 << 10,
	/* A task can have files changed without a system call of its own. */
	LEFT_ASYNC = 1 << 11,
};

struct destination {
	u8 address[16];
	u16 port;
	u16 family;
};

/* What happened in one interval between two looks at a sandbox. */
struct slot {
	/* The interval's number. */
	u64 epoch;
	/* When it began, in nanoseconds since boot. */
	u64 begin;
	/* The start time of the oldest task that did something, that ran. All ones: none. */
	u64 oldest_actor;
	u64 oldest_runner;
	/* CPU time of tasks older than the interval. */
	u64 cpu;
	/* A number for each task that came, less that of each that ended: 0 where all who came are gone. */
	u64 tasks;
	/* Of the oldest actor: its id, and the system call or the negated signal. */
	u32 actor;
	s32 act;
	/* The same for what was left in the kernel. */
	s32 left_act;
	/* enum left */
	u32 left;
	u32 destination_count;
	/* What may have changed a file: the system call, or 0. */
	s32 files_act;
	u64 pipes[PIPE_WORDS];
	struct destination destinations[MOST_DESTINATIONS];
};

/* What a CPU runs. */
struct on_cpu {
	/* 0: nothing of a sandbox; all ones: not known yet; else the index plus one. */
	u32 sandbox;
	u32 pad;
	u64 since;
	u64 started;
	/* Where the kernel counts the switches of this CPU, and how many there were with the last that was reported. */
	u64 queue;
	u64 switches;
	/* How often switches were found that had not been reported. */
	u64 unreported;
};
