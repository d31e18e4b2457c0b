/* Last words through the C ABI: stacks of a process that goes on, crashes, exits, and children that
 * are nobody's worker. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static int stacks_signal;

static int64_t word(const int64_t *place)
{
    return atomic_load((_Atomic int64_t *)place);
}

static char *text_of(int box)
{
    char *text = mmap(NULL, TASKD_TEXT_BYTES, PROT_READ, MAP_SHARED, box, TASKD_TEXT_OFFSET);
    CHECK(text != MAP_FAILED);
    return text;
}

/* ---- crashes -------------------------------------------------------------------------------- */

struct ending {
    void (*end)(void);
    int number; /* what waitpid() says: of the signal, negative, or the exit status */
    int64_t code;
    int64_t kind;
};

static int *volatile nowhere; /* a compiler that knew it would know that nothing can come of it */

static __attribute__((noinline, no_sanitize("undefined"))) void touch_nothing(void)
{
    *(volatile int *)nowhere = 1;
}

static __attribute__((noinline)) void call_abort(void)
{
    abort();
}

static void raise_fault(void)
{
    raise(SIGFPE);
}

static void exit_with_an_error(void)
{
    _exit(9);
}

static void *crash_in_thread(void *argument)
{
    touch_nothing();
    return argument;
}

static void let_a_thread_crash(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, crash_in_thread, NULL) == 0);
    pthread_join(thread, NULL);
}

/* valgrind takes a fault that is sent again for one of its own. */
static int has_faults(void)
{
    const char *tool = getenv("TASKD_TEST_TOOL");
    return tool == NULL || strcmp(tool, "valgrind") != 0;
}

/* The child is forked first and armed then: it is a worker of its own. */
static void test_an_ending(const struct ending *ending)
{
    int box = new_box();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        for (size_t i = 0; i < 3; i++) { /* whatever a tool installed: the end is to be that of a
                                            program without tools */
            signal(((int[]){SIGSEGV, SIGABRT, SIGFPE})[i], SIG_DFL);
        }
        CHECK(taskd_last_words_start(box, stacks_signal) > STDERR_FILENO);
        CHECK(taskd_last_words_start(box, stacks_signal) == -EBUSY);
        ending->end();
        for (;;)
            pause();
    }
    CHECK(ended_with(pid) == ending->number);
    const struct taskd_last_words *words = &see_box(box)->last_words;
    CHECK(words->state == TASKD_WORDS_COMPLETE && words->kind == ending->kind);
    CHECK(words->number == (ending->kind == TASKD_WORDS_SIGNAL ? -ending->number : ending->number));
    CHECK(words->code == ending->code);
    CHECK(words->monotonic_ns > 0 && words->requested == 0);
    CHECK((words->tid == pid) == (ending->end != let_a_thread_crash));
    CHECK(words->frame_count > 0 && words->frame_count <= TASKD_FRAMES);
    CHECK(words->text_bytes > 0 && strncmp(text_of(box), "\n[native]\n", 10) == 0);
    close(box);
}

/* ---- stacks on demand ----------------------------------------------------------------------- */

struct asker {
    const struct taskd_last_words *words;
    pid_t main_thread;
    int is_process; /* the signal is sent to the process: any thread may get it first */
    _Atomic int is_done;
};

static void *ask(void *argument)
{
    struct asker *asker = argument;
    for (int64_t n = 0; n < 5; n++) {
        int64_t before = word(&asker->words->requested);
        if (asker->is_process)
            CHECK(kill(getpid(), stacks_signal) == 0);
        else
            CHECK(syscall(SYS_tgkill, getpid(), asker->main_thread, stacks_signal) == 0);
        for (int waited = 0; word(&asker->words->requested) == before; waited++) {
            CHECK(waited < DEADLINE_MS);
            poll(NULL, 0, 1);
        }
    }
    atomic_store(&asker->is_done, 1);
    return NULL;
}

static void ask_for_stacks(int box, int is_process)
{
    struct asker asker = {&see_box(box)->last_words, (pid_t)syscall(SYS_gettid), is_process, 0};
    int64_t before = word(&asker.words->requested);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, ask, &asker) == 0);
    uint64_t sum = 0;
    errno = 4711;
    while (!atomic_load(&asker.is_done))
        sum++; /* no system call: what changes errno is a handler */
    CHECK(errno == 4711 && sum > 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(word(&asker.words->state) == TASKD_WORDS_COMPLETE);
    CHECK(asker.words->kind == TASKD_WORDS_STACKS && asker.words->number == stacks_signal);
    CHECK(asker.words->requested >= before + 5);
    CHECK(asker.words->tid == asker.main_thread);
    CHECK(asker.words->frame_count > 0);
}

/* A child of an armed process: it writes nothing, takes no stacks, and ends as ever. */
static void test_children_of_an_armed_process(int box)
{
    const struct taskd_last_words *words = &see_box(box)->last_words;
    struct taskd_last_words before;
    memcpy(&before, words, sizeof before);
    for (int way = 0; way < 3; way++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            raise(stacks_signal);
            if (way == 0 && has_faults())
                touch_nothing();
            else if (way == 1)
                abort();
            _exit(9);
        }
        int end = ended_with(pid);
        CHECK(end == (way == 0 && has_faults() ? -SIGSEGV : way == 1 ? -SIGABRT : 9));
    }
    CHECK(memcmp(&before, words, sizeof before) == 0);
}

static void test_a_process_that_goes_on(void)
{
    int box = new_box();
    pid_t pid = fork(); /* its own life: the program that tests goes on unarmed */
    CHECK(pid >= 0);
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGABRT, SIG_DFL);
        CHECK(taskd_last_words_start(box, SIGRTMAX + 1) == -EINVAL);
        CHECK(taskd_last_words_start(box, SIGUSR1) == -EINVAL);
        CHECK(taskd_last_words_start(-1, stacks_signal) == -EBADF);
        CHECK(taskd_last_words_start(box, stacks_signal) > STDERR_FILENO);
        CHECK(taskd_last_words_python(stacks_signal + 1, stacks_signal + 2) == -EINVAL);
        CHECK(see_box(box)->last_words.stacks_signal == stacks_signal);
        ask_for_stacks(box, 0);
        ask_for_stacks(box, 1);
        test_children_of_an_armed_process(box);
        _exit(0);
    }
    CHECK(ended_with(pid) == 0);
    CHECK(see_box(box)->last_words.kind ==
          TASKD_WORDS_STACKS); /* and an end without an error is none to tell of */
    close(box);
}

int main(void)
{
    static const struct ending endings[] = {
        {touch_nothing, -SIGSEGV, 1 /* SEGV_MAPERR */, TASKD_WORDS_SIGNAL},
        {let_a_thread_crash, -SIGSEGV, 1, TASKD_WORDS_SIGNAL},
        {call_abort, -SIGABRT, SI_TKILL, TASKD_WORDS_SIGNAL},
        {raise_fault, -SIGFPE, SI_TKILL, TASKD_WORDS_SIGNAL},
        {exit_with_an_error, 9, 0, TASKD_WORDS_EXIT},
    };
    stacks_signal = SIGRTMIN + 5;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (has_faults() || endings[i].code <= 0)
            test_an_ending(&endings[i]);
    test_a_process_that_goes_on();
    return 0;
}
