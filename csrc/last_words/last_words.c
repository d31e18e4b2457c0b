/* The last words of a worker: what it writes into its black box when it crashes, when it exits with
 * an error, and when it is asked for its stacks. Here: the record, and the handlers of signals.
 *
 * The basics come first (signal, address, thread), then the stacks, in stages that cannot harm each
 * other. Then the handler that was there before is put back, and the signal is sent again with its
 * own siginfo: to whoever looks (the earlier handler, a core file, wait()) the process ends as it
 * would have ended without us. An earlier handler that mends the fault and goes on (a virtual
 * machine's) has the signal for itself from then on.
 *
 * Handlers run on an alternate stack in the thread that called taskd_last_words_start(): it can
 * overflow its own. Other threads have none unless the program gives them one; if one of those
 * overflows, the kernel ends the process at once and nothing is written. A program that installs
 * its own handler later is called first, and reaches ours if it restores or calls what it found.
 *
 * Each entry checks first whether this is still the process that was armed: forked children do not
 * even have the mapping, and those of vfork() share their parent's memory.
 */
#define _GNU_SOURCE /* REG_RIP */
#include "last_words.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#define WAIT_FOR_OTHER (3000 * TASKD_MILLISECOND) /* more than all stages together */
#define LET_OTHER_DIE (100 * TASKD_MILLISECOND)
#define STALE (5000 * TASKD_MILLISECOND)   /* who lives that long did not die of what is written */
#define ALTERNATE_STACK_BYTES (256 * 1024) /* room for nested frames of signals */

static const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS, SIGTRAP};
#define CRASH_SIGNALS (sizeof crash_signals / sizeof crash_signals[0])

/* Written once, before `armed_pid` says that they may be read. */
static struct taskd_last_words *words;
static int stacks_signal;
static struct sigaction previous[CRASH_SIGNALS];

static _Atomic pid_t armed_pid; /* 0: nothing is armed */
static _Atomic pid_t writer;    /* the thread that is writing; 0: none */
static _Atomic int ending;      /* threads that are about to write how the process ends */

/* Not getpid(): old C libraries remember the parent's number across vfork(). */
static pid_t process_id(void)
{
    return (pid_t)syscall(SYS_getpid);
}

static bool is_armed(void)
{
    pid_t pid = atomic_load(&armed_pid);
    return pid != 0 && pid == process_id();
}

static void rest(int64_t duration_ns)
{
    struct timespec pause = {duration_ns / 1000000000, duration_ns % 1000000000};
    nanosleep(&pause, NULL);
}

/* ---- The record ----------------------------------------------------------------------------- */

/* What is there may be replaced by something that tells more of how the process ends. */
static bool may_write(int kind)
{
    if (words->state != TASKD_WORDS_COMPLETE || words->kind == TASKD_WORDS_STACKS)
        return true;
    if (kind == TASKD_WORDS_SIGNAL && words->kind == TASKD_WORDS_EXIT)
        return true; /* a crash on the way out */
    return kind != TASKD_WORDS_STACKS && taskd_monotonic_ns() - words->monotonic_ns > STALE;
}

static bool claim(int kind)
{
    pid_t none = 0;
    if (!atomic_compare_exchange_strong(&writer, &none, taskd_thread_id()))
        return false;
    if (may_write(kind))
        return true;
    atomic_store(&writer, 0);
    return false;
}

/* `claim`, when whoever is writing has done so: what it wrote may have been stacks on demand. */
static bool wait_for_claim(int kind)
{
    if (claim(kind))
        return true;
    if (atomic_load(&writer) == 0)
        return false; /* the record tells already how the process ends */
    int64_t deadline = taskd_monotonic_ns() + WAIT_FOR_OTHER;
    while (atomic_load(&writer) != 0 && taskd_monotonic_ns() < deadline)
        rest(10 * TASKD_MILLISECOND);
    rest(LET_OTHER_DIE); /* it came first: if that was a crash, the process should end by its signal
                          */
    return claim(kind);
}

static bool claim_ending(int kind)
{
    atomic_fetch_add(&ending, 1); /* stacks on demand, which could come again and again, give way */
    bool is_ours = wait_for_claim(kind);
    atomic_fetch_sub(&ending, 1);
    return is_ours;
}

static void on_request(int number, siginfo_t *info, void *context);

/* What limits the stages; 0: none, or the program uses the signal for something else, which might
 * end the process. */
static int limit_signal(void)
{
    struct sigaction present;
    if (stacks_signal == 0 || sigaction(stacks_signal, NULL, &present) != 0)
        return 0;
    return present.sa_sigaction == on_request ? stacks_signal : 0;
}

/* The reader looks at the state first and last, so the order matters. */
static void set_state(int64_t state)
{
    atomic_store(TASKD_ATOMIC(words->state), state);
}

/* By the thread that has claimed the record; gives it up. `info` NULL: no signal. */
static void write_all(int kind, const struct taskd_subject *subject, const siginfo_t *info)
{
    set_state(TASKD_WORDS_WRITING);
    atomic_thread_fence(memory_order_release); /* nobody sees what follows under the old state */
    words->kind = kind;
    words->number = subject->number;
    words->code = info != NULL ? info->si_code : 0;
    words->address = 0;
    if (info != NULL) /* a signal that was sent has no address, but a sender */
        words->address =
            info->si_code > 0 ? (uint64_t)(uintptr_t)info->si_addr : (uint64_t)info->si_pid;
    words->tid = taskd_thread_id();
    words->monotonic_ns = taskd_monotonic_ns();
    words->text_bytes = 0;
    words->frame_count = 0;
    memset(words->detail, 0, sizeof words->detail);
    memset(words->thread, 0, sizeof words->thread);
    prctl(PR_GET_NAME, words->thread, 0, 0, 0);

    taskd_write_stacks(words, kind, subject, limit_signal());
    if (kind == TASKD_WORDS_STACKS)
        atomic_store(TASKD_ATOMIC(words->requested), words->requested + 1);
    set_state(TASKD_WORDS_COMPLETE);
    atomic_store(&writer, 0);
}

/* `trampoline`: where the handler returns to. */
static void write_signal(int kind, int number, const siginfo_t *info, const ucontext_t *context,
                         const void *trampoline)
{
    struct taskd_subject subject = {
        .number = number, .context = context, .trampoline = (uintptr_t)trampoline};
#if defined(__x86_64__)
    subject.start = (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    subject.start = (uintptr_t)context->uc_mcontext.pc;
#endif
    write_all(kind, &subject, info);
}

/* ---- Handlers ------------------------------------------------------------------------------- */

static const struct sigaction *previous_of(int number)
{
    static const struct sigaction
        none; /* SIG_DFL: somebody called us for a signal that is not ours */
    for (size_t i = 0; i < CRASH_SIGNALS; i++)
        if (crash_signals[i] == number)
            return &previous[i];
    return &none;
}

/* As if we had never been there: the handler from before gets the signal, with its siginfo and in
 * the place where it came. */
static void pass_on(int number, siginfo_t *info)
{
    sigaction(number, previous_of(number), NULL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* until this handler returns */
    if (syscall(SYS_rt_tgsigqueueinfo, process_id(), taskd_thread_id(), number, info) != 0)
        syscall(SYS_tgkill, process_id(), taskd_thread_id(), number);
}

static void on_crash(int number, siginfo_t *info, void *context)
{
    int saved_errno = errno;
    if (is_armed()) {
        if (previous_of(number)->sa_handler == SIG_IGN && info->si_code <= 0)
            return; /* sent by somebody, and the program ignores it */
        if (atomic_load(&writer) == taskd_thread_id())
            taskd_leave_stage();
        else if (claim_ending(TASKD_WORDS_SIGNAL))
            write_signal(TASKD_WORDS_SIGNAL, number, info, context, __builtin_return_address(0));
    }
    pass_on(number, info);
    errno = saved_errno;
}

/* The process is to be killed and may not change anything any more: not even if it was stopped, and
 * was continued only for its stacks. */
static __attribute__((noreturn)) void stay(void)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    for (;;)
        rest(1000 * TASKD_MILLISECOND);
}

static void on_request(int number, siginfo_t *info, void *context)
{
    if (!is_armed())
        return;
    int saved_errno = errno;
    pid_t thread = taskd_thread_id();
    pid_t main_thread = process_id();
    if (info->si_code == SI_TIMER) {
        if (atomic_load(&writer) == thread)
            taskd_leave_stage();
    } else if (thread != main_thread) {
        syscall(SYS_tgkill, main_thread, main_thread, number);
    } else if (atomic_load(&ending) == 0 && claim(TASKD_WORDS_STACKS)) {
        write_signal(TASKD_WORDS_STACKS, number, info, context, __builtin_return_address(0));
        if (atomic_load(TASKD_ATOMIC(words->stay)) != 0)
            stay();
    }
    errno = saved_errno;
}

static void before_exit(int status, const void *caller)
{
    if (status == 0 || !is_armed() || atomic_load(&writer) == taskd_thread_id())
        return;
    if (claim_ending(TASKD_WORDS_EXIT)) {
        struct taskd_subject subject = {
            .number = status, .is_exit = true, .start = (uintptr_t)caller};
        write_all(TASKD_WORDS_EXIT, &subject, NULL);
    }
}

/* ---- The start ------------------------------------------------------------------------------ */

static void give_alternate_stack(void)
{
    stack_t present;
    if (sigaltstack(NULL, &present) != 0 || (present.ss_flags & SS_ONSTACK) != 0)
        return;
    if ((present.ss_flags & SS_DISABLE) == 0 && present.ss_size >= ALTERNATE_STACK_BYTES)
        return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE); /* below, without access: overflow is a fault */
    size_t bytes = page + ALTERNATE_STACK_BYTES;
    char *memory = mmap(NULL, bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED)
        return;
    stack_t ours = {.ss_sp = memory + page, .ss_size = ALTERNATE_STACK_BYTES};
    if (mprotect(ours.ss_sp, ours.ss_size, PROT_READ | PROT_WRITE) != 0 ||
        sigaltstack(&ours, NULL) != 0)
        munmap(memory, bytes);
}

static int install_handlers(void)
{
    /* SA_NODEFER: a crash in a stage must reach us, or the kernel ends the process by that signal
     * instead of the first one. */
    const struct sigaction crash = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
                                    .sa_sigaction = on_crash};
    const struct sigaction request = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART,
                                      .sa_sigaction = on_request};
    size_t installed = 0;
    while (installed < CRASH_SIGNALS &&
           sigaction(crash_signals[installed], &crash, &previous[installed]) == 0)
        installed++;
    if (installed == CRASH_SIGNALS &&
        (stacks_signal == 0 || sigaction(stacks_signal, &request, NULL) == 0))
        return 0;
    int error = errno;
    while (installed-- > 0)
        sigaction(crash_signals[installed], &previous[installed], NULL);
    return -error;
}

static int arm(struct taskd_box_header *header, int box_fd, int signal_for_stacks)
{
    int text_fd = taskd_prepare_stacks(box_fd);
    if (text_fd < 0)
        return text_fd;
    words = &header->last_words;
    stacks_signal = signal_for_stacks;
    give_alternate_stack();
    taskd_observe_exits(before_exit);
    int result = install_handlers();
    if (result != 0) {
        taskd_close_stacks();
        return result;
    }
    atomic_store(&armed_pid, process_id());
    atomic_store(TASKD_ATOMIC(words->stacks_signal), signal_for_stacks);
    return text_fd;
}

int taskd_last_words_start(int box_fd, int signal_for_stacks)
{
    if (signal_for_stacks != 0 && (signal_for_stacks < SIGRTMIN || signal_for_stacks > SIGRTMAX))
        return -EINVAL;
    static _Atomic int is_started;
    if (atomic_exchange(&is_started, 1) != 0)
        return -EBUSY;
    int result = 0;
    struct taskd_box_header *header = taskd_map_header(box_fd, &result);
    if (header != NULL) {
        result = arm(header, box_fd, signal_for_stacks);
        if (result >= 0)
            return result;
        taskd_unmap_header(header);
    }
    atomic_store(&is_started, 0);
    return result;
}
