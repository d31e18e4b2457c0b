/* Worker side of the death alarm: the thread that owns the futex, stamps the time into the box and
 * notices that the agent is gone. */
#define _GNU_SOURCE /* pthread_setname_np, syscall */
#include "../black_box.h"
#include "../descriptor.h"
#include "threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STAMP_INTERVAL_MS 100 /* how fresh alive_ns is: a tenth of the agent's heartbeat */
#define TERM_GRACE_S 5        /* from SIGTERM to SIGKILL, for handlers that save something */

struct guard {
    struct taskd_box_header *header;
    struct taskd_descriptor life;
    sem_t is_ready;
    int result;
};

/* What the kernel reads when the guard dies. It lies in private memory of the guard, which never
 * returns: whatever is written into the box, the list stays whole. It replaces the C library's list
 * of the robust mutexes that this thread holds: none. */
struct ownership {
    struct robust_list_head head;
    struct robust_list entry;
};

static int own(struct ownership *ownership, struct taskd_box_header *header)
{
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    ownership->entry.next = &ownership->head.list;
    ownership->head.list.next = &ownership->entry;
    /* The kernel adds it to the address of the entry, wherever entry and futex are. */
    ownership->head.futex_offset =
        (long)((uintptr_t)&header->owner_word - (uintptr_t)&ownership->entry);
    ownership->head.list_op_pending = NULL;
    atomic_store(TASKD_ATOMIC(header->guard_tid), tid);
    atomic_store(TASKD_ATOMIC(header->owner_word), tid);
    int result = (int)syscall(SYS_set_robust_list, &ownership->head, sizeof ownership->head);
    return result == 0 ? 0 : -errno;
}

static void stamp(struct taskd_box_header *header)
{
    atomic_store(TASKD_ATOMIC(header->alive_ns), (uint64_t)taskd_monotonic_ns());
}

static void end_process_group(void)
{
    static const char line[] =
        "taskd: the agent of this worker is gone: ending the worker's process group\n";
    /* Only if it cannot block: whoever reads our stderr may be the very process that is gone. */
    struct pollfd standard_error = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&standard_error, 1, 0) == 1 && (standard_error.revents & POLLOUT) != 0) {
        ssize_t ignored = write(STDERR_FILENO, line, sizeof line - 1);
        (void)ignored;
    }
    pid_t target = getpgrp() == getpid() ? -getpid() : getpid();
    kill(target, SIGTERM);
    struct timespec grace = {.tv_sec = TERM_GRACE_S};
    nanosleep(&grace, NULL); /* signals are blocked here: nothing interrupts it */
    kill(target, SIGKILL);
}

static void *guard_body(void *argument)
{
    struct guard *guard = argument;
    pthread_setname_np(pthread_self(), "taskd-guard");
    taskd_prefer_soon();
    struct taskd_box_header *header = guard->header;
    struct taskd_descriptor life = guard->life;

    struct ownership ownership; /* this thread must not return once the kernel knows it */
    guard->result = own(&ownership, header);
    if (guard->result != 0) {
        sem_post(&guard->is_ready);
        return NULL;
    }
    stamp(header);
    atomic_store(TASKD_ATOMIC(header->guard_state), TASKD_GUARD_HELD);
    taskd_futex_wake(TASKD_ATOMIC(header->guard_state));
    sem_post(&guard->is_ready); /* `guard` lies on the stack of the caller, who goes on now */

    struct pollfd poller = {.fd = life.fd, .events = 0}; /* poll ignores a negative descriptor */
    for (;;) {
        poll(&poller, 1, STAMP_INTERVAL_MS);
        stamp(header);
        if (poller.fd < 0 || poller.revents == 0)
            continue;
        if ((poller.revents & POLLHUP) != 0 && taskd_is_intact(&life))
            end_process_group();
        poller.fd = -1; /* closed or replaced by the program: go on without it */
    }
    return NULL;
}

static int start(struct guard *guard)
{
    uint32_t none = TASKD_GUARD_NONE;
    if (!atomic_compare_exchange_strong(TASKD_ATOMIC(guard->header->guard_state), &none,
                                        TASKD_GUARD_STARTING))
        return -EBUSY;
    if (sem_init(&guard->is_ready, 0, 0) != 0)
        return -errno;
    int result = taskd_start_thread(guard_body, guard);
    if (result == 0) {
        while (sem_wait(&guard->is_ready) != 0) { /* EINTR */
        }
        result = guard->result;
    }
    sem_destroy(&guard->is_ready);
    return result;
}

int taskd_guard_start(int box_fd, int life_fd)
{
    struct guard guard = {.life.fd = -1};
    int result = 0;
    guard.header = taskd_map_header(box_fd, &result);
    if (guard.header == NULL)
        return result;
    if (life_fd >= 0)
        result = taskd_duplicate(&guard.life, life_fd);
    if (result == 0)
        result = start(&guard);
    if (result != 0) {
        if (guard.life.fd >= 0)
            close(guard.life.fd);
        taskd_unmap_header(guard.header);
    }
    return result;
}
