/* Real faults for tests/native/test_last_words.py. Built by the test, with g++ as well for the
 * exceptions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

volatile int zero;
volatile int sink;

void crash_null(void)
{
    *(volatile int *)0 = 1;
}

void crash_bus(void)
{
    int fd = memfd_create("short", 0);
    volatile char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    sink = memory[10]; /* behind the end of the file */
}

void crash_divide(void)
{
    sink = sink / zero;
}

void crash_at_exit(void)
{
    atexit(crash_null);
}

void crash_illegal(void)
{
    __builtin_trap();
}

void crash_abort(void)
{
    abort();
}

void crash_raise(int number)
{
    raise(number);
}

void crash_jump(void)
{
    void (*volatile nowhere)(void) = (void (*)(void))(long)zero;
    nowhere();
    sink = 1;
}

/* Not a loop in disguise: each call keeps its array. */
int crash_overflow(int depth)
{
    volatile char room[512];
    room[depth % 512] = (char)depth;
    return crash_overflow(depth + 1) + room[(depth + 1) % 512];
}

void crash_trap(void)
{
    raise(SIGTRAP);
}

static void *in_thread(void *function)
{
    pthread_setname_np(pthread_self(), "crasher");
    ((void (*)(void))function)();
    return NULL;
}

void crash_in_thread(void (*function)(void))
{
    pthread_t thread;
    pthread_create(&thread, NULL, in_thread, (void *)function);
    pthread_join(thread, NULL);
}

static pthread_barrier_t barrier;

static void *at_once(void *argument)
{
    (void)argument;
    pthread_barrier_wait(&barrier);
    crash_null();
    return NULL;
}

void crash_many(int count)
{
    pthread_t thread;
    pthread_barrier_init(&barrier, NULL, (unsigned)count);
    for (int i = 0; i < count; i++)
        pthread_create(&thread, NULL, at_once, NULL);
    pause();
}

static void say(int number)
{
    char text[] = "earlier handler 00\n";
    text[16] = (char)('0' + number / 10);
    text[17] = (char)('0' + number % 10);
    ssize_t ignored = write(1, text, sizeof text - 1);
    (void)ignored;
}

/* As many programs do it: says something, restores the default and lets the fault happen again. */
static void on_signal(int number, siginfo_t *info, void *context)
{
    (void)context;
    say(number);
    if (info->si_code > 0) {
        char text[64];
        snprintf(text, sizeof text, "address %p code %d\n", info->si_addr, info->si_code);
        ssize_t ignored = write(1, text, strlen(text));
        (void)ignored;
    }
    signal(number, SIG_DFL);
}

void handle(int number)
{
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = on_signal;
    sigaction(number, &action, NULL);
}

void handle_once(int number)
{
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_RESETHAND | SA_NODEFER};
    action.sa_sigaction = on_signal;
    sigaction(number, &action, NULL);
}

/* A virtual machine's: mends the fault and goes on. */
static char *mended;

static void on_mendable(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    (void)context;
    mprotect(mended, 4096, PROT_READ | PROT_WRITE);
}

int mend(void)
{
    for (int i = 0; i < 3; i++) {
        mprotect(mended, 4096, PROT_NONE);
        mended[0] = (char)i;
    }
    return mended[0];
}

void handle_and_mend(void)
{
    mended = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = on_mendable;
    sigaction(SIGSEGV, &action, NULL);
}

/* A later handler that exits, with what a shell would show. */
static void on_signal_exit(int number)
{
    _exit(128 + number);
}

void handle_by_exit(int number)
{
    signal(number, on_signal_exit);
}

void exit_here(int how, int status)
{
    if (how == 0)
        exit(status);
    else if (how == 1)
        _exit(status);
    else if (how == 2)
        _Exit(status);
    quick_exit(status);
}

/* Deterministic arithmetic that a handler could disturb: in vector registers, by the compiler's
 * choice or not. */
double compute(long steps)
{
    double values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (long i = 0; i < steps; i++)
        for (int k = 0; k < 8; k++)
            values[k] = values[k] * 1.0000001 + 0.5 / (1.0 + values[k]);
    double sum = 0;
    for (int k = 0; k < 8; k++)
        sum += values[k];
    return sum;
}

volatile int going = 1;

void loop_for_ever(void)
{
    while (going)
        sink++;
}

int vfork_exit(int status)
{
    pid_t pid = vfork();
    if (pid == 0)
        _exit(status);
    return pid;
}

static void *open_library(void *path)
{
    dlopen(path, RTLD_NOW);
    return NULL;
}

/* In a thread: the dynamic linker is busy with it as long as its constructor runs. The caller's
 * text may be gone when the thread begins. */
int open_in_thread(const char *path)
{
    pthread_t thread;
    return pthread_create(&thread, NULL, open_library, strdup(path));
}

void set_and_call(int *flag, void (*fault)(void))
{
    *flag = 1;
    fault();
}
