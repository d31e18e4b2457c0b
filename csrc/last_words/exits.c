/* The interposers of exit() and its like: they tell an observer, then end the process as ever.
 * Exported, and called only when this library was preloaded. A return from main() does not come
 * here: the C library ends the process from inside. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "last_words.h"

#include <dlfcn.h>

typedef void ending(int status);

static _Atomic(ending *) original_exit;
static _Atomic(ending *) original_quick_exit;
static _Atomic(taskd_exit_observer *) present_observer; /* NULL: nobody has armed this process */

static ending *find(const char *name)
{
    ending *found;
    *(void **)&found = dlsym(RTLD_NEXT, name);
    return found;
}

void taskd_observe_exits(taskd_exit_observer *observer)
{
    atomic_store(&original_exit, find("exit"));
    atomic_store(&original_quick_exit, find("quick_exit"));
    atomic_store(&present_observer, observer);
}

static void tell(int status, const void *caller)
{
    taskd_exit_observer *observer = atomic_load(&present_observer);
    if (observer != NULL)
        observer(status, caller);
}

/* All that the originals of _exit() do, and without looking them up: children of vfork() and signal
 * handlers come here. */
static __attribute__((noreturn)) void end_process(int status)
{
    for (;;)
        syscall(SYS_exit_group, status);
}

static __attribute__((noreturn)) void call(ending *known, const char *name, int status)
{
    ending *original = known != NULL ? known : find(name);
    if (original != NULL)
        original(status);
    end_process(status);
}

#define ENDING(name, body)                                                                         \
    __attribute__((visibility("default"), noreturn)) void name(int status);                        \
    void name(int status)                                                                          \
    {                                                                                              \
        tell(status, __builtin_return_address(0));                                                 \
        body;                                                                                      \
    }

ENDING(exit, call(atomic_load(&original_exit), "exit", status))
ENDING(quick_exit, call(atomic_load(&original_quick_exit), "quick_exit", status))
ENDING(_exit, end_process(status))
ENDING(_Exit, end_process(status))
