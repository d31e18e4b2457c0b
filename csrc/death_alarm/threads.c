/* The threads of the death alarm, as far as both sides of it are alike: how they start, are
 * scheduled and sleep. */
#define _GNU_SOURCE /* syscall, SCHED_RESET_ON_FORK */
#include "threads.h"

#include "../include/taskd.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Only address space, until it is touched. Not smaller: the C library takes the static thread-local
 * storage of all loaded libraries out of it, and refuses a stack that is too small for that. */
#define STACK_BYTES (256 * 1024)

/* The shortest time slice that the scheduler accepts: asks to run soon, in return for running
 * shortly. */
#define SLICE_NS 100000
#define RESET_ON_FORK 0x01 /* SCHED_FLAG_RESET_ON_FORK, as below */

/* As in <linux/sched/types.h>, first version, which is all that is needed. */
struct sched_attributes {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns;
    uint64_t deadline_ns;
    uint64_t period_ns;
};

int taskd_start_thread(void *(*body)(void *), void *argument)
{
    pthread_attr_t attributes;
    int result = pthread_attr_init(&attributes);
    if (result != 0)
        return -result;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);

    /* A new thread inherits the mask: blocked before it exists, no signal of the program can reach
     * it. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    result = pthread_create(&thread, &attributes, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -result;
}

int taskd_prefer_soon(void)
{
    struct sched_attributes attributes = {.size = sizeof attributes};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0)
        return -errno;
    if (attributes.policy != SCHED_OTHER || attributes.nice < 0)
        return 0; /* somebody has chosen how this process runs */
    attributes.size = sizeof attributes;
    attributes.flags |= RESET_ON_FORK;
    attributes.runtime_ns = SLICE_NS;
    return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0 ? 0 : -errno;
}

void taskd_run_at_once(void)
{
    struct sched_param lowest = {.sched_priority = 1};
    if (sched_getscheduler(0) != SCHED_OTHER ||
        sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &lowest) != 0)
        taskd_prefer_soon();
}

void taskd_futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

void taskd_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
