/* Agent side of the death alarm: a thread for each life of a worker, which sleeps on the owner's
 * futex and reports when the owner died.
 *
 * The worker can write to the word. So nothing is ever locked here: the thread sets FUTEX_WAITERS,
 * sleeps, and looks. A word that is neither the guard's nor the kernel's mark of its death ends the
 * watch in silence: a false alarm would cost a healthy process, a missing one costs the time until
 * the pidfd becomes readable.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "../black_box.h"
#include "../descriptor.h"
#include "threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_QUICK_ROUNDS 100 /* far more than a wait of an intact box returns */
#define PAUSE_NS 1000000

struct watch {
    struct taskd_box_header *header;
    uint64_t token;
    struct taskd_descriptor pipe; /* the caller's number may be closed and used again */
};

static void release(struct watch *watch)
{
    if (watch->pipe.fd >= 0)
        close(watch->pipe.fd);
    if (watch->header != NULL)
        taskd_unmap_header(watch->header);
    free(watch);
}

/* A wait normally ends once; one that returns again and again is due to damage of the word. */
static void slow_down(unsigned rounds)
{
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    if (rounds > MAX_QUICK_ROUNDS)
        nanosleep(&pause, NULL);
}

static bool wait_for_guard(struct taskd_box_header *header)
{
    uint32_t state;
    for (unsigned rounds = 0;; rounds++) {
        state = atomic_load(TASKD_ATOMIC(header->guard_state));
        if (state >= TASKD_GUARD_HELD)
            return state == TASKD_GUARD_HELD;
        taskd_futex_wait(TASKD_ATOMIC(header->guard_state), state);
        slow_down(rounds);
    }
}

/* Whether the box still says what it said when the watch began, so that it can be believed. */
static bool is_whole(struct taskd_box_header *header, uint32_t guard_tid)
{
    return header->magic == TASKD_BOX_MAGIC &&
           atomic_load(TASKD_ATOMIC(header->guard_state)) == TASKD_GUARD_HELD &&
           atomic_load(TASKD_ATOMIC(header->guard_tid)) == guard_tid;
}

/* True: the owner died. False: the box is damaged, and nothing can be known from it. The kernel
 * writes exactly FUTEX_OWNER_DIED, with or without FUTEX_WAITERS, and wakes one sleeper if
 * FUTEX_WAITERS was set: see futex_exit_release() in the kernel. */
static bool wait_for_death(struct taskd_box_header *header)
{
    _Atomic uint32_t *word = TASKD_ATOMIC(header->owner_word);
    const uint32_t guard_tid = atomic_load(TASKD_ATOMIC(header->guard_tid));
    if (guard_tid == 0 || (guard_tid & ~FUTEX_TID_MASK) != 0)
        return false;
    for (unsigned rounds = 0;; rounds++) {
        uint32_t seen = atomic_load(word);
        if ((seen & ~FUTEX_WAITERS) == FUTEX_OWNER_DIED)
            return is_whole(header, guard_tid);
        if ((seen & ~FUTEX_WAITERS) != guard_tid)
            return false;
        if ((seen & FUTEX_WAITERS) != 0 ||
            atomic_compare_exchange_strong(word, &seen, seen | FUTEX_WAITERS))
            taskd_futex_wait(word, guard_tid | FUTEX_WAITERS);
        slow_down(rounds);
    }
}

static void report(const struct watch *watch)
{
    struct taskd_death death = {.token = watch->token,
                                .monotonic_ns = (uint64_t)taskd_monotonic_ns(),
                                .result = EOWNERDEAD};
    while (write(watch->pipe.fd, &death, sizeof death) < 0 && errno == EINTR) {
    }
    /* EPIPE: the agent closed its end and does not want to know. SIGPIPE is blocked here. */
}

static void *watch_body(void *argument)
{
    struct watch *watch = argument;
    pthread_setname_np(pthread_self(), "taskd-watch");
    taskd_run_at_once();
    if (wait_for_guard(watch->header) && wait_for_death(watch->header)) {
        report(watch);
        /* The kernel woke one sleeper, there may be more. */
        taskd_futex_wake(TASKD_ATOMIC(watch->header->owner_word));
    }
    release(watch);
    return NULL;
}

int taskd_watch(int box_fd, uint64_t token, int pipe_fd)
{
    struct watch *watch = malloc(sizeof *watch);
    if (watch == NULL)
        return -ENOMEM;
    *watch = (struct watch){.token = token, .pipe.fd = -1};
    int result = 0;
    watch->header = taskd_map_header(box_fd, &result);
    if (watch->header != NULL)
        result = taskd_duplicate(&watch->pipe, pipe_fd);
    if (result == 0)
        result = taskd_start_thread(watch_body, watch);
    if (result != 0)
        release(watch);
    return result;
}

int taskd_unwatch(int box_fd)
{
    int result = 0;
    struct taskd_box_header *header = taskd_map_part(box_fd, 0, TASKD_HEADER_BYTES, &result);
    if (header == NULL)
        return result; /* a damaged box is mapped, too: the watch of it is to end */
    _Atomic uint32_t *word = TASKD_ATOMIC(header->guard_state);
    uint32_t state = atomic_load(word);
    while (state < TASKD_GUARD_HELD &&
           !atomic_compare_exchange_weak(word, &state, TASKD_GUARD_CANCELLED)) {
    }
    taskd_futex_wake(word);
    taskd_futex_wake(
        TASKD_ATOMIC(header->owner_word)); /* who sleeps there looks at the box again */
    taskd_unmap_header(header);
    return 0;
}
