/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* How system calls are numbered, and where their arguments are when they return. */
#pragma once

#define SIG_CHILD 17
#define SIG_CONTINUE 18
/* QUIT, ILL, TRAP, ABRT, BUS, FPE, SEGV, XCPU, XFSZ, SYS: the kernel may write a file. */
#define DUMPS_CORE (1U << 3 | 1U << 4 | 1U << 5 | 1U << 6 | 1U << 7 | 1U << 8 | 1U << 11 | 1U << 24 | 1U << 25 | 1U << 31)
#define MSG_WAITALL 0x100
#define MSG_WAITFORONE 0x10000
#define bpf_be(x) __builtin_bswap64(x)

#if defined(__TARGET_ARCH_x86)

#define NR_READ 0
#define NR_WRITE 1
#define NR_OPEN 2
#define NR_POLL 7
#define NR_MMAP 9
#define NR_MUNMAP 11
#define NR_IOCTL 16
#define NR_EXIT 60
#define NR_EXIT_GROUP 231
#define NR_SYNCFS 306
#define NR_FDATASYNC 75
#define NR_FSYNC 74
#define NR_SYNC 162
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
#define ARG4(regs) ((long)(regs)->r8)
/* TS_COMPAT */
#define IS_COMPAT(task) ((task)->thread_info.status & 2)

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

/* A part of it may be done while the rest waits. */
#define CASE_GIVES \
	case NR_WRITE: \
	case NR_WRITEV: \
	case 18 /* pwrite64 */: \
	case 296 /* pwritev */: \
	case 328 /* pwritev2 */: \
	case 326 /* copy_file_range */: \
	case NR_SENDTO: \
	case NR_SENDMSG: \
	case NR_SENDMMSG: \
	case NR_SENDFILE: \
	case NR_SPLICE: \
	case NR_TEE: \
	case NR_VMSPLICE

/* Can change no file, whatever the arguments. Made from the names in harmless.txt. */
#define CASE_HARMLESS \
	case 0: case 3: case 4: case 5: case 6: case 7: case 8: case 10: case 11: case 12: case 13: case 14: \
	case 15: case 17: case 19: case 21: case 22: case 23: case 24: case 25: case 26: case 27: case 32: \
	case 33: case 34: case 35: case 36: case 37: case 38: case 39: case 41: case 42: case 43: case 44: \
	case 45: case 46: case 47: case 48: case 50: case 51: case 52: case 53: case 54: case 55: case 56: \
	case 57: case 58: case 59: case 61: case 62: case 63: case 72: case 73: case 74: case 75: case 78: \
	case 79: case 80: case 81: case 89: case 95: case 96: case 97: case 98: case 99: case 100: case 102: \
	case 104: case 105: case 106: case 107: case 108: case 109: case 110: case 111: case 112: case 113: \
	case 114: case 115: case 116: case 117: case 118: case 119: case 120: case 121: case 122: case 123: \
	case 124: case 125: case 126: case 127: case 128: case 129: case 130: case 131: case 135: case 137: \
	case 138: case 140: case 141: case 142: case 143: case 144: case 145: case 146: case 147: case 148: \
	case 149: case 150: case 151: case 152: case 157: case 158: case 160: case 161: case 162: case 170: \
	case 186: case 187: case 191: case 192: case 193: case 194: case 195: case 196: case 200: case 201: \
	case 202: case 203: case 204: case 213: case 217: case 218: case 219: case 221: case 222: case 223: \
	case 224: case 225: case 226: case 228: case 229: case 230: case 232: case 233: case 234: case 239: \
	case 247: case 251: case 252: case 253: case 254: case 255: case 262: case 267: case 269: case 270: \
	case 271: case 272: case 273: case 274: case 276: case 278: case 281: case 282: case 283: case 284: \
	case 286: case 287: case 288: case 289: case 290: case 291: case 292: case 293: case 294: case 295: \
	case 297: case 299: case 302: case 303: case 306: case 307: case 308: case 309: case 310: case 314: \
	case 315: case 317: case 318: case 319: case 322: case 324: case 325: case 327: case 332: case 334: \
	case 424: case 434: case 435: case 436: case 439: case 441: case 64: case 65: case 66: case 68: case 69: \
	case 70: case 71: case 220: case 242: case 243: case 449: case 454: case 455: case 456

#elif defined(__TARGET_ARCH_arm64)

#define NR_SYNC 81
#define NR_FSYNC 82
#define NR_FDATASYNC 83
#define NR_SYNCFS 267
#define NR_IOCTL 29
#define NR_EXIT 93
#define NR_EXIT_GROUP 94
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
#define ARG4(regs) ((long)(regs)->regs[4])
/* TIF_32BIT */
#define IS_COMPAT(task) ((task)->thread_info.flags & (1UL << 22))

#define CASE_WAIT_FOR_FILES \
	case NR_PPOLL: \
	case NR_PSELECT6: \
	case NR_EPOLL_PWAIT: \
	case 441 /* epoll_pwait2 */
#define CASE_TIME case NR_CLOCK_GETRES
#define CASE_OPEN case NR_OPEN_BY_HANDLE_AT

/* A part of it may be done while the rest waits. */
#define CASE_GIVES \
	case NR_WRITE: \
	case NR_WRITEV: \
	case 68 /* pwrite64 */: \
	case 70 /* pwritev */: \
	case 287 /* pwritev2 */: \
	case 285 /* copy_file_range */: \
	case NR_SENDTO: \
	case NR_SENDMSG: \
	case NR_SENDMMSG: \
	case NR_SENDFILE: \
	case NR_SPLICE: \
	case NR_TEE: \
	case NR_VMSPLICE

/* Can change no file, whatever the arguments. Made from the names in harmless.txt. */
#define CASE_HARMLESS \
	case 8: case 9: case 10: case 11: case 12: case 13: case 17: case 19: case 20: case 21: case 22: case 23: \
	case 24: case 25: case 26: case 27: case 28: case 30: case 31: case 32: case 43: case 44: case 48: \
	case 49: case 50: case 51: case 57: case 59: case 61: case 62: case 63: case 65: case 67: case 69: \
	case 72: case 73: case 74: case 75: case 77: case 78: case 79: case 80: case 81: case 82: case 83: \
	case 85: case 86: case 87: case 90: case 91: case 92: case 95: case 96: case 97: case 98: case 99: \
	case 100: case 101: case 102: case 103: case 107: case 108: case 109: case 110: case 111: case 113: \
	case 114: case 115: case 118: case 119: case 120: case 121: case 122: case 123: case 124: case 125: \
	case 126: case 127: case 128: case 129: case 130: case 131: case 132: case 133: case 134: case 135: \
	case 136: case 137: case 138: case 139: case 140: case 141: case 143: case 144: case 145: case 146: \
	case 147: case 148: case 149: case 150: case 151: case 152: case 153: case 154: case 155: case 156: \
	case 157: case 158: case 159: case 160: case 161: case 163: case 164: case 165: case 166: case 167: \
	case 168: case 169: case 172: case 173: case 174: case 175: case 176: case 177: case 178: case 179: \
	case 198: case 199: case 201: case 202: case 203: case 204: case 205: case 206: case 207: case 208: \
	case 209: case 210: case 211: case 212: case 213: case 214: case 215: case 216: case 220: case 221: \
	case 223: case 226: case 227: case 228: case 229: case 230: case 231: case 232: case 236: case 240: \
	case 242: case 243: case 260: case 261: case 267: case 268: case 269: case 270: case 274: case 275: \
	case 277: case 278: case 279: case 281: case 283: case 284: case 286: case 291: case 293: case 424: \
	case 434: case 435: case 436: case 439: case 441: case 182: case 183: case 186: case 187: case 188: \
	case 189: case 190: case 191: case 192: case 193: case 449: case 454: case 455: case 456

#endif

/* The same number everywhere, and younger than some headers. */
#define NR_IO_URING_SETUP 425
#define NR_MOVE_MOUNT 429
#define NR_OPENAT2 437
#define NR_PIDFD_GETFD 438
#define NR_PROCESS_MADVISE 440
#define NR_MOUNT_SETATTR 442

/* They take nothing in and change nothing, whatever they return. */
#define CASE_ALWAYS_INERT \
	case NR_SCHED_YIELD: \
	case NR_GETPID: \
	case NR_GETTID: \
	case NR_GETPPID: \
	case NR_CLOCK_GETTIME: \
	case NR_GETTIMEOFDAY: \
	CASE_TIME: \
	case NR_GETCPU
