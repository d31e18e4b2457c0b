/* What the parts of the last words share: last_words.c (the record, the handlers), stacks.c (what is written of them), exits.c (the
 * interposers of exit() and its like). Not part of the ABI.
 */
#ifndef TASKD_LAST_WORDS_H
#define TASKD_LAST_WORDS_H

#include "internal.h"

#include <stdbool.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <ucontext.h>
#include <unistd.h>

#define TASKD_MILLISECOND 1000000LL

/* What the stacks are taken of. */
struct taskd_subject {
    int number;
    bool is_exit;
    uintptr_t start; /* the first frame of interest: where the signal came, or the caller of exit() */
    const ucontext_t *context; /* the registers there; NULL: no signal */
    uintptr_t trampoline; /* where signal handlers return to: what comes behind it was interrupted and called nobody */
};

static inline pid_t taskd_thread_id(void)
{
    return (pid_t)syscall(SYS_gettid);
}

/* The reader looks at the state first and last: order matters, and plain stores would leave it to the compiler. */
static inline void taskd_set_word(int64_t *word, int64_t value)
{
    atomic_store((_Atomic int64_t *)word, value);
}

/* ---- stacks.c ---------------------------------------------------------------------------------------------------- */

/* Once, before anything is armed: opens the place for the text, loads the unwinder, looks the interpreter's functions up. 0 or -errno. */
int taskd_prepare_stacks(int box_fd);
void taskd_close_stacks(void);

/* By the one thread that has claimed the record: writes the stacks of `subject` to `words` and behind it. `limit_signal`: what a timer
 * sends to this thread, so that taskd_leave_stage() is called when a stage lasts too long; 0: no limits. */
void taskd_write_stacks(struct taskd_last_words *words, int kind, const struct taskd_subject *subject, int limit_signal);

/* In a handler of the thread that is in taskd_write_stacks(): gives up the stage that it is in. Comes back if it is in none. */
void taskd_leave_stage(void);

/* ---- exits.c ----------------------------------------------------------------------------------------------------- */

/* Before anything is armed: looks up what ends the process. When it comes to that, another thread may have the dynamic linker locked. */
void taskd_find_exits(void);

/* ---- last_words.c ------------------------------------------------------------------------------------------------ */

/* The process is about to end with this status, as `caller` wants. */
void taskd_before_exit(int status, const void *caller);

#endif
