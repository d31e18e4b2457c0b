/* Threads that sleep nearly always: starting one, having it run soon after it wakes, futexes.
 * Private, defined in threads.c. */
#ifndef TASKD_THREADS_H
#define TASKD_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

/* A detached thread with a small stack and every signal blocked. 0 or -errno. The thread names
 * itself: it may have ended before its starter could touch it. */
int taskd_start_thread(void *(*body)(void *), void *argument);

/* Gives the calling thread the lowest real-time priority if that is permitted, else what
 * taskd_prefer_soon() does. Not for threads of a worker: the last thread of a process frees its
 * memory, and a real-time thread would let nobody else run meanwhile. */
void taskd_run_at_once(void);

/* FUTEX_WAIT and FUTEX_WAKE on a word in memory that processes share. */
void taskd_futex_wait(_Atomic uint32_t *word, uint32_t seen);
void taskd_futex_wake(_Atomic uint32_t *word);

#endif
