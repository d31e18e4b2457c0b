/* Ending timed waits, with a stand-in for libtorch_cpu.so that imports what that imports. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

static int (*standin_wait)(int64_t);
static int (*standin_leaps)(void);
static int32_t waiter_tid;

static void *wait_an_hour(void *result)
{
    __atomic_store_n(&waiter_tid, (int32_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    *(int *)result = standin_wait(3600);
    return NULL;
}

/* It goes on after the creation of a group was ended: its clock is the true one again. */
static void *be_forgiven(void *argument)
{
    int32_t self = (int32_t)syscall(SYS_gettid);
    CHECK(taskd_waits_expire(&self, 1) == 0);
    CHECK(standin_wait(3600) == 0);
    CHECK(standin_leaps() == 1);
    CHECK(taskd_waits_forgive(&self, 1) == 0);
    CHECK(standin_leaps() == 0);
    return argument;
}

static int is_over;

static void *wait_again_and_again(void *argument)
{
    while (!__atomic_load_n(&is_over, __ATOMIC_ACQUIRE))
        standin_wait(0);
    return argument;
}

/* A child is forked while other threads are anywhere in their waits: its own waits must not wait
 * for them. */
static void test_children_can_wait(void)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, wait_again_and_again, NULL) == 0);
    for (int n = 0; n < 300; n++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            alarm(30);
            int32_t nobody = 1;
            int result = standin_wait(0);
            _exit(result == 0 && taskd_waits_expire(&nobody, 1) == 0 ? 0 : 1);
        }
        CHECK(ended_with(pid) == 0);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Expired once, a moment before or after it sleeps. For the library the hour is over. */
static void test_a_wait_ends_whenever_it_began(void)
{
    int count = getenv("TASKD_TEST_TOOL") != NULL ? 100 : 3000;
    for (int n = 0; n < count; n++) {
        pthread_t thread;
        int result = -1;
        waiter_tid = 0;
        CHECK(pthread_create(&thread, NULL, wait_an_hour, &result) == 0);
        while (__atomic_load_n(&waiter_tid, __ATOMIC_ACQUIRE) == 0)
            sched_yield();
        for (volatile int spent = n % 100 * 20; spent > 0; spent--) {
        }
        CHECK(taskd_waits_expire(&waiter_tid, 1) >= 0);
        struct timespec latest;
        clock_gettime(CLOCK_REALTIME, &latest);
        latest.tv_sec += DEADLINE_MS / 1000;
        CHECK(pthread_timedjoin_np(thread, NULL, &latest) == 0);
        CHECK(result == 0);
        CHECK(taskd_waits_forgive(&waiter_tid, 1) == 0);
    }
}

int main(void)
{
    int32_t nobody = 1;
    CHECK(taskd_waits_hook("libnothere.so") == -ENOENT);
    CHECK(taskd_waits_expire(&nobody, 1) == 0); /* without a hook, too */
    CHECK(taskd_waits_forgive(&nobody, 1) == 0);
    CHECK(taskd_waits_expire(&nobody, 0) == 0);

    void *library = dlopen("libstandin_waits.so", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&standin_wait = dlsym(library, "standin_wait");
    CHECK(standin_wait != NULL);
    *(void **)&standin_leaps = dlsym(library, "standin_leaps");
    CHECK(standin_leaps != NULL);
    CHECK(taskd_waits_hook("libstandin_waits.so") == 0);
    CHECK(taskd_waits_hook("libstandin_waits.so") == 0);

    test_a_wait_ends_whenever_it_began();
    CHECK(standin_wait(0) == 0); /* other threads are as ever */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, be_forgiven, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    test_children_can_wait();
    return 0;
}
