/* Agent side of the death alarm: one thread per worker life that sleeps on the owner's futex and reports when the owner died.
 *
 * The word lies in memory that the worker can write to. So nothing is ever locked here: the thread sets FUTEX_WAITERS, sleeps, and looks.
 * A word that is neither the guard's nor the kernel's mark of its death ends the watch in silence: a false alarm would cost a
 * healthy process, a missing one costs the time until the pidfd speaks.
 */
#define _GNU_SOURCE /* F_DUPFD_CLOEXEC, pthread_setname_np */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_ROUNDS 100 /* far more than any honest wait comes back */
#define PAUSE_NS 1000000

struct watch {
    struct taskd_box_header *header;
    uint64_t token;
    int pipe_fd; /* ours: the caller's number may be closed and used again while we wait */
};

static void release(struct watch *watch)
{
    if (watch->pipe_fd >= 0) {
        close(watch->pipe_fd);
    }
    if (watch->header != NULL) {
        taskd_unmap_header(watch->header);
    }
    free(watch);
}

/* A wait normally ends once. One that comes back again and again is fed by somebody who writes to the word all the time. */
static void slow_down(unsigned rounds)
{
    if (rounds > PATIENCE_ROUNDS) {
        struct timespec pause = {.tv_nsec = PAUSE_NS};
        nanosleep(&pause, NULL);
    }
}

static uint32_t wait_for_guard(struct taskd_box_header *header)
{
    _Atomic uint32_t *word = taskd_guard_word(header);
    uint32_t state;
    for (unsigned rounds = 0; (state = atomic_load(word)) < TASKD_GUARD_HELD; rounds++) {
        taskd_futex_wait(word, state);
        slow_down(rounds);
    }
    return state;
}

/* Whether the box still says what it said when the watch began, so that a death in it can be believed. */
static int is_whole(struct taskd_box_header *header, uint32_t guard_tid)
{
    return header->magic == TASKD_BOX_MAGIC && atomic_load(taskd_guard_word(header)) == TASKD_GUARD_HELD &&
           atomic_load(taskd_guard_tid(header)) == guard_tid;
}

/* 1: the owner died. 0: the box is damaged, and nothing can be known from it. The kernel writes exactly FUTEX_OWNER_DIED, with or
 * without FUTEX_WAITERS, and wakes one sleeper if FUTEX_WAITERS was set: see futex_exit_release() in the kernel. */
static int wait_for_death(struct taskd_box_header *header)
{
    _Atomic uint32_t *word = taskd_owner_word(header);
    const uint32_t guard_tid = atomic_load(taskd_guard_tid(header));
    if (guard_tid == 0 || (guard_tid & ~FUTEX_TID_MASK) != 0) {
        return 0;
    }
    for (unsigned rounds = 0;; rounds++) {
        uint32_t seen = atomic_load(word);
        if ((seen & ~FUTEX_WAITERS) == FUTEX_OWNER_DIED) {
            return is_whole(header, guard_tid);
        }
        if ((seen & ~FUTEX_WAITERS) != guard_tid) {
            return 0;
        }
        if ((seen & FUTEX_WAITERS) != 0 || atomic_compare_exchange_strong(word, &seen, seen | FUTEX_WAITERS)) {
            taskd_futex_wait(word, guard_tid | FUTEX_WAITERS);
        }
        slow_down(rounds);
    }
}

static void report(const struct watch *watch)
{
    struct taskd_death death = {.token = watch->token, .monotonic_ns = taskd_monotonic_ns(), .result = EOWNERDEAD};
    while (write(watch->pipe_fd, &death, sizeof death) < 0 && errno == EINTR) {
    }
    /* EPIPE: the agent closed its end and does not want to know any more. SIGPIPE is blocked in this thread. */
}

static void *watch_body(void *argument)
{
    struct watch *watch = argument;
    pthread_setname_np(pthread_self(), "taskd-watch");
    taskd_run_at_once();
    if (wait_for_guard(watch->header) == TASKD_GUARD_HELD && wait_for_death(watch->header)) {
        report(watch);
        taskd_futex_wake(taskd_owner_word(watch->header)); /* the kernel woke one, there may be more */
    }
    release(watch);
    return NULL;
}

int taskd_watch(int box_fd, uint64_t token, int pipe_fd)
{
    struct watch *watch = malloc(sizeof *watch);
    if (watch == NULL) {
        return -ENOMEM;
    }
    int result = 0;
    watch->token = token;
    watch->pipe_fd = -1;
    watch->header = taskd_map_header(box_fd, &result);
    if (watch->header != NULL) {
        watch->pipe_fd = fcntl(pipe_fd, F_DUPFD_CLOEXEC, 3);
        result = watch->pipe_fd < 0 ? -errno : taskd_start_thread(watch_body, watch);
    }
    if (result != 0) {
        release(watch);
    }
    return result;
}

int taskd_unwatch(int box_fd)
{
    int result = 0;
    struct taskd_box_header *header = taskd_map_any_header(box_fd, &result);
    if (header == NULL) {
        return result;
    }
    _Atomic uint32_t *word = taskd_guard_word(header);
    uint32_t state = atomic_load(word);
    while (state < TASKD_GUARD_HELD && !atomic_compare_exchange_weak(word, &state, TASKD_GUARD_CANCELLED)) {
    }
    taskd_futex_wake(word);
    taskd_futex_wake(taskd_owner_word(header)); /* whoever sleeps there looks again, and sees what has become of the box */
    taskd_unmap_header(header);
    return 0;
}
