/* The last words of a worker: what a process writes into its black box when it crashes, when it exits with an error, and when it is
 * asked where it is.
 *
 * Basics come first (signal, address, thread), then what is less likely to go wrong: the Python stacks, which need no lock, then
 * the native frames, then their names, which take a lock of the dynamic linker. Each of these is a stage of its own. A
 * stage that crashes is left by siglongjmp(), and so is one that lasts too long (a timer sends `stacks_signal` to this very thread), so a
 * stage costs at most its limit. Then the handler that was there before is put back, and the signal is sent again with
 * its own siginfo: to whoever looks (the earlier handler, a core file, wait()) the process ends as it would have ended without us.
 * An earlier handler that mends the fault and goes on (a virtual machine's) has the signal for itself from then on.
 *
 * Called in handlers, besides system calls: backtrace() and backtrace_symbols_fd(), loaded and used once at the start so that
 * they allocate nothing later; _Py_DumpTracebackThreads() and _Py_DumpTraceback(), made for that purpose by faulthandler;
 * __cxa_current_exception_type(), which reads thread-local storage.
 *
 * Handlers run on an alternate stack in the thread that called taskd_last_words_start(): it can overflow its own. Other threads
 * have none unless the program gives them one; if one of those overflows, the kernel ends the process at once and nothing is written.
 * A program that installs its own handler later is called first, and comes to us if it restores or calls what it found.
 *
 * Everything looks first whether this is still the process that was armed: forked children do not even have the mapping, and those
 * of vfork() share their parent's memory.
 */
#define _GNU_SOURCE /* REG_RIP, RTLD_NEXT, SIGEV_THREAD_ID */
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define MILLISECOND 1000000LL
#define PYTHON_LIMIT (1000 * MILLISECOND)   /* a hundred threads with a hundred frames each, on a busy machine */
#define NATIVE_LIMIT (500 * MILLISECOND)
#define TYPE_LIMIT (100 * MILLISECOND)
#define PATIENCE 10 /* times as long if the process is to go on: whoever is torn out of the dynamic linker may leave it locked */
#define WAIT_FOR_OTHER (3000 * MILLISECOND) /* more than all stages together */
#define LET_OTHER_DIE (100 * MILLISECOND)
#define STALE (5000 * MILLISECOND)          /* whoever lives on after so long did not die of what is written */
#define ALTERNATE_STACK_BYTES (256 * 1024)  /* address space; nested signal frames with all registers of a large CPU fit easily */
#define OWN_FRAMES 12                       /* of the handler, above those of interest */

static const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS, SIGTRAP};
#define CRASH_SIGNALS (sizeof crash_signals / sizeof crash_signals[0])

/* Written once, before `armed_pid` says that it may be read. */
static struct taskd_last_words *words;
static int text_fd;
static dev_t text_device;
static ino_t text_inode;
static int stacks_signal;
static struct sigaction previous[CRASH_SIGNALS];

static _Atomic pid_t armed_pid; /* 0: nothing is armed */
static _Atomic pid_t writer;    /* the thread that is writing; 0: none */

/* Of the writer alone. */
static sigjmp_buf escape;
static volatile sig_atomic_t is_in_stage;
static bool has_timer;
static int timer_id;
static bool is_text_open;

/* Of the interpreter and of the C++ library, if they are there. */
static int (*python_is_initialized)(void);
static int (*python_is_finalizing)(void);
static void *(*python_thread_state)(void);
static const char *(*python_dump_threads)(int fd, void *interpreter, void *current);
static void (*python_dump)(int fd, void *thread);
static void *(*exception_type)(void);

/* What a stage works on. */
struct subject {
    int number;
    bool is_exit;
    uintptr_t start; /* the first frame of interest: where the signal came, or the caller of exit() */
    const ucontext_t *context; /* the registers there; NULL: no signal */
    uintptr_t trampoline; /* where signal handlers return to: what comes behind it was interrupted and called nobody */
};

static pid_t thread_id(void)
{
    return (pid_t)syscall(SYS_gettid);
}

static bool is_armed(void)
{
    pid_t pid = atomic_load(&armed_pid);
    return pid != 0 && pid == (pid_t)syscall(SYS_getpid); /* old C libraries remember the parent's number across vfork() */
}

static int64_t now_ns(void)
{
    return (int64_t)taskd_monotonic_ns();
}

static void rest(int64_t duration_ns)
{
    struct timespec pause = {.tv_sec = duration_ns / 1000000000, .tv_nsec = duration_ns % 1000000000};
    nanosleep(&pause, NULL);
}

/* The reader looks at the state first and last: order matters, and plain stores would leave it to the compiler. */
static void set_word(int64_t *word, int64_t value)
{
    atomic_store((_Atomic int64_t *)word, value);
}

/* ---- stages ------------------------------------------------------------------------------------------------------ */

/* A program may close descriptors that it does not know, and the number may then stand for something else. And where the size
 * of files is limited (ulimit -f), a write behind the limit would end the process by SIGXFSZ. */
static bool can_write_text(void)
{
    struct stat status;
    struct rlimit limit;
    if (fstat(text_fd, &status) != 0 || status.st_dev != text_device || status.st_ino != text_inode) {
        return false;
    }
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= TASKD_BOX_BYTES;
}

static void say(const char *text)
{
    ssize_t ignored = write(text_fd, text, strlen(text));
    (void)ignored;
}

static void note_text_length(void)
{
    if (is_text_open) {
        off_t end = lseek(text_fd, 0, SEEK_CUR);
        set_word(&words->text_bytes, end > TASKD_TEXT_OFFSET ? end - TASKD_TEXT_OFFSET : 0);
    }
}

/* It is to be killed, and may not change anything any more: not even if it was stopped, and was let go on only for its stacks. */
static __attribute__((noreturn)) void stay(void)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    for (;;) {
        rest(1000 * MILLISECOND);
    }
}

static void on_request(int number, siginfo_t *info, void *context);

static void start_timer(void)
{
    has_timer = false;
    struct sigaction present;
    if (stacks_signal == 0 || sigaction(stacks_signal, NULL, &present) != 0 || present.sa_sigaction != on_request) {
        return; /* none, or the program has made something else of it, which might end the process */
    }
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = stacks_signal;
    event._sigev_un._tid = thread_id();
    /* The C library's functions for it allocate. */
    has_timer = syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer_id) == 0;
}

static void set_timer(int64_t limit_ns)
{
    if (has_timer) {
        struct itimerspec time = {.it_value = {.tv_sec = limit_ns / 1000000000, .tv_nsec = limit_ns % 1000000000}};
        syscall(SYS_timer_settime, timer_id, 0, &time, NULL);
    }
}

static void stop_timer(void)
{
    if (has_timer) {
        syscall(SYS_timer_delete, timer_id);
    }
}

/* Runs `stage`; comes back even if it crashes or does not end. */
static void attempt(void (*stage)(const struct subject *), const struct subject *subject, int64_t limit_ns)
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

static void write_python_stacks(const struct subject *subject)
{
    if (!is_text_open || python_is_initialized == NULL || python_thread_state == NULL || !python_is_initialized()) {
        return;
    }
    void *state = python_thread_state();
    if (!subject->is_exit && python_dump_threads != NULL) {
        say("[python]\n");
        python_dump_threads(text_fd, NULL, state);
    } else if (python_dump != NULL && state != NULL && (python_is_finalizing == NULL || !python_is_finalizing())) {
        /* Who ended the process is of interest, not what the others were doing meanwhile; and one's own stack stands still. */
        say("[python]\n");
        python_dump(text_fd, state);
    }
}

static uintptr_t place_in(const ucontext_t *context)
{
#if defined(__x86_64__)
    return (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)context->uc_mcontext.pc;
#else
    (void)context;
    return 0;
#endif
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

static void write_frames(const struct subject *subject)
{
    void *found[TASKD_FRAMES + OWN_FRAMES];
    int count = backtrace(found, TASKD_FRAMES + OWN_FRAMES);
    int first = 0;
    for (int i = 0; i < count; i++) {
        if ((uintptr_t)found[i] == subject->start) {
            first = i;
            break;
        }
        if ((uintptr_t)found[i] == subject->trampoline) {
            first = i + 1; /* of the handlers on the stack, the first one passed is ours */
            break;
        }
    }
    int kept = 0;
    for (int i = first; i < count && kept < TASKD_FRAMES; i++) {
        words->frames[kept++] = (uint64_t)(uintptr_t)found[i];
    }
    set_word(&words->frame_count, kept);
}

/* After a jump into nowhere there is no code from which the unwinder could go on, and it crashes itself. */
static void write_jump(const struct subject *subject)
{
    words->frames[0] = (uint64_t)subject->start;
    set_word(&words->frame_count, 1);
    words->frames[1] = (uint64_t)caller_in(subject->context);
    set_word(&words->frame_count, 2);
}

static void write_names(const struct subject *subject)
{
    int count = (int)words->frame_count;
    if (!is_text_open || count <= 0 || count > TASKD_FRAMES) {
        return;
    }
    /* A return address may be the first of the next function, behind a call that never comes back: look up the call itself. */
    void *places[TASKD_FRAMES];
    bool is_return = subject->is_exit;
    for (int i = 0; i < count; i++) {
        bool is_trampoline = words->frames[i] == subject->trampoline;
        places[i] = (void *)(uintptr_t)(words->frames[i] - (is_return && !is_trampoline ? 1 : 0));
        is_return = !is_trampoline;
    }
    say("\n[native]\n");
    backtrace_symbols_fd(places, count, text_fd);
}

static void find_exception_type(void)
{
    *(void **)&exception_type = dlsym(RTLD_DEFAULT, "__cxa_current_exception_type");
    void *library = exception_type == NULL ? dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library != NULL) {
        *(void **)&exception_type = dlsym(library, "__cxa_current_exception_type");
    }
}

static void write_exception_type(const struct subject *subject)
{
    if (subject->number != SIGABRT) {
        return;
    }
    if (exception_type == NULL) {
        find_exception_type(); /* loaded since the start: nothing left to lose, this stage is the last one */
    }
    /* std::type_info of every C++ library on Linux: the pointer to its functions, then the pointer to its name. */
    const char *const *type = exception_type != NULL ? exception_type() : NULL;
    if (type == NULL || type[1] == NULL) {
        return;
    }
    const char *name = type[1] + (type[1][0] == '*');
    for (size_t i = 0; i + 1 < sizeof words->detail && name[i] != '\0'; i++) {
        words->detail[i] = name[i];
    }
}

/* ---- the record -------------------------------------------------------------------------------------------------- */

/* What is there may be replaced by something that tells more of how the process ends. */
static bool may_write(int kind)
{
    if (words->state != TASKD_WORDS_COMPLETE || words->kind == TASKD_WORDS_STACKS) {
        return true;
    }
    if (kind == TASKD_WORDS_SIGNAL && words->kind == TASKD_WORDS_EXIT) {
        return true; /* a crash on the way out */
    }
    return kind != TASKD_WORDS_STACKS && now_ns() - words->monotonic_ns > STALE;
}

static bool claim(int kind)
{
    pid_t none = 0;
    if (!atomic_compare_exchange_strong(&writer, &none, thread_id())) {
        return false;
    }
    if (!may_write(kind)) {
        atomic_store(&writer, 0);
        return false;
    }
    return true;
}

/* `claim`, when whoever is writing has done so: what it wrote may have been stacks on demand. */
static bool claim_after_others(int kind)
{
    if (claim(kind)) {
        return true;
    }
    if (atomic_load(&writer) == 0) {
        return false; /* it has been told how the process ends */
    }
    int64_t until = now_ns() + WAIT_FOR_OTHER;
    while (atomic_load(&writer) != 0 && now_ns() < until) {
        rest(10 * MILLISECOND);
    }
    rest(LET_OTHER_DIE); /* it came first: if that was a crash, the process should end by its signal */
    return claim(kind);
}

/* Called by the one that has claimed the record; gives it up. `info` NULL: no signal. */
static void write_all(int kind, const struct subject *subject, const siginfo_t *info)
{
    set_word(&words->state, TASKD_WORDS_WRITING);
    words->kind = kind;
    words->number = subject->number;
    words->code = info != NULL ? info->si_code : 0;
    words->address = 0;
    if (info != NULL && info->si_code > 0) {
        words->address = (uint64_t)(uintptr_t)info->si_addr;
    } else if (info != NULL) {
        words->address = (uint64_t)info->si_pid; /* sent by somebody: there is no address in it */
    }
    words->tid = thread_id();
    words->monotonic_ns = now_ns();
    words->text_bytes = 0;
    words->frame_count = 0;
    memset(words->detail, 0, sizeof words->detail);
    memset(words->thread, 0, sizeof words->thread);
    prctl(PR_GET_NAME, words->thread, 0, 0, 0);

    is_text_open = can_write_text() && lseek(text_fd, TASKD_TEXT_OFFSET, SEEK_SET) == TASKD_TEXT_OFFSET;
    sigset_t mine;
    sigset_t before;
    sigemptyset(&mine);
    if (stacks_signal != 0) {
        sigaddset(&mine, stacks_signal);
    }
    pthread_sigmask(SIG_UNBLOCK, &mine, &before);
    start_timer();
    int64_t patience = kind == TASKD_WORDS_STACKS ? PATIENCE : 1;
    attempt(write_python_stacks, subject, PYTHON_LIMIT * patience);
    attempt(write_frames, subject, NATIVE_LIMIT * patience);
    if (words->frame_count < 2 && subject->context != NULL && words->address == subject->start) {
        attempt(write_jump, subject, NATIVE_LIMIT);
    }
    attempt(write_names, subject, NATIVE_LIMIT * patience);
    if (kind == TASKD_WORDS_SIGNAL) {
        attempt(write_exception_type, subject, TYPE_LIMIT);
    }
    stop_timer();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (kind == TASKD_WORDS_STACKS) {
        set_word(&words->requested, words->requested + 1);
    }
    set_word(&words->state, TASKD_WORDS_COMPLETE);
    atomic_store(&writer, 0);
}

static struct subject subject_of(int number, const void *context, const void *trampoline)
{
    struct subject subject = {.number = number, .start = place_in(context), .context = context};
    subject.trampoline = (uintptr_t)trampoline;
    return subject;
}

/* ---- handlers ---------------------------------------------------------------------------------------------------- */

static const struct sigaction *previous_of(int number)
{
    static const struct sigaction none; /* SIG_DFL; for those who call us for a signal that is not ours */
    for (size_t i = 0; i < CRASH_SIGNALS; i++) {
        if (crash_signals[i] == number) {
            return &previous[i];
        }
    }
    return &none;
}

/* As if we had never been there: the handler from before gets the signal, with its siginfo and in the place where it came. */
static void pass_on(int number, siginfo_t *info)
{
    sigaction(number, previous_of(number), NULL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* until this handler returns */
    pid_t pid = (pid_t)syscall(SYS_getpid);
    if (syscall(SYS_rt_tgsigqueueinfo, pid, thread_id(), number, info) != 0) {
        syscall(SYS_tgkill, pid, thread_id(), number);
    }
}

static void on_crash(int number, siginfo_t *info, void *context)
{
    int saved_errno = errno;
    if (is_armed()) {
        if (previous_of(number)->sa_handler == SIG_IGN && info->si_code <= 0) {
            return; /* sent by somebody, and the program does not care */
        }
        if (atomic_load(&writer) == thread_id()) {
            if (is_in_stage) {
                siglongjmp(escape, 1);
            }
        } else if (claim_after_others(TASKD_WORDS_SIGNAL)) {
            struct subject subject = subject_of(number, context, __builtin_return_address(0));
            write_all(TASKD_WORDS_SIGNAL, &subject, info);
        }
    }
    pass_on(number, info);
    errno = saved_errno;
}

static void on_request(int number, siginfo_t *info, void *context)
{
    if (!is_armed()) {
        return;
    }
    int saved_errno = errno;
    pid_t thread = thread_id();
    pid_t main_thread = (pid_t)syscall(SYS_getpid);
    if (info->si_code == SI_TIMER) {
        if (atomic_load(&writer) == thread && is_in_stage) {
            siglongjmp(escape, 1);
        }
    } else if (thread != main_thread) {
        syscall(SYS_tgkill, main_thread, main_thread, number);
    } else if (claim(TASKD_WORDS_STACKS)) {
        struct subject subject = subject_of(number, context, __builtin_return_address(0));
        write_all(TASKD_WORDS_STACKS, &subject, info);
        if (atomic_load((_Atomic int64_t *)&words->stay) != 0) {
            stay();
        }
    }
    errno = saved_errno;
}

/* ---- exits ------------------------------------------------------------------------------------------------------- */

static void before_exit(int status, void *caller)
{
    if (status == 0 || !is_armed() || atomic_load(&writer) == thread_id()) {
        return;
    }
    if (claim_after_others(TASKD_WORDS_EXIT)) {
        struct subject subject = {.number = status, .is_exit = true, .start = (uintptr_t)caller};
        write_all(TASKD_WORDS_EXIT, &subject, NULL);
    }
}

/* Exported, and called only when this library was preloaded. A return from main() does not come here: the C library ends
 * the process from inside. */
__attribute__((visibility("default"), noreturn)) void exit(int status);
__attribute__((visibility("default"), noreturn)) void _exit(int status);
__attribute__((visibility("default"), noreturn)) void _Exit(int status);
__attribute__((visibility("default"), noreturn)) void quick_exit(int status);

/* All that the original does, and without looking it up: children of vfork() and signal handlers come here. */
static __attribute__((noreturn)) void end_process(int status)
{
    for (;;) {
        syscall(SYS_exit_group, status);
    }
}

static __attribute__((noreturn)) void call_original(const char *name, int status)
{
    void (*original)(int);
    *(void **)&original = dlsym(RTLD_NEXT, name);
    if (original != NULL) {
        original(status);
    }
    end_process(status);
}

void exit(int status)
{
    before_exit(status, __builtin_return_address(0));
    call_original("exit", status);
}

void quick_exit(int status)
{
    before_exit(status, __builtin_return_address(0));
    call_original("quick_exit", status);
}

void _exit(int status)
{
    before_exit(status, __builtin_return_address(0));
    end_process(status);
}

void _Exit(int status)
{
    before_exit(status, __builtin_return_address(0));
    end_process(status);
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

/* A description of its own, so that its position is its own. 0 or -errno. */
static int open_text(int box_fd)
{
    char path[32];
    struct stat status;
    if (fstat(box_fd, &status) != 0) {
        return -errno;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", box_fd);
    int opened = open(path, O_WRONLY | O_CLOEXEC);
    if (opened < 0) {
        return -errno;
    }
    int fd = fcntl(opened, F_DUPFD_CLOEXEC, 3); /* the first three belong to the program, open or not */
    int error = errno;
    close(opened);
    if (fd < 0) {
        return -error;
    }
    text_device = status.st_dev;
    text_inode = status.st_ino;
    text_fd = fd;
    return 0;
}

/* Larger than what is there, if anything is: whoever installed that finds more room, which harms nobody. */
static void give_alternate_stack(void)
{
    stack_t present;
    if (sigaltstack(NULL, &present) != 0 || (present.ss_flags & SS_ONSTACK) != 0) {
        return;
    }
    if ((present.ss_flags & SS_DISABLE) == 0 && present.ss_size >= ALTERNATE_STACK_BYTES) {
        return;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, ALTERNATE_STACK_BYTES + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
        return;
    }
    stack_t ours = {.ss_sp = memory + page, .ss_size = ALTERNATE_STACK_BYTES};
    if (mprotect(ours.ss_sp, ours.ss_size, PROT_READ | PROT_WRITE) != 0 || sigaltstack(&ours, NULL) != 0) {
        munmap(memory, ALTERNATE_STACK_BYTES + page);
    }
}

static void find_helpers(void)
{
    void *frame[1];
    backtrace(frame, 1); /* the first call loads the unwinder */
    *(void **)&python_is_initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    *(void **)&python_is_finalizing = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    if (python_is_finalizing == NULL) {
        *(void **)&python_is_finalizing = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    }
    *(void **)&python_thread_state = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    *(void **)&python_dump_threads = dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads");
    *(void **)&python_dump = dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    find_exception_type();
}

static int install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    /* SA_NODEFER: a crash in a stage must reach us, or the kernel ends the process by that signal instead of the first one. */
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_crash;
    size_t installed = 0;
    while (installed < CRASH_SIGNALS && sigaction(crash_signals[installed], &action, &previous[installed]) == 0) {
        installed++;
    }
    int error = installed < CRASH_SIGNALS ? errno : 0;
    if (error == 0 && stacks_signal != 0) {
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
        action.sa_sigaction = on_request;
        error = sigaction(stacks_signal, &action, NULL) != 0 ? errno : 0;
    }
    while (error != 0 && installed > 0) {
        installed--;
        sigaction(crash_signals[installed], &previous[installed], NULL);
    }
    return -error;
}

int taskd_last_words_start(int box_fd, int signal_for_stacks)
{
    if (signal_for_stacks != 0 && (signal_for_stacks < SIGRTMIN || signal_for_stacks > SIGRTMAX)) {
        return -EINVAL;
    }
    static _Atomic int is_started;
    if (atomic_exchange(&is_started, 1) != 0) {
        return -EBUSY;
    }
    int result = 0;
    struct taskd_box_header *header = taskd_map_header(box_fd, &result);
    if (header != NULL) {
        result = open_text(box_fd);
        if (result == 0) {
            words = &header->last_words;
            stacks_signal = signal_for_stacks;
            give_alternate_stack();
            find_helpers();
            result = install();
            if (result == 0) {
                atomic_store(&armed_pid, (pid_t)syscall(SYS_getpid));
                set_word(&words->stacks_signal, signal_for_stacks);
                return 0;
            }
            close(text_fd);
        }
        taskd_unmap_header(header);
    }
    atomic_store(&is_started, 0);
    return result;
}
