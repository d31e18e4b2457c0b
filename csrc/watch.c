/* Agent side of the death alarm: one thread per worker life that waits for the mutex and reports when it came free. */
#define _GNU_SOURCE /* F_DUPFD_CLOEXEC */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

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

/* Until then the mutex is not initialised, or it is free and we would take it from the worker. */
static uint32_t wait_for_guard(struct taskd_box_header *header)
{
    _Atomic uint32_t *word = taskd_guard_word(header);
    uint32_t state;
    while ((state = atomic_load(word)) < TASKD_GUARD_HELD) {
        taskd_futex_wait(word, state);
    }
    return state;
}

static void report(const struct watch *watch, int result)
{
    struct taskd_death death = {.token = watch->token, .monotonic_ns = taskd_monotonic_ns(), .result = result};
    while (write(watch->pipe_fd, &death, sizeof death) < 0 && errno == EINTR) {
    }
    /* EPIPE: the agent closed its end and does not want to know any more. SIGPIPE is blocked in this thread. */
}

static void *watch_body(void *argument)
{
    struct watch *watch = argument;
    taskd_prefer_soon_to_long();
    if (wait_for_guard(watch->header) == TASKD_GUARD_HELD) {
        int result = pthread_mutex_lock(taskd_mutex(watch->header));
        report(watch, result);
        if (result == EOWNERDEAD || result == 0) {
            /* Not made consistent on purpose: every other watch of this box wakes up with ENOTRECOVERABLE. */
            pthread_mutex_unlock(taskd_mutex(watch->header));
        }
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
        result = watch->pipe_fd < 0 ? -errno : taskd_start_thread("taskd-watch", watch_body, watch);
    }
    if (result != 0) {
        release(watch);
    }
    return result;
}

int taskd_unwatch(int box_fd)
{
    int result = 0;
    struct taskd_box_header *header = taskd_map_header(box_fd, &result);
    if (header == NULL) {
        return result;
    }
    _Atomic uint32_t *word = taskd_guard_word(header);
    uint32_t state = atomic_load(word);
    while (state < TASKD_GUARD_HELD && !atomic_compare_exchange_weak(word, &state, TASKD_GUARD_CANCELLED)) {
    }
    taskd_futex_wake(word);
    taskd_unmap_header(header);
    return 0;
}
