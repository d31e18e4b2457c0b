/* The parts of the last words. Each calls only those of sections before its own. Private. */
#ifndef TASKD_LAST_WORDS_H
#define TASKD_LAST_WORDS_H

#include "../black_box.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define TASKD_MILLISECOND 1000000LL

/* What the stacks are taken of. */
struct taskd_subject {
    int number; /* of the signal, or the exit status */
    bool is_exit;
    uintptr_t start;           /* the frame where the signal came, or of the caller of exit() */
    const ucontext_t *context; /* the registers there; NULL: no signal */
    uintptr_t trampoline;      /* where handlers return to: the frame behind it was interrupted */
};

static inline pid_t taskd_thread_id(void)
{
    return (pid_t)syscall(SYS_gettid);
}

/* ---- stacks.c ------------------------------------------------------------------------------- */

/* Before anything is armed: opens the place for the text, loads the unwinder, looks up functions of
 * the interpreter. The descriptor of that place, or -errno. */
int taskd_prepare_stacks(int box_fd);
void taskd_close_stacks(void);

/* By the one thread that has claimed the record: writes the stacks of `subject` to `words` and to
 * the text behind it. `limit_signal`: what a timer sends to this thread, so that
 * taskd_leave_stage() is called when a stage lasts too long; 0: no limits. */
void taskd_write_stacks(struct taskd_last_words *words, int kind,
                        const struct taskd_subject *subject, int limit_signal);

/* In a handler of the thread that is in taskd_write_stacks(): gives up the stage that it is in.
 * Returns if it is in none. */
void taskd_leave_stage(void);

/* ---- exits.c -------------------------------------------------------------------------------- */

/* The process is about to end with this status, as `caller` wants. */
typedef void taskd_exit_observer(int status, const void *caller);

/* Before anything is armed: whoever ends the process tells `observer` first. Looks the C library's
 * functions up now: at the end of the process another thread may have the dynamic linker locked. */
void taskd_observe_exits(taskd_exit_observer *observer);

#endif
