/* Ending timed waits of chosen threads: a gloo operation that nobody would wake times out at once.
 *
 * When a connection breaks, gloo (torch 2.13) tells the waiters of operations that it still holds
 * in a list. An operation whose first or remaining bytes are just being written or read is in no
 * list: its waiter sleeps until the timeout of the process group, half an hour by default. That
 * timeout is the one way out that works for every waiter, so it is made to be over now, and only in
 * the threads of groups that are being aborted.
 *
 * libtorch_cpu.so waits with pthread_cond_timedwait (or clockwait) and then compares std::chrono
 * clocks. Its imports of those are redirected to the functions below. They pass through to the
 * originals unless the calling thread is expired: then a wait returns at once, and each look at a
 * clock finds it a month later.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, pthread_cond_clockwait */
#include "../include/taskd.h"
#include "imports.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_EXPIRED 1024 /* threads of aborted groups that have not been freed yet */
/* A thread that is about to sleep when it expires is in no wait yet that could be ended: it sleeps
 * no longer than this. */
#define SLICE_NS 250000000L
/* Longer than any timeout; 2,800 of them fit before an overflow. */
#define LEAP_NS (30LL * 24 * 3600 * 1000000000LL)

struct waiter {
    struct waiter *next;
    pid_t tid;
    pthread_cond_t *cond;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct waiter *waiters;
static pid_t expired[MAX_EXPIRED];
static int expired_count;
static _Atomic uint32_t changes; /* of `expired` */

static _Thread_local uint32_t seen_changes; /* of which `is_expired` knows */
static _Thread_local bool is_expired;
static _Thread_local int64_t leaps;

static int (*original_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*original_clockwait)(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                                 const struct timespec *);
static int64_t (*original_steady_now)(void);
static int64_t (*original_system_now)(void);

static int find_expired(pid_t tid)
{
    for (int i = 0; i < expired_count; i++)
        if (expired[i] == tid)
            return i;
    return -1;
}

/* Called with the lock held. */
static void learn(pid_t tid)
{
    seen_changes = atomic_load(&changes);
    is_expired = find_expired(tid) >= 0;
}

static bool enter(struct waiter *self, pthread_cond_t *cond)
{
    self->tid = (pid_t)syscall(SYS_gettid);
    self->cond = cond;
    pthread_mutex_lock(&lock);
    learn(self->tid);
    self->next = waiters;
    waiters = self;
    pthread_mutex_unlock(&lock);
    return !is_expired;
}

static void leave(struct waiter *self)
{
    pthread_mutex_lock(&lock);
    struct waiter **link = &waiters;
    while (*link != NULL && *link != self)
        link = &(*link)->next;
    if (*link != NULL) /* else a fork has emptied the list */
        *link = self->next;
    learn(self->tid);
    pthread_mutex_unlock(&lock);
}

static bool is_before(const struct timespec *one, const struct timespec *other)
{
    return one->tv_sec != other->tv_sec ? one->tv_sec < other->tv_sec
                                        : one->tv_nsec < other->tv_nsec;
}

/* `until`, or SLICE_NS from now if that is sooner. Of another clock than the condition's: `until`
 * of a clock that began later is always sooner. */
static const struct timespec *slice_of(clockid_t clock, const struct timespec *until,
                                       struct timespec *soon)
{
    clock_gettime(clock, soon);
    soon->tv_nsec += SLICE_NS;
    if (soon->tv_nsec >= 1000000000L) {
        soon->tv_sec++;
        soon->tv_nsec -= 1000000000L;
    }
    return is_before(soon, until) ? soon : until;
}

/* What the caller is told. The end of a slice is a spurious wakeup: it looks at what it waits for,
 * and waits again. */
static int outcome(int result, const struct timespec *limit, const struct timespec *until)
{
    if (is_expired)
        return ETIMEDOUT;
    return result == ETIMEDOUT && limit != until ? 0 : result;
}

static int timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    struct waiter self;
    struct timespec soon;
    const struct timespec *limit = slice_of(CLOCK_REALTIME, until, &soon);
    int result = ETIMEDOUT;
    if (enter(&self, cond))
        result = original_timedwait(cond, mutex, limit);
    leave(&self);
    return outcome(result, limit, until);
}

static int clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock,
                     const struct timespec *until)
{
    struct waiter self;
    struct timespec soon;
    const struct timespec *limit = slice_of(clock, until, &soon);
    int result = ETIMEDOUT;
    if (enter(&self, cond))
        result = original_clockwait(cond, mutex, clock, limit);
    leave(&self);
    return outcome(result, limit, until);
}

/* Each look finds the clock a leap further on: a deadline that was computed from the last look is
 * over at the next. A thread that was forgiven finds the true time again. One that was never
 * expired does not look for changes: it may do this very often. */
static int64_t leap(void)
{
    if (is_expired && seen_changes != atomic_load(&changes)) {
        pthread_mutex_lock(&lock);
        learn((pid_t)syscall(SYS_gettid));
        pthread_mutex_unlock(&lock);
    }
    return is_expired ? ++leaps * LEAP_NS : 0;
}

static int64_t steady_now(void)
{
    return original_steady_now() + leap();
}

static int64_t system_now(void)
{
    return original_system_now() + leap();
}

static const struct hooked {
    const char *name;
    void *replacement;
    void **original;
    int group; /* one of each must be imported, or nothing is changed: 0 a wait, 1 a clock */
} hooks[] = {
    {"pthread_cond_timedwait", (void *)timedwait, (void **)&original_timedwait, 0},
    {"pthread_cond_clockwait", (void *)clockwait, (void **)&original_clockwait, 0},
    {"_ZNSt6chrono3_V212steady_clock3nowEv", (void *)steady_now, (void **)&original_steady_now, 1},
    {"_ZNSt6chrono3_V212system_clock3nowEv", (void *)system_now, (void **)&original_system_now, 1},
};
#define HOOK_COUNT (sizeof(hooks) / sizeof(hooks[0]))

static void *find_original(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    void *library = found == NULL ? dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD) : NULL;
    return library != NULL ? dlsym(library, name) : found;
}

/* In a forked child: the threads that wait are its parent's, and so is whoever had the lock.
 * Nothing is locked before the fork: handlers of others that run then may wait for threads that
 * wait here. */
static void forget_all(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    lock = fresh;
    waiters = NULL;
    expired_count = 0;
    is_expired = false;
}

static int hook(const char *library)
{
    struct taskd_import imports[HOOK_COUNT];
    for (size_t k = 0; k < HOOK_COUNT; k++)
        imports[k].name = hooks[k].name;
    int result = taskd_find_imports(library, imports, HOOK_COUNT);
    if (result != 0)
        return result;
    bool is_imported[2] = {false, false};
    for (size_t k = 0; k < HOOK_COUNT; k++) {
        if (imports[k].slot == NULL)
            continue;
        *hooks[k].original = find_original(hooks[k].name);
        if (*hooks[k].original == NULL)
            return -ENOSYS;
        is_imported[hooks[k].group] = true;
    }
    if (!is_imported[0] || !is_imported[1])
        return -ENOSYS;
    result = -pthread_atfork(NULL, NULL, forget_all);
    for (size_t k = 0; k < HOOK_COUNT && result == 0; k++)
        if (imports[k].slot != NULL)
            result = taskd_redirect_import(&imports[k], hooks[k].replacement);
    return result;
}

int taskd_waits_hook(const char *library)
{
    static pthread_mutex_t hooking = PTHREAD_MUTEX_INITIALIZER;
    static bool is_hooked;
    pthread_mutex_lock(&hooking);
    int result = is_hooked ? 0 : hook(library);
    is_hooked = is_hooked || result == 0;
    pthread_mutex_unlock(&hooking);
    return result;
}

int taskd_waits_expire(const int32_t *tids, int count)
{
    int woken = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (find_expired(tids[i]) < 0 && expired_count < MAX_EXPIRED)
            expired[expired_count++] = tids[i];
    atomic_fetch_add(&changes, 1);
    for (struct waiter *waiter = waiters; waiter != NULL; waiter = waiter->next) {
        if (find_expired(waiter->tid) >= 0) {
            pthread_cond_broadcast(waiter->cond);
            woken++;
        }
    }
    pthread_mutex_unlock(&lock);
    return woken;
}

int taskd_waits_forgive(const int32_t *tids, int count)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        int index = find_expired(tids[i]);
        if (index >= 0)
            expired[index] = expired[--expired_count];
    }
    atomic_fetch_add(&changes, 1);
    pthread_mutex_unlock(&lock);
    return 0;
}
