/* The whole C ABI of libtaskd.so, and the byte layout of a worker's black box.
 *
 * libtaskd may be preloaded into every process of a job (shells, torchrun, workers, data loaders). It has no constructor:
 * until one of the functions below is called it starts no thread, opens no file and prints nothing. It does not know Python.
 *
 * The death alarm. A thread of the worker (the guard) holds a robust process-shared mutex in the black box for as long as
 * the process lives. When the process dies, however it dies, the kernel releases the mutex before it tears the memory
 * down, and a thread of the agent (the watch) that waits for the mutex sees it within a millisecond or so, whatever the size
 * of the victim; a pidfd becomes readable only after the tear-down (0.1 s and more per gigabyte of 4 KiB pages).
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

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TASKD_API __attribute__((visibility("default")))

/* Raised when a function below changes or the layout does; the Python side refuses any other number. */
#define TASKD_ABI_VERSION 1

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
 * 16060416  not used, up to 16 MiB
 */
#define TASKD_BOX_MAGIC 0x584F42444B534154 /* "TASKDBOX" */
#define TASKD_BOX_LAYOUT_VERSION 1
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
#define TASKD_MUTEX_BYTES 64 /* pthread_mutex_t has 40 bytes on x86-64, 48 on aarch64 */

/* guard_state: a futex word. Only ever goes up. */
enum taskd_guard_state {
    TASKD_GUARD_NONE = 0,     /* no guard yet: the mutex must not be touched */
    TASKD_GUARD_STARTING = 1, /* the worker is initialising the mutex */
    TASKD_GUARD_HELD = 2,     /* the mutex is locked; who gets it from now on is told of a death */
    TASKD_GUARD_CANCELLED = 3 /* the agent gave this life up before it had a guard */
};

struct taskd_box_header {
    /*   0 */ uint64_t magic;
    /*   8 */ uint32_t layout_version;
    /*  12 */ uint32_t guard_state;
    /*  16 */ uint64_t alive_ns; /* CLOCK_MONOTONIC, marked by the guard ten times a second; 0: never */
    /*  24 */ uint8_t reserved_a[40];
    /*  64 */ uint8_t mutex[TASKD_MUTEX_BYTES];
    /* 128 */ int64_t pid;         /* from here on written by the worker's Python, one aligned word at a time */
    /* 136 */ int64_t incarnation; /* which life of the rank this is */
    /* 144 */ int64_t phase;       /* taskd.native.black_box.Phase */
    /* 152 */ int64_t version;     /* committed steps; -1: holds no state */
    /* 160 */ int64_t committed;   /* extras slot (0 or 1) that was completed last; -1: none */
    /* 168 */ uint8_t reserved_b[TASKD_HEADER_BYTES - 168];
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
 * close both. Returns when the mutex is held. -EBUSY: this box has, or had, a guard (a forked child gets this too).
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

/* Agent side: lets a watch go whose worker died without ever having had a guard. No effect on a guarded box. */
TASKD_API int taskd_unwatch(int box_fd);

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

struct taskd_death {
    uint64_t token;
    uint64_t monotonic_ns; /* CLOCK_MONOTONIC when the mutex came free */
    int32_t result;        /* of pthread_mutex_lock: EOWNERDEAD, or ENOTRECOVERABLE if another watch was first */
    int32_t reserved;
};

#ifdef __cplusplus
}
#endif

#endif
