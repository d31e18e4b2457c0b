/* The whole C ABI of libtaskd.so, and the byte layout of a worker's black box.
 *
 * libtaskd may be preloaded into every process of a job (shells, torchrun, workers, data loaders). It has no constructor:
 * until one of the functions below is called it starts no thread, opens no file and prints nothing. It does not know Python.
 *
 * The death alarm. A thread of the worker (the guard) owns a robust futex in the black box for as long as the process
 * lives (get_robust_list(2)). When the process dies, however it dies, the kernel writes that into the futex before it tears the
 * memory down, and a thread of the agent (the watch) that sleeps on the futex sees it within a millisecond or so, whatever the
 * size of the victim; a pidfd becomes readable only after the tear-down (0.1 s and more per gigabyte of 4 KiB pages).
 *
 * The worker can write anything into its box. The watch never locks anything there, takes nothing but the kernel's exact mark for a
 * death, and gives up on everything that does not make sense: then the pidfd alone must do.
 *
 * What does and what does not ring the alarm:
 *   - a child forked by the worker has neither the guard thread nor its robust list: it neither rings nor silences the alarm;
 *   - execve() in the worker ends the guard thread, so it rings: the process is no worker any more;
 *   - while the kernel writes a core file the alarm is silent, as is everything else about that process;
 *   - SIGSTOP does not ring it: look at alive_ns.
 *
 * Functions return 0, or a negative errno. They may be called from any thread and do not block for longer than it takes
 * to start a thread. Both threads have all signals blocked.
 */
#ifndef TASKD_H
#define TASKD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TASKD_API __attribute__((visibility("default")))

/* Raised when a function below changes or the layout does; the Python side refuses any other number. */
#define TASKD_ABI_VERSION 2

/* ---- Layout of a black box ------------------------------------------------------------------------------------------
 * A file of TASKD_BOX_BYTES (a memfd, sparse), mapped shared by the worker and its agent. All words are native-endian;
 * both sides run on one host. taskd/native/black_box.py carries the same numbers; a test compares them through
 * taskd_layout_value().
 *
 *        0  header, one page           struct taskd_box_header
 *     4096  layout area, 64 KiB        struct taskd_slot_header, then the payload: written rarely
 *    69632  extras slot 0, 5 MiB       struct taskd_slot_header, then the payload: committed
 *  5312512  extras slot 1, 5 MiB       the same: committed, used in turn with slot 0
 * 10555392  extras slot 2, 5 MiB       the same: pending
 * 15798272  4 common slots, 64 KiB    the same: what several extras have in common, in front of their payloads
 * 16060416  collectives, 64 KiB         struct taskd_collectives: communicators, and the last calls in a ring
 * 16125952  not used
 * 16252928  last words, 512 KiB         text: native and Python stacks of a crash, or on demand
 */
#define TASKD_BOX_MAGIC 0x584F42444B534154 /* "TASKDBOX" */
#define TASKD_BOX_LAYOUT_VERSION 2
#define TASKD_BOX_BYTES (16 * 1024 * 1024)
#define TASKD_HEADER_BYTES 4096
#define TASKD_LAYOUT_OFFSET 4096
#define TASKD_LAYOUT_BYTES (64 * 1024)
#define TASKD_EXTRAS_OFFSET 69632
#define TASKD_EXTRAS_BYTES (5 * 1024 * 1024)
#define TASKD_EXTRAS_SLOTS 3
#define TASKD_COMMON_OFFSET 15798272
#define TASKD_COMMON_BYTES (64 * 1024)
#define TASKD_COMMON_SLOTS 4
#define TASKD_SLOT_HEADER_BYTES 64
#define TASKD_COLLECTIVES_OFFSET 16060416
#define TASKD_COLLECTIVES_BYTES (64 * 1024)
#define TASKD_COMMUNICATORS 64
#define TASKD_CALLS 256
#define TASKD_NAME_BYTES 32
#define TASKD_TEXT_OFFSET 16252928
#define TASKD_TEXT_BYTES (512 * 1024)
#define TASKD_PHASES 16
#define TASKD_FRAMES 48

/* guard_state: a futex word. Only ever goes up. */
enum taskd_guard_state {
    TASKD_GUARD_NONE = 0,     /* no guard yet */
    TASKD_GUARD_STARTING = 1, /* a thread is being started */
    TASKD_GUARD_HELD = 2,     /* owner_word and guard_tid are valid */
    TASKD_GUARD_CANCELLED = 3 /* the agent gave this life up before it had a guard */
};

#define TASKD_LAST_WORDS_BYTES 1024

/* state of the last words: only ever goes up, but for TASKD_WORDS_STACKS, which may come again. */
enum taskd_words_state {
    TASKD_WORDS_NONE = 0,
    TASKD_WORDS_WRITING = 1,  /* the record is being written: what is there may be used as far as it goes */
    TASKD_WORDS_COMPLETE = 2,
};

enum taskd_words_kind {
    TASKD_WORDS_SIGNAL = 1,    /* a signal that ends the process came out of the process itself */
    TASKD_WORDS_EXIT = 2,      /* exit(), _exit() or the like with a status that is not 0 */
    TASKD_WORDS_STACKS = 3,    /* stacks on demand: the process goes on */
};

/* What a process wrote when it crashed, or when it was asked for its stacks. Text follows at TASKD_TEXT_OFFSET. */
struct taskd_last_words {
    /*   0 */ int64_t state;       /* enum taskd_words_state */
    /*   8 */ int64_t kind;        /* enum taskd_words_kind */
    /*  16 */ int64_t number;      /* of the signal, or the exit status */
    /*  24 */ int64_t code;        /* si_code */
    /*  32 */ uint64_t address;    /* si_addr; of a signal that was sent (code <= 0): who sent it, si_pid */
    /*  40 */ int64_t tid;         /* kernel number of the thread that wrote */
    /*  48 */ int64_t monotonic_ns;
    /*  56 */ int64_t text_bytes;  /* length of the text so far */
    /*  64 */ int64_t requested;   /* how many times stacks were written on demand */
    /*  72 */ int64_t frame_count;
    /*  80 */ uint64_t frames[TASKD_FRAMES];
    /* 464 */ char thread[16];     /* name of the thread */
    /* 480 */ char detail[256];    /* type of an uncaught C++ exception, or "" */
    /* 736 */ int64_t stacks_signal; /* what to send for the stacks on demand; 0: they cannot be had */
    /* 744 */ int64_t stay;         /* written by the agent: the main thread is not to go on after stacks on demand */
    /* 752 */ uint8_t reserved[TASKD_LAST_WORDS_BYTES - 752];
};

struct taskd_box_header {
    /*   0 */ uint64_t magic;
    /*   8 */ uint32_t layout_version;
    /*  12 */ uint32_t guard_state;
    /*  16 */ uint64_t alive_ns; /* CLOCK_MONOTONIC, marked by the guard ten times a second; 0: never */
    /*  24 */ uint32_t guard_tid; /* kernel number of the guard, as it sees itself */
    /*  28 */ uint8_t reserved_a[36];
    /*  64 */ uint32_t owner_word; /* the robust futex: guard_tid, and the kernel's FUTEX_WAITERS and FUTEX_OWNER_DIED */
    /*  68 */ uint8_t reserved_d[60];
    /* 128 */ int64_t pid;         /* from here on written by the worker's Python, one aligned word at a time */
    /* 136 */ int64_t incarnation; /* which life of the rank this is */
    /* 144 */ int64_t phase;       /* taskd.native.black_box.Phase */
    /* 152 */ int64_t version;     /* committed steps; -1: holds no state */
    /* 160 */ int64_t committed;   /* extras slot (0 or 1) that was completed last; -1: none */
    /* 168 */ int64_t generation;  /* in which the worker is, as far as it has heard */
    /* 176 */ int64_t progress;    /* counts marks: of phases, and of commits */
    /* 184 */ int64_t progress_ns; /* CLOCK_MONOTONIC of the last of them; 0: none yet */
    /* 192 */ int64_t python_ns;   /* CLOCK_MONOTONIC when the runtime's Python thread last ran; 0: never */
    /* 200 */ int64_t waiting;     /* 1: the runtime saw a collective begun that is not complete; 2: the main thread is in a debugger; 0: neither */
    /* 208 */ int64_t slowest_ns;  /* the longest step among the last few hundred */
    /* 216 */ int64_t slowest_long_ns[2]; /* the longest checkpoint, the longest evaluation */
    /* 232 */ uint8_t reserved_b[24];
    /* 256 */ int64_t phase_ns[TASKD_PHASES];    /* time spent in each phase, complete visits only */
    /* 384 */ int64_t phase_count[TASKD_PHASES]; /* number of them */
    /* 512 */ struct taskd_last_words last_words;
    uint8_t reserved_c[TASKD_HEADER_BYTES - 512 - TASKD_LAST_WORDS_BYTES];
};

/* One communicator (process group). Counters are written by one thread at a time. */
struct taskd_communicator {
    /*  0 */ uint64_t id;         /* the same on all its ranks; 0: the entry is free */
    /*  8 */ int64_t entered;     /* collectives begun: the number of the last one */
    /* 16 */ int64_t left;        /* NCCL, HCCL: calls returned. gloo: collectives completed */
    /* 24 */ int64_t entered_ns;  /* CLOCK_MONOTONIC of the last beginning */
    /* 32 */ char name[TASKD_NAME_BYTES]; /* of the group, as far as known */
};

/* One call in the ring. `mark` is odd while the entry is being written, 2 * (index in the sequence of all calls) + 2 when complete. */
struct taskd_call {
    /*  0 */ uint64_t mark;
    /*  8 */ uint64_t communicator;
    /* 16 */ int64_t number;      /* in its communicator; 0: point to point, which is not counted */
    /* 24 */ int64_t bytes;       /* of the input; -1: not known */
    /* 32 */ int64_t dtype;       /* as the library numbers it; -1: none */
    /* 40 */ int64_t enter_ns;
    /* 48 */ int64_t leave_ns;    /* 0: has not come back */
    /* 56 */ int64_t peer;        /* point to point and rooted: the other rank; -1: none */
    /* 64 */ char name[TASKD_NAME_BYTES]; /* "ncclAllReduce", "gloo:all_reduce" */
};

struct taskd_collectives {
    /*    0 */ uint64_t next;     /* calls begun so far; the newest is at (next - 1) % TASKD_CALLS */
    /*    8 */ uint8_t reserved[56];
    /*   64 */ struct taskd_communicator communicators[TASKD_COMMUNICATORS];
    /* 4160 */ struct taskd_call calls[TASKD_CALLS];
};

/* Before a payload is overwritten `complete` becomes 0, after the other words are set it becomes 1. */
struct taskd_slot_header {
    /*  0 */ int64_t complete;
    /*  8 */ int64_t version;
    /* 16 */ int64_t length;
    /* 24 */ int64_t checksum;        /* Adler-32 of the payload XOR the low 32 bits of the version XOR common_checksum */
    /* 32 */ int64_t common;          /* extras only: common slot (1 to 4) that goes in front; 0: none */
    /* 40 */ int64_t common_checksum; /* that slot's checksum, to tell whether it is still the same */
    /* 48 */ uint8_t reserved[TASKD_SLOT_HEADER_BYTES - 48];
};

/* ---- Functions --------------------------------------------------------------------------------------------------- */

/* TASKD_ABI_VERSION of the library, as against that of the header it is compared with. */
TASKD_API int taskd_abi_version(void);

/* A constant or offset of the layout by name ("box_bytes", "offset_phase"; the table is in layout.c), -1 if unknown. */
TASKD_API int64_t taskd_layout_value(const char *name);

/* Worker side: arms the alarm, once per black box. Maps its own view of `box_fd` and duplicates `life_fd`, so the caller may
 * close both. Returns when the futex is owned. -EBUSY: this box has, or had, a guard (a forked child gets this too).
 *
 * `life_fd`: read end of a pipe whose write end only the agent holds; -1: none. When the pipe ends the agent is gone: the guard
 * sends SIGTERM to the process group and, 5 s later, SIGKILL. It needs no interpreter lock for that. When this process does not
 * lead its group, only the process itself gets the signals: the group belongs to somebody else.
 */
TASKD_API int taskd_guard_start(int box_fd, int life_fd);

/* Agent side: starts a thread that waits for the guard to appear, then for the death, and then writes one
 * taskd_death record to `pipe_fd` (in one write, far below PIPE_BUF). Maps and duplicates as above.
 */
TASKD_API int taskd_watch(int box_fd, uint64_t token, int pipe_fd);

/* Agent side, when the worker is gone: lets a watch go that would wait for ever, because there never was a guard or because
 * the box is damaged. No effect on the watch of a living worker with a guard. */
TASKD_API int taskd_unwatch(int box_fd);

/* Agent side: the calling thread, which waits for news most of the time, runs soon after it is woken even where others compute on every
 * core. Needs no privilege; threads and processes that it starts are as ever. Kernels before 6.12 ignore it. */
TASKD_API int taskd_prefer_soon(void);

/* Worker side: prepares `library` ("libtorch_cpu.so", already loaded) so that timed waits in it can be ended. 0, or -ENOENT: not
 * loaded; -ENOSYS: it waits in a way that is not known. Nothing is changed then. See waits.c.
 */
TASKD_API int taskd_waits_hook(const char *library);

/* Ends the timed waits of these threads, now and from now on, as if their time were over. Returns how many were waiting. A
 * thread that was just beginning to wait may be missed: call again until it has gone on.
 */
TASKD_API int taskd_waits_expire(const int32_t *tids, int count);

/* These threads have ended: their numbers may be given to others. */
TASKD_API int taskd_waits_forgive(const int32_t *tids, int count);

/* 1 if this copy of the library was preloaded (its functions come before those of other libraries), else 0. */
TASKD_API int taskd_is_preloaded(void);

/* Worker side: calls of the hooked functions (hooks.def) are written to this box from now on. Once per process; -EBUSY. */
TASKD_API int taskd_collectives_start(int box_fd);

/* Forgets all communicators: those of an earlier generation never complete. 0, or -ENOENT: not started. */
TASKD_API int taskd_collectives_reset(void);

/* For backends without C symbols (gloo): what the runtime saw of a communicator. `name` may be "". 0, -ENOENT: not started,
 * -ENOSPC: no entry is free. */
TASKD_API int taskd_collectives_see(uint64_t id, const char *name, int64_t entered, int64_t left);

/* ... and of one call, which is appended to the ring. Times as in struct taskd_call. 0, or -ENOENT: not started. */
TASKD_API int taskd_collectives_add(uint64_t id, const char *name, int64_t number, int64_t bytes, int64_t enter_ns, int64_t leave_ns);

/* getnameinfo() called by `library` ("libtorch_cpu.so", already loaded) asks no name server from now on: TCPStore's client does so once
 * per connection, and where no resolver answers that can take 10 s. 0, or -ENOENT, -ENOSYS as for taskd_waits_hook. */
TASKD_API int taskd_names_numeric(const char *library);

/* Worker side: what is written to this box when the process crashes or exits with an error, and the stacks when `stacks_signal` (a
 * real-time signal; 0: none) arrives. Chains to the handlers that were there. Call it in the main thread, which gets an alternate
 * stack and so can tell of its overflow. Exits are seen only if the library is preloaded. Once per process; -EBUSY. See last_words.c. */
TASKD_API int taskd_last_words_start(int box_fd, int stacks_signal);

/* Copies `count` bytes between areas that do not overlap, and returns their checksum, in one pass at about the speed of memcpy. Any alignment,
 * any count. The checksum depends on the order of the words and on the byte order of the machine: it is for memory and processes of one
 * host. Checksums of parts are made one by a checksum of their array. What was written before the call is visible before what it copies, and
 * that before what is written after it. See checksum.c. */
TASKD_API uint64_t taskd_copy_checksummed(void *destination, const void *source, size_t count);

/* The checksum alone. */
TASKD_API uint64_t taskd_checksum(const void *source, size_t count);

struct taskd_death {
    uint64_t token;
    uint64_t monotonic_ns; /* CLOCK_MONOTONIC when the watch saw it */
    int32_t result;        /* EOWNERDEAD */
    int32_t reserved;
};

#ifdef __cplusplus
}
#endif

#endif
