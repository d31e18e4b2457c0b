/* Worker side of the death alarm: the thread that owns the futex, marks the time and notices that the agent is gone. */
#define _GNU_SOURCE /* F_DUPFD_CLOEXEC, pthread_setname_np, syscall */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MARK_INTERVAL_MS 100 /* how fresh alive_ns is: a tenth of the agent's heartbeat */
#define TERM_GRACE_S 5       /* time between SIGTERM and SIGKILL for handlers that save something */

struct guard {
    struct taskd_box_header *header;
    int life_fd; /* ours, -1: none */
    dev_t life_device;
    ino_t life_inode;
    sem_t ready;
    int result;
};

/* What the kernel reads when the guard dies. It lies in private memory of the guard, which never returns: whatever is written into
 * the box, the list stays whole. It replaces the list of the C library, which holds the robust mutexes of this thread: none. */
struct ownership {
    struct robust_list_head head;
    struct robust_list entry;
};

static int own(struct ownership *ownership, struct taskd_box_header *header)
{
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    _Atomic uint32_t *word = taskd_owner_word(header);
    ownership->entry.next = &ownership->head.list;
    ownership->head.list.next = &ownership->entry;
    /* From the entry to its futex; the kernel adds it to the address of the entry, wherever the two are. */
    ownership->head.futex_offset = (long)((uintptr_t)word - (uintptr_t)&ownership->entry);
    ownership->head.list_op_pending = NULL;
    atomic_store(taskd_guard_tid(header), tid);
    atomic_store(word, tid);
    return syscall(SYS_set_robust_list, &ownership->head, sizeof ownership->head) == 0 ? 0 : -errno;
}

/* A program may close descriptors that it does not know, and the number may then stand for something else. */
static int is_still_the_life_pipe(const struct guard *guard)
{
    struct stat status;
    return fstat(guard->life_fd, &status) == 0 && status.st_dev == guard->life_device &&
           status.st_ino == guard->life_inode;
}

/* One line, only if it cannot block: whoever reads our stderr may be the very process that is gone. */
static void say_goodbye(void)
{
    static const char line[] = "taskd: the agent of this worker is gone: ending the worker's process group\n";
    struct pollfd standard_error = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&standard_error, 1, 0) == 1 && (standard_error.revents & POLLOUT) != 0) {
        ssize_t ignored = write(STDERR_FILENO, line, sizeof line - 1);
        (void)ignored;
    }
}

static void end_process_group(void)
{
    pid_t target = getpgrp() == getpid() ? -getpid() : getpid();
    say_goodbye();
    kill(target, SIGTERM);
    struct timespec grace = {.tv_sec = TERM_GRACE_S};
    nanosleep(&grace, NULL); /* signals are blocked here: nothing cuts it short */
    kill(target, SIGKILL);
}

static void *guard_body(void *argument)
{
    struct guard *guard = argument;
    pthread_setname_np(pthread_self(), "taskd-guard");
    taskd_prefer_soon_to_long();
    struct taskd_box_header *header = guard->header;
    _Atomic uint64_t *alive_ns = (_Atomic uint64_t *)&header->alive_ns;

    struct ownership ownership; /* this thread must never return once it is known to the kernel */
    int result = own(&ownership, header);
    guard->result = result;
    if (result != 0) {
        sem_post(&guard->ready);
        return NULL;
    }
    atomic_store(alive_ns, taskd_monotonic_ns());
    atomic_store(taskd_guard_word(header), TASKD_GUARD_HELD);
    taskd_futex_wake(taskd_guard_word(header));

    /* The original lives on the stack of the caller, who goes on as soon as it is told. */
    struct guard self = *guard;
    sem_post(&guard->ready);

    struct pollfd life = {.fd = self.life_fd, .events = 0}; /* poll ignores a negative descriptor */
    for (;;) {
        poll(&life, 1, MARK_INTERVAL_MS);
        atomic_store(alive_ns, taskd_monotonic_ns());
        if (life.fd < 0 || life.revents == 0) {
            continue;
        }
        if ((life.revents & POLLHUP) != 0 && is_still_the_life_pipe(&self)) {
            end_process_group();
        }
        life.fd = -1; /* closed or replaced by the program: go on without it */
    }
    return NULL;
}

static int claim(struct taskd_box_header *header)
{
    uint32_t none = TASKD_GUARD_NONE;
    return atomic_compare_exchange_strong(taskd_guard_word(header), &none, TASKD_GUARD_STARTING) ? 0 : -EBUSY;
}

static int take_life_fd(struct guard *guard, int life_fd)
{
    guard->life_fd = -1;
    if (life_fd < 0) {
        return 0;
    }
    struct stat status;
    if (fstat(life_fd, &status) != 0) {
        return -errno;
    }
    guard->life_device = status.st_dev;
    guard->life_inode = status.st_ino;
    guard->life_fd = fcntl(life_fd, F_DUPFD_CLOEXEC, 3);
    return guard->life_fd < 0 ? -errno : 0;
}

static int start(struct guard *guard)
{
    int result = claim(guard->header);
    if (result != 0) {
        return result;
    }
    if (sem_init(&guard->ready, 0, 0) != 0) {
        return -errno;
    }
    result = taskd_start_thread(guard_body, guard);
    if (result == 0) {
        while (sem_wait(&guard->ready) != 0) { /* EINTR */
        }
        result = guard->result;
    }
    sem_destroy(&guard->ready);
    return result;
}

int taskd_guard_start(int box_fd, int life_fd)
{
    struct guard guard;
    memset(&guard, 0, sizeof guard);
    int result = 0;
    guard.header = taskd_map_header(box_fd, &result);
    if (guard.header == NULL) {
        return result;
    }
    result = take_life_fd(&guard, life_fd);
    if (result == 0) {
        result = start(&guard);
    }
    if (result != 0) {
        if (guard.life_fd >= 0) {
            close(guard.life_fd);
        }
        taskd_unmap_header(guard.header);
    }
    return result;
}
