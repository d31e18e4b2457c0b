/* The whole C ABI of libtaskd.so, and the byte layout of a worker's black box.
 *
 * libtaskd may be preloaded into every process of a job (shells, torchrun, workers, data loaders).
 * It has no constructor: until one of the functions below is called it starts no thread, opens no
 * file and prints nothing. It does not know Python.
 *
 * The death alarm. A thread of the worker (the guard) owns a robust futex in the black box for as
 * long as the process lives (get_robust_list(2)). When the process dies, however it dies, the
 * kernel writes that into the futex before it frees the memory, and a thread of the agent (the
 * watch) that sleeps on the futex sees it within about a millisecond, whatever the size of the
 * victim; a pidfd becomes readable only afterwards (0.1 s and more per gigabyte of 4 KiB pages).
 *
 * The worker can write anything into its box. The watch never locks anything there, takes nothing
 * but the kernel's exact mark for a death, and gives up on everything that does not make sense:
 * then the pidfd alone must do. What does and what does not ring the alarm:
 *   - a forked child has neither the guard thread nor its robust list: it cannot ring or silence
 * it;
 *   - execve() ends the guard thread, so it rings: the process is no worker any more;
 *   - while the kernel writes a core file, the alarm is as silent as everything else about it;
 *   - SIGSTOP does not ring it: look at alive_ns.
 *
 * Functions return 0, or a negative errno. They may be called from any thread and do not block for
 * longer than it takes to start a thread. Both threads have all signals blocked.
 */
#ifndef TASKD_H
#define TASKD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TASKD_API __attribute__((visibility("default")))

/* Raised when a function below changes or the layout does; Python refuses any other number. */
#define TASKD_ABI_VERSION 4

/* ---- Layout of a black box ------------------------------------------------------------------ */

/* A file of TASKD_BOX_BYTES (a memfd, sparse), mapped shared by the worker and its agent. All words
 * are native-endian; both sides run on one host. taskd/native/box_layout.py has the same numbers; a
 * test compares them through taskd_layout_value().
 *
 *        0  header, one page         struct taskd_box_header
 *     4096  layout area, 64 KiB      struct taskd_slot_header, then the payload: written rarely
 *    69632  extras slot 0, 5 MiB     the same: committed
 *  5312512  extras slot 1, 5 MiB     the same: committed, used in turn with slot 0
 * 10555392  extras slot 2, 5 MiB     the same: pending
 * 15798272  4 common slots, 64 KiB   the same: what several extras share, in front of their payload
 * 16060416  collectives, 64 KiB      struct taskd_collectives: communicators, the last calls
 * 16125952  not used
 * 16252928  last words, 512 KiB      text: native and Python stacks of a crash, or on demand
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

/* Only ever goes up, but for TASKD_WORDS_STACKS, which may come again. */
enum taskd_words_state {
    TASKD_WORDS_NONE = 0,
    TASKD_WORDS_WRITING = 1, /* what is there may be used as far as it goes */
    TASKD_WORDS_COMPLETE = 2
};

enum taskd_words_kind {
    TASKD_WORDS_SIGNAL = 1, /* a signal that ends the process came out of the process itself */
    TASKD_WORDS_EXIT = 2,   /* exit(), _exit() or the like with a status that is not 0 */
    TASKD_WORDS_STACKS = 3  /* stacks on demand: the process goes on */
};

/* What a process wrote when it crashed, or when it was asked for its stacks. Here and below the
 * number at the beginning of a comment is the offset in the struct. */
struct taskd_last_words {
    int64_t state;    /*   0: enum taskd_words_state */
    int64_t kind;     /*   8: enum taskd_words_kind */
    int64_t number;   /*  16: of the signal, or the exit status */
    int64_t code;     /*  24: si_code */
    uint64_t address; /*  32: si_addr; of a signal that was sent (code <= 0) si_pid of the sender */
    int64_t tid;      /*  40: kernel number of the thread that wrote */
    int64_t monotonic_ns;          /*  48 */
    int64_t text_bytes;            /*  56: length of the text so far */
    int64_t requested;             /*  64: how many times stacks were written on demand */
    int64_t frame_count;           /*  72 */
    uint64_t frames[TASKD_FRAMES]; /*  80 */
    char thread[16];               /* 464: name of the thread */
    char detail[256];              /* 480: type of an uncaught C++ exception, or "" */
    int64_t stacks_signal; /* 736: what to send for stacks on demand; 0: they cannot be had */
    int64_t stay; /* 744: by the agent: the main thread is not to go on after stacks on demand */
    uint8_t reserved[TASKD_LAST_WORDS_BYTES - 752];
};

/* From `pid` on written by the worker's Python, one aligned word at a time. Times are
 * CLOCK_MONOTONIC; 0: never. */
struct taskd_box_header {
    uint64_t magic;          /*   0 */
    uint32_t layout_version; /*   8 */
    uint32_t guard_state;    /*  12 */
    uint64_t alive_ns;       /*  16: stamped by the guard ten times a second */
    uint32_t guard_tid;      /*  24: kernel number of the guard, as it sees itself */
    uint8_t reserved_a[36];
    uint32_t owner_word; /*  64: the robust futex: guard_tid, FUTEX_WAITERS, FUTEX_OWNER_DIED */
    uint8_t reserved_d[60];
    int64_t pid;         /* 128 */
    int64_t incarnation; /* 136: which life of the rank this is */
    int64_t phase;       /* 144: taskd.native.black_box.Phase */
    int64_t version;     /* 152: committed steps; -1: holds no state */
    int64_t committed;   /* 160: extras slot (0 or 1) that was completed last; -1: none */
    int64_t generation;  /* 168: in which the worker is, as far as it has heard */
    int64_t progress;    /* 176: counts marks: of phases, and of commits */
    int64_t progress_ns; /* 184: of the last mark */
    int64_t python_ns;   /* 192: when the runtime's Python thread last ran */
    int64_t waiting;     /* 200: 1: a collective is not complete; 2: in a debugger; 0: neither */
    int64_t slowest_ns;  /* 208: the longest step among the last few hundred */
    int64_t slowest_long_ns[2]; /* 216: the longest checkpoint, the longest evaluation */
    uint8_t reserved_b[24];
    int64_t phase_ns[TASKD_PHASES];     /* 256: time spent in each phase, complete visits only */
    int64_t phase_count[TASKD_PHASES];  /* 384: number of them */
    struct taskd_last_words last_words; /* 512 */
    uint8_t reserved_c[TASKD_HEADER_BYTES - 512 - TASKD_LAST_WORDS_BYTES];
};

/* One communicator (process group). Counters are written by one thread at a time. */
struct taskd_communicator {
    uint64_t id;                 /*  0: the same on all its ranks; 0: the entry is free */
    int64_t entered;             /*  8: collectives begun: the number of the last one */
    int64_t left;                /* 16: NCCL, HCCL: calls returned. gloo: collectives completed */
    int64_t entered_ns;          /* 24: CLOCK_MONOTONIC of the last beginning */
    char name[TASKD_NAME_BYTES]; /* 32: of the group, as far as known */
};

/* One call in the ring. `mark` is odd while the entry is being written, and when it is complete
 * 2 * (index in the sequence of all calls) + 2. */
struct taskd_call {
    uint64_t mark;         /*  0 */
    uint64_t communicator; /*  8 */
    int64_t number;        /* 16: in its communicator; 0: point to point, which is not counted */
    int64_t bytes;         /* 24: of the input; -1: not known */
    int64_t dtype;         /* 32: as the library numbers it; -1: none */
    int64_t enter_ns;      /* 40 */
    int64_t leave_ns;      /* 48: 0: has not come back */
    int64_t peer;          /* 56: point to point and rooted: the other rank; -1: none */
    char name[TASKD_NAME_BYTES]; /* 64: "ncclAllReduce", "gloo:all_reduce" */
};

struct taskd_collectives {
    uint64_t next; /* 0: calls begun so far; the newest is at (next - 1) % TASKD_CALLS */
    uint8_t reserved[56];
    struct taskd_communicator communicators[TASKD_COMMUNICATORS]; /* 64 */
    struct taskd_call calls[TASKD_CALLS];                         /* 4160 */
};

/* `complete` becomes 0 before a payload is overwritten, and 1 after the other words are set. */
struct taskd_slot_header {
    int64_t complete; /*  0 */
    int64_t version;  /*  8 */
    int64_t length;   /* 16 */
    int64_t checksum; /* 24: Adler-32 of the payload ^ low half of version ^ common_checksum */
    int64_t common;   /* 32: extras only: common slot (1 to 4) that goes in front; 0: none */
    int64_t common_checksum; /* 40: that slot's checksum, to tell whether it is still the same */
    uint8_t reserved[TASKD_SLOT_HEADER_BYTES - 48];
};

/* What a watch writes to its pipe. */
struct taskd_death {
    uint64_t token;
    uint64_t monotonic_ns; /* CLOCK_MONOTONIC when the watch saw it */
    int32_t result;        /* EOWNERDEAD */
    int32_t reserved;
};

/* ---- Functions ------------------------------------------------------------------------------ */

/* TASKD_ABI_VERSION of the library, as against that of the header it is compared with. */
TASKD_API int taskd_abi_version(void);

/* A constant or offset of the layout by its name in layout.c ("box_bytes"), -1 if unknown. */
TASKD_API int64_t taskd_layout_value(const char *name);

/* Worker side: arms the alarm, once per black box. Maps its own view of `box_fd` and duplicates
 * `life_fd`, so the caller may close both. Returns when the futex is owned. -EBUSY: this box has,
 * or had, a guard (a forked child gets this too).
 *
 * `life_fd`: read end of a pipe whose write end only the agent holds; -1: none. When the pipe ends
 * the agent is gone: the guard sends SIGTERM to the process group and, 5 s later, SIGKILL. It needs
 * no interpreter lock for that. When this process does not lead its group, only the process itself
 * gets the signals: the group belongs to somebody else. */
TASKD_API int taskd_guard_start(int box_fd, int life_fd);

/* Agent side: starts a thread that waits for the guard to appear, then for the death, and then
 * writes one taskd_death record to `pipe_fd` (in one write, far below PIPE_BUF). Maps and
 * duplicates as above. */
TASKD_API int taskd_watch(int box_fd, uint64_t token, int pipe_fd);

/* Agent side, when the worker is gone: ends a watch that would wait for ever, because there never
 * was a guard or because the box is damaged. No effect on that of a living worker with a guard. */
TASKD_API int taskd_unwatch(int box_fd);

/* The calling thread, which waits most of the time, runs soon after it is woken even where others
 * compute on every core. Needs no privilege; not inherited by threads and processes that it starts.
 * Kernels before 6.12 ignore it: a wake-up on a busy machine then takes some milliseconds. */
TASKD_API int taskd_prefer_soon(void);

/* Worker side: prepares `library` ("libtorch_cpu.so", already loaded) so that timed waits in it can
 * be ended. 0, or -ENOENT: not loaded; -ENOSYS: it waits in a way that is not known. Nothing is
 * changed then. See waits.c. */
TASKD_API int taskd_waits_hook(const char *library);

/* Ends the timed waits of these threads, now and from now on, as if their time were over. Returns
 * how many were waiting. One that was just beginning to wait is not among them: it goes on a
 * quarter of a second later. */
TASKD_API int taskd_waits_expire(const int32_t *tids, int count);

/* These threads have ended: their numbers may be given to others. */
TASKD_API int taskd_waits_forgive(const int32_t *tids, int count);

/* 1 if this copy of the library was preloaded: its functions come before others'. Else 0. */
TASKD_API int taskd_is_preloaded(void);

/* Worker side: calls of the hooked functions (hooks.def) are written to this box from now on. Once
 * per process; -EBUSY. */
TASKD_API int taskd_collectives_start(int box_fd);

/* Forgets all communicators: those of an earlier generation never complete. This and the next
 * three: -ENOENT if the record was not started. */
TASKD_API int taskd_collectives_reset(void);

/* For backends without C symbols (gloo): what the runtime saw of a communicator. `name` may be "".
 * -ENOSPC: no entry is free. */
TASKD_API int taskd_collectives_see(uint64_t id, const char *name, int64_t entered, int64_t left);

/* ... and of one call, which is appended to the ring. Times as in struct taskd_call. */
TASKD_API int taskd_collectives_add(uint64_t id, const char *name, int64_t number, int64_t bytes,
                                    int64_t enter_ns, int64_t leave_ns);

/* A communicator that was seen is destroyed: its entry is free. 0 as well if there is none. */
TASKD_API int taskd_collectives_forget(uint64_t id);

/* getnameinfo() called by `library` ("libtorch_cpu.so", already loaded) asks no name server from
 * now on, see names.c. 0, or -ENOENT, -ENOSYS as for taskd_waits_hook. */
TASKD_API int taskd_names_numeric(const char *library);

/* Worker side: what is written to this box when the process crashes or exits with an error, and the
 * stacks when `stacks_signal` (a real-time signal; 0: none) arrives. Chains to the handlers that
 * were there. Call it in the main thread, which gets an alternate stack and so can tell of its
 * overflow. Exits are seen only if the library is preloaded. Once per process; -EBUSY. See
 * last_words.c. Returns the descriptor of the text, which is the library's own. */
TASKD_API int taskd_last_words_start(int box_fd, int stacks_signal);

/* After taskd_last_words_start(): how the Python stacks are written. What handles these two signals
 * now is kept, to be called with their numbers, and the signals are left to whoever wants them.
 * faulthandler.register() has made them handlers that write to the descriptor of the text: the
 * first the stacks of all threads, the second that of the calling thread. -EINVAL: no handler. */
TASKD_API int taskd_last_words_python(int all_threads_signal, int one_thread_signal);

/* Copies `count` bytes between areas that do not overlap, and returns their checksum, in one pass
 * at about the speed of memcpy. Any alignment, any count. The checksum depends on the order of the
 * words and on the byte order of the machine: it is for memory and processes of one host. Checksums
 * of parts are made one by a checksum of their array. What was written before the call is visible
 * before what it copies, and that before what is written after it. See checksum.c. */
TASKD_API uint64_t taskd_copy_checksummed(void *destination, const void *source, size_t count);

/* The checksum alone. */
TASKD_API uint64_t taskd_checksum(const void *source, size_t count);

#ifdef __cplusplus
}
#endif

#endif
