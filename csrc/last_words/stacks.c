/* The stacks in the last words: the Python stacks as text, the native frames, their names, the type
 * of an uncaught exception of C++.
 *
 * Each is a stage of its own. What is less likely to go wrong comes first: the Python stacks need
 * no lock, and names take one of the dynamic linker. A stage that crashes is left by siglongjmp(),
 * and so is one that lasts too long (a timer sends a signal to this very thread), so a stage costs
 * at most its limit.
 *
 * Called besides system calls: backtrace() and backtrace_symbols_fd(), loaded and used once at the
 * start so that they allocate nothing later; handlers of faulthandler, which are made for that
 * purpose (what they call is not exported by every CPython); __cxa_current_exception_type(), which
 * reads thread-local storage. faulthandler writes one thing at a time: if its stage is left midway,
 * no handler of it writes anything from then on.
 */
#define _GNU_SOURCE /* REG_RIP, RTLD_DEFAULT, SIGEV_THREAD_ID */
#include "../descriptor.h"
#include "last_words.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define PYTHON_LIMIT (1000 * TASKD_MILLISECOND) /* a hundred threads of a hundred frames */
#define NATIVE_LIMIT (500 * TASKD_MILLISECOND)
#define TYPE_LIMIT (100 * TASKD_MILLISECOND)
/* Limits are so many times as long if the process is to go on: whoever is torn out of the dynamic
 * linker may leave it locked. */
#define PATIENCE 10
#define OWN_FRAMES 12 /* of the handler, above those of interest */

/* How a stage may go wrong. */
static const int fault_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

static struct taskd_descriptor text; /* written once, at the start */

/* Of the thread that writes, alone. */
static struct taskd_last_words *words;
static sigjmp_buf escape;
static volatile sig_atomic_t is_in_stage;
static bool has_timer;
static int timer_id;
static bool is_text_open;

/* Of the interpreter and of the C++ library, if they are there. */
static int (*python_is_initialized)(void);
static int (*python_is_finalizing)(void);
static void *(*exception_type)(void);

/* Handlers of signals, called without a signal. `handle` is set last. */
static struct python_writer {
    int number;
    void (*_Atomic handle)(int number);
} all_threads, one_thread;

/* Where the size of files is limited (ulimit -f), a write behind the limit would end the process by
 * SIGXFSZ. */
static bool can_write_text(void)
{
    struct rlimit limit;
    return taskd_is_intact(&text) && getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           limit.rlim_cur >= TASKD_BOX_BYTES &&
           lseek(text.fd, TASKD_TEXT_OFFSET, SEEK_SET) == TASKD_TEXT_OFFSET;
}

static void say(const char *line)
{
    ssize_t ignored = write(text.fd, line, strlen(line));
    (void)ignored;
}

static void note_text_length(void)
{
    if (!is_text_open)
        return;
    int64_t end = lseek(text.fd, 0, SEEK_CUR);
    atomic_store(TASKD_ATOMIC(words->text_bytes),
                 end > TASKD_TEXT_OFFSET ? end - TASKD_TEXT_OFFSET : 0);
}

static void start_timer(int limit_signal)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = limit_signal};
    event._sigev_un._tid = taskd_thread_id();
    /* The C library's functions for it allocate. */
    has_timer =
        limit_signal != 0 && syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer_id) == 0;
}

static void set_timer(int64_t limit_ns)
{
    /* Again and again: the first may come before the stage begins, if the process was held up. */
    struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
    struct itimerspec time = {.it_value = limit, .it_interval = limit};
    if (has_timer)
        syscall(SYS_timer_settime, timer_id, 0, &time, NULL);
}

static void stop_timer(void)
{
    if (has_timer)
        syscall(SYS_timer_delete, timer_id);
}

/* Runs `stage`; returns even if it crashes or does not end. */
static void attempt(void (*stage)(const struct taskd_subject *),
                    const struct taskd_subject *subject, int64_t limit_ns)
{
    if (sigsetjmp(escape, 1) == 0) {
        set_timer(limit_ns);
        is_in_stage = 1;
        stage(subject);
    }
    is_in_stage = 0;
    set_timer(0);
    note_text_length();
}

static void write_python_stacks(const struct taskd_subject *subject)
{
    if (!is_text_open || python_is_initialized == NULL || !python_is_initialized())
        return;
    if (subject->is_exit && python_is_finalizing != NULL && python_is_finalizing())
        return;
    /* Of an exit it is of interest who called it: that stack does not change meanwhile. */
    struct python_writer *writer = subject->is_exit ? &one_thread : &all_threads;
    void (*handle)(int) = atomic_load(&writer->handle);
    if (handle == NULL)
        return;
    say("[python]\n");
    handle(writer->number);
}

/* Where the program goes back to if it has just been called. May crash. */
static uintptr_t caller_in(const ucontext_t *context)
{
#if defined(__x86_64__)
    return *(const uintptr_t *)context->uc_mcontext.gregs[REG_RSP];
#elif defined(__aarch64__)
    return (uintptr_t)context->uc_mcontext.regs[30];
#else
    (void)context;
    return 0;
#endif
}

static void write_frames(const struct taskd_subject *subject)
{
    void *found[TASKD_FRAMES + OWN_FRAMES];
    int count = backtrace(found, TASKD_FRAMES + OWN_FRAMES);
    void *const start = (void *)subject->start;
    void *const trampoline = (void *)subject->trampoline;
    int first = 0;
    while (first < count && found[first] != start && found[first] != trampoline)
        first++;
    if (first == count)
        first = 0;
    else if (found[first] != start)
        first++; /* of the handlers on the stack, the first one passed is ours */
    int kept = 0;
    for (int i = first; i < count && kept < TASKD_FRAMES; i++)
        words->frames[kept++] = (uint64_t)(uintptr_t)found[i];
    atomic_store(TASKD_ATOMIC(words->frame_count), kept);
}

/* After a jump to an address without code the unwinder cannot go on, and crashes itself. */
static void write_jump(const struct taskd_subject *subject)
{
    words->frames[0] = (uint64_t)subject->start;
    atomic_store(TASKD_ATOMIC(words->frame_count), 1);
    words->frames[1] = (uint64_t)caller_in(subject->context);
    atomic_store(TASKD_ATOMIC(words->frame_count), 2);
}

static void write_names(const struct taskd_subject *subject)
{
    int count = (int)words->frame_count;
    if (!is_text_open || count <= 0 || count > TASKD_FRAMES)
        return;
    /* A return address may be the first of the next function, behind a call that never returns:
     * look up the call itself. */
    void *places[TASKD_FRAMES];
    bool is_return = subject->is_exit;
    for (int i = 0; i < count; i++) {
        bool is_trampoline = words->frames[i] == subject->trampoline;
        places[i] = (void *)(uintptr_t)(words->frames[i] - (is_return && !is_trampoline ? 1 : 0));
        is_return = !is_trampoline;
    }
    say("\n[native]\n");
    backtrace_symbols_fd(places, count, text.fd);
}

static void find_exception_type(void)
{
    *(void **)&exception_type = dlsym(RTLD_DEFAULT, "__cxa_current_exception_type");
    void *library =
        exception_type == NULL ? dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library != NULL)
        *(void **)&exception_type = dlsym(library, "__cxa_current_exception_type");
}

static void write_exception_type(const struct taskd_subject *subject)
{
    if (subject->number != SIGABRT)
        return;
    /* Loaded since the start. To look may allocate, and so wait for ever; this stage is the last.
     */
    if (exception_type == NULL && has_timer)
        find_exception_type();
    /* std::type_info of every C++ library on Linux: a pointer to its functions, one to its name. */
    const char *const *type = exception_type != NULL ? exception_type() : NULL;
    if (type == NULL || type[1] == NULL)
        return;
    const char *name = type[1][0] == '*' ? type[1] + 1 : type[1];
    for (size_t i = 0; i + 1 < sizeof words->detail && name[i] != '\0'; i++)
        words->detail[i] = name[i];
}

void taskd_write_stacks(struct taskd_last_words *record, int kind,
                        const struct taskd_subject *subject, int limit_signal)
{
    words = record;
    is_text_open = can_write_text();
    sigset_t mine;
    sigset_t before;
    sigemptyset(&mine);
    for (size_t i = 0; i < sizeof fault_signals / sizeof fault_signals[0]; i++)
        sigaddset(&mine, fault_signals[i]); /* blocked, it would end the process at once */
    if (limit_signal != 0)
        sigaddset(&mine, limit_signal);
    pthread_sigmask(SIG_UNBLOCK, &mine, &before);
    start_timer(limit_signal);
    int64_t patience = kind == TASKD_WORDS_STACKS ? PATIENCE : 1;
    attempt(write_python_stacks, subject, PYTHON_LIMIT * patience);
    attempt(write_frames, subject, NATIVE_LIMIT * patience);
    if (words->frame_count < 2 && subject->context != NULL && words->address == subject->start)
        attempt(write_jump, subject, NATIVE_LIMIT);
    attempt(write_names, subject, NATIVE_LIMIT * patience);
    if (kind == TASKD_WORDS_SIGNAL)
        attempt(write_exception_type, subject, TYPE_LIMIT);
    stop_timer();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void taskd_leave_stage(void)
{
    if (is_in_stage)
        siglongjmp(escape, 1);
}

/* Opened anew, so that its position is its own. 0 or -errno. */
static int open_text(int box_fd)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", box_fd);
    int opened = open(path, O_WRONLY | O_CLOEXEC);
    if (opened < 0)
        return -errno;
    int result = taskd_duplicate(&text, opened);
    close(opened);
    return result;
}

static void find_helpers(void)
{
    void *frame[1];
    backtrace(frame, 1); /* the first call loads the unwinder */
    *(void **)&python_is_initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    *(void **)&python_is_finalizing = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    if (python_is_finalizing == NULL)
        *(void **)&python_is_finalizing = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    find_exception_type();
}

int taskd_prepare_stacks(int box_fd)
{
    int result = open_text(box_fd);
    if (result != 0)
        return result;
    find_helpers();
    return text.fd;
}

static int take_handler(struct python_writer *writer, int number)
{
    const struct sigaction none = {.sa_handler = SIG_DFL};
    struct sigaction found;
    if (sigaction(number, &none, &found) != 0)
        return -errno;
    if (found.sa_handler == SIG_DFL || found.sa_handler == SIG_IGN)
        return -EINVAL;
    writer->number = number;
    atomic_store(&writer->handle, found.sa_handler);
    return 0;
}

int taskd_last_words_python(int all_threads_signal, int one_thread_signal)
{
    int result = take_handler(&all_threads, all_threads_signal);
    return result == 0 ? take_handler(&one_thread, one_thread_signal) : result;
}

void taskd_close_stacks(void)
{
    close(text.fd);
}
