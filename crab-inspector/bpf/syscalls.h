/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* How system calls are numbered, and where their arguments are when they return. */
#pragma once

#define SIG_CHILD 17
#define SIG_CONTINUE 18
#define bpf_be(x) __builtin_bswap64(x)

#if defined(__TARGET_ARCH_x86)

#define NR_READ 0
#define NR_WRITE 1
#define NR_OPEN 2
#define NR_POLL 7
#define NR_MMAP 9
#define NR_MUNMAP 11
#define NR_BRK 12
#define NR_READV 19
#define NR_WRITEV 20
#define NR_SELECT 23
#define NR_SCHED_YIELD 24
#define NR_MADVISE 28
#define NR_SHMGET 29
#define NR_SHMAT 30
#define NR_SHMCTL 31
#define NR_NANOSLEEP 35
#define NR_GETPID 39
#define NR_SENDFILE 40
#define NR_CONNECT 42
#define NR_ACCEPT 43
#define NR_SENDTO 44
#define NR_RECVFROM 45
#define NR_SENDMSG 46
#define NR_RECVMSG 47
#define NR_WAIT4 61
#define NR_SEMGET 64
#define NR_SEMOP 65
#define NR_SEMCTL 66
#define NR_MSGGET 68
#define NR_MSGSND 69
#define NR_MSGRCV 70
#define NR_MSGCTL 71
#define NR_CREAT 85
#define NR_GETTIMEOFDAY 96
#define NR_PTRACE 101
#define NR_GETPPID 110
#define NR_RT_SIGTIMEDWAIT 128
#define NR_SETPRIORITY 141
#define NR_SCHED_SETPARAM 142
#define NR_SCHED_SETSCHEDULER 144
#define NR_PIVOT_ROOT 155
#define NR_MOUNT 165
#define NR_UMOUNT2 166
#define NR_SWAPON 167
#define NR_SETHOSTNAME 170
#define NR_SETDOMAINNAME 171
#define NR_GETTID 186
#define NR_TIME 201
#define NR_FUTEX 202
#define NR_SCHED_SETAFFINITY 203
#define NR_IO_SUBMIT 209
#define NR_RESTART_SYSCALL 219
#define NR_SEMTIMEDOP 220
#define NR_CLOCK_GETTIME 228
#define NR_CLOCK_GETRES 229
#define NR_CLOCK_NANOSLEEP 230
#define NR_EPOLL_WAIT 232
#define NR_MQ_OPEN 240
#define NR_MQ_UNLINK 241
#define NR_WAITID 247
#define NR_ADD_KEY 248
#define NR_REQUEST_KEY 249
#define NR_KEYCTL 250
#define NR_IOPRIO_SET 251
#define NR_OPENAT 257
#define NR_PSELECT6 270
#define NR_PPOLL 271
#define NR_SPLICE 275
#define NR_TEE 276
#define NR_VMSPLICE 278
#define NR_EPOLL_PWAIT 281
#define NR_ACCEPT4 288
#define NR_RECVMMSG 299
#define NR_PRLIMIT64 302
#define NR_OPEN_BY_HANDLE_AT 304
#define NR_SENDMMSG 307
#define NR_GETCPU 309
#define NR_PROCESS_VM_WRITEV 311
#define NR_SCHED_SETATTR 314
#define NR_BPF 321

#define SYSCALL_NR(regs) ((long)(regs)->orig_ax)
#define ARG0(regs) ((long)(regs)->di)
#define ARG1(regs) ((long)(regs)->si)
#define ARG2(regs) ((long)(regs)->dx)
#define ARG3(regs) ((long)(regs)->r10)
/* TS_COMPAT */
#define IS_COMPAT(task) (BPF_CORE_READ(task, thread_info.status) & 2)

#define CASE_WAIT_FOR_FILES \
	case NR_POLL: \
	case NR_PPOLL: \
	case NR_SELECT: \
	case NR_PSELECT6: \
	case NR_EPOLL_WAIT: \
	case NR_EPOLL_PWAIT: \
	case 441 /* epoll_pwait2 */
#define CASE_TIME case NR_TIME
#define CASE_OPEN \
	case NR_OPEN: \
	case NR_CREAT

#elif defined(__TARGET_ARCH_arm64)

#define NR_IO_SUBMIT 2
#define NR_EPOLL_PWAIT 22
#define NR_IOPRIO_SET 30
#define NR_UMOUNT2 39
#define NR_MOUNT 40
#define NR_PIVOT_ROOT 41
#define NR_OPENAT 56
#define NR_READ 63
#define NR_WRITE 64
#define NR_READV 65
#define NR_WRITEV 66
#define NR_SENDFILE 71
#define NR_PSELECT6 72
#define NR_PPOLL 73
#define NR_VMSPLICE 75
#define NR_SPLICE 76
#define NR_TEE 77
#define NR_WAITID 95
#define NR_FUTEX 98
#define NR_NANOSLEEP 101
#define NR_CLOCK_GETTIME 113
#define NR_CLOCK_GETRES 114
#define NR_CLOCK_NANOSLEEP 115
#define NR_PTRACE 117
#define NR_SCHED_SETPARAM 118
#define NR_SCHED_SETSCHEDULER 119
#define NR_SCHED_SETAFFINITY 122
#define NR_SCHED_YIELD 124
#define NR_RESTART_SYSCALL 128
#define NR_RT_SIGTIMEDWAIT 137
#define NR_SETPRIORITY 140
#define NR_SETHOSTNAME 161
#define NR_SETDOMAINNAME 162
#define NR_GETCPU 168
#define NR_GETTIMEOFDAY 169
#define NR_GETPID 172
#define NR_GETPPID 173
#define NR_GETTID 178
#define NR_MQ_OPEN 180
#define NR_MQ_UNLINK 181
#define NR_MSGGET 186
#define NR_MSGCTL 187
#define NR_MSGRCV 188
#define NR_MSGSND 189
#define NR_SEMGET 190
#define NR_SEMCTL 191
#define NR_SEMTIMEDOP 192
#define NR_SEMOP 193
#define NR_SHMGET 194
#define NR_SHMCTL 195
#define NR_SHMAT 196
#define NR_ACCEPT 202
#define NR_CONNECT 203
#define NR_SENDTO 206
#define NR_RECVFROM 207
#define NR_SENDMSG 211
#define NR_RECVMSG 212
#define NR_BRK 214
#define NR_MUNMAP 215
#define NR_ADD_KEY 217
#define NR_REQUEST_KEY 218
#define NR_KEYCTL 219
#define NR_MMAP 222
#define NR_SWAPON 224
#define NR_MADVISE 233
#define NR_ACCEPT4 242
#define NR_RECVMMSG 243
#define NR_WAIT4 260
#define NR_PRLIMIT64 261
#define NR_OPEN_BY_HANDLE_AT 265
#define NR_SENDMMSG 269
#define NR_PROCESS_VM_WRITEV 271
#define NR_SCHED_SETATTR 274
#define NR_BPF 280

#define SYSCALL_NR(regs) ((long)(regs)->syscallno)
#define ARG0(regs) ((long)(regs)->orig_x0)
#define ARG1(regs) ((long)(regs)->regs[1])
#define ARG2(regs) ((long)(regs)->regs[2])
#define ARG3(regs) ((long)(regs)->regs[3])
/* TIF_32BIT */
#define IS_COMPAT(task) (BPF_CORE_READ(task, thread_info.flags) & (1UL << 22))

#define CASE_WAIT_FOR_FILES \
	case NR_PPOLL: \
	case NR_PSELECT6: \
	case NR_EPOLL_PWAIT: \
	case 441 /* epoll_pwait2 */
#define CASE_TIME case NR_CLOCK_GETRES
#define CASE_OPEN case NR_OPEN_BY_HANDLE_AT

#endif

/* The same number everywhere, and younger than some headers. */
#define NR_IO_URING_SETUP 425
#define NR_MOVE_MOUNT 429
#define NR_OPENAT2 437
#define NR_PIDFD_GETFD 438
#define NR_PROCESS_MADVISE 440
#define NR_MOUNT_SETATTR 442
