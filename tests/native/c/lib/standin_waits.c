/* Waits as libtorch_cpu.so does: pthread_cond_timedwait, and the clocks of libstdc++ by their C++
 * names. */
#include <pthread.h>
#include <stdint.h>
#include <time.h>

int64_t _ZNSt6chrono3_V212steady_clock3nowEv(void);

/* 0: the deadline came by the clock; 1: it did not. */
int standin_wait(int64_t seconds)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
    int64_t deadline = _ZNSt6chrono3_V212steady_clock3nowEv() + seconds * 1000000000;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&mutex);
    while (pthread_cond_timedwait(&cond, &mutex, &until) == 0) {
    }
    pthread_mutex_unlock(&mutex);
    return _ZNSt6chrono3_V212steady_clock3nowEv() >= deadline ? 0 : 1;
}

/* Whether an hour passes between two looks at the clock. */
int standin_leaps(void)
{
    int64_t deadline = _ZNSt6chrono3_V212steady_clock3nowEv() + 3600LL * 1000000000;
    return _ZNSt6chrono3_V212steady_clock3nowEv() >= deadline;
}
