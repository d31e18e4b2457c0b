/* See internal.h. */
#define _GNU_SOURCE /* syscall, MADV_DONTFORK */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Address space only: pages are used when touched. Not smaller, because the C library takes the static thread-local storage
 * of all loaded libraries out of it and refuses a stack that is too small for that. */
#define STACK_BYTES (256 * 1024)

/* The shortest slice that the scheduler knows: asks to run soon, in return for running shortly. */
#define SLICE_NS 100000

struct taskd_box_header *taskd_map_any_header(int box_fd, int *error)
{
    struct stat status;
    if (fstat(box_fd, &status) != 0) {
        *error = -errno;
        return NULL;
    }
    if (status.st_size < TASKD_BOX_BYTES) { /* a shorter file would answer a touch with SIGBUS */
        *error = -EINVAL;
        return NULL;
    }
    struct taskd_box_header *header =
        mmap(NULL, TASKD_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, box_fd, 0);
    if (header == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    madvise(header, TASKD_HEADER_BYTES, MADV_DONTFORK);
    *error = 0;
    return header;
}

struct taskd_box_header *taskd_map_header(int box_fd, int *error)
{
    struct taskd_box_header *header = taskd_map_any_header(box_fd, error);
    if (header != NULL && (header->magic != TASKD_BOX_MAGIC || header->layout_version != TASKD_BOX_LAYOUT_VERSION)) {
        munmap(header, TASKD_HEADER_BYTES);
        *error = -EINVAL;
        return NULL;
    }
    return header;
}

void taskd_unmap_header(struct taskd_box_header *header)
{
    munmap(header, TASKD_HEADER_BYTES);
}

int taskd_start_thread(void *(*body)(void *), void *argument)
{
    pthread_attr_t attributes;
    int result = pthread_attr_init(&attributes);
    if (result != 0) {
        return -result;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);

    /* A new thread inherits the mask: blocked before it exists, no signal of the program can ever land in it. */
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

static int prefer_soon(uint64_t flags)
{
    struct sched_attributes attributes = {.size = sizeof attributes};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) {
        return -errno;
    }
    if (attributes.policy != SCHED_OTHER || attributes.nice < 0) {
        return 0; /* somebody has chosen how this process runs */
    }
    attributes.size = sizeof attributes;
    attributes.flags |= flags;
    attributes.runtime_ns = SLICE_NS;
    return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0 ? 0 : -errno;
}

void taskd_prefer_soon_to_long(void)
{
    prefer_soon(0);
}

int taskd_prefer_soon(void)
{
    return prefer_soon(RESET_ON_FORK);
}

void taskd_run_at_once(void)
{
    struct sched_param lowest = {.sched_priority = 1};
    if (sched_getscheduler(0) != SCHED_OTHER || sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &lowest) != 0) {
        taskd_prefer_soon_to_long();
    }
}

uint64_t taskd_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void taskd_futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

void taskd_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
