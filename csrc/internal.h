/* What the parts of the library share: mapping a box, starting a quiet thread, the futex word, imports. Not part of the ABI. */
#ifndef TASKD_INTERNAL_H
#define TASKD_INTERNAL_H

#include "include/taskd.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

/* A view of the header page of `box_fd`, not inherited by forked children; NULL and *error = -errno if it is no black box. */
struct taskd_box_header *taskd_map_header(int box_fd, int *error);
/* The same of a file that has the size of a box, whatever it says: for a box that may have been damaged since. */
struct taskd_box_header *taskd_map_any_header(int box_fd, int *error);
void taskd_unmap_header(struct taskd_box_header *header);

/* A detached thread with a small stack and every signal blocked. 0 or -errno. It names itself: whoever started it must not touch it, because
 * it may have ended already. */
int taskd_start_thread(void *(*body)(void *), void *argument);

/* The calling thread runs rarely and shortly: ask the scheduler not to let it queue behind a slice of somebody's computation.
 * Needs no privilege; kernels before 6.12 ignore it, and then a wake-up on a busy machine takes some milliseconds longer.
 */
void taskd_prefer_soon_to_long(void);

/* For a thread that does next to nothing and then sleeps: the lowest real-time priority if that is permitted, else as above. Never for
 * a thread of the worker: the last thread of a process frees its memory, and a real-time thread lets nobody else run meanwhile.
 */
void taskd_run_at_once(void);

uint64_t taskd_monotonic_ns(void);

/* FUTEX_WAIT and FUTEX_WAKE on a word in memory that processes share. */
void taskd_futex_wait(_Atomic uint32_t *word, uint32_t seen);
void taskd_futex_wake(_Atomic uint32_t *word);

/* One function that a loaded library imports, and where the address that it calls is kept; NULL: it does not import it. */
struct taskd_import {
    const char *name;
    void **slot;
};

/* Fills the slots of `imports`, whose names are given. 0, or -ENOENT: `library` ("libtorch_cpu.so") is not loaded. */
int taskd_find_imports(const char *library, struct taskd_import *imports, size_t count);

/* Lets the library call `replacement` from now on; the protection of the page stays what it was. 0 or -errno. The slot is not NULL. */
int taskd_redirect_import(const struct taskd_import *import, void *replacement);

/* The word is plain uint32_t in the public header, which C++ reads too; C11 atomics of that size have the same form. */
_Static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "a futex word");
_Static_assert(sizeof(_Atomic uint64_t) == sizeof(uint64_t), "a time mark");

static inline _Atomic uint32_t *taskd_guard_word(struct taskd_box_header *header)
{
    return (_Atomic uint32_t *)&header->guard_state;
}

static inline _Atomic uint32_t *taskd_guard_tid(struct taskd_box_header *header)
{
    return (_Atomic uint32_t *)&header->guard_tid;
}

static inline _Atomic uint32_t *taskd_owner_word(struct taskd_box_header *header)
{
    return (_Atomic uint32_t *)&header->owner_word;
}

#endif
