/* The interposers of exit() and its like: who ends the process with an error says so in the last words. Exported, and called only when
 * this library was preloaded. A return from main() does not come here: the C library ends the process from inside.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "last_words.h"

#include <dlfcn.h>

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

typedef void ending(int status);

static _Atomic(ending *) original_exit;
static _Atomic(ending *) original_quick_exit;

static ending *find(const char *name)
{
    ending *found;
    *(void **)&found = dlsym(RTLD_NEXT, name);
    return found;
}

void taskd_find_exits(void)
{
    atomic_store(&original_exit, find("exit"));
    atomic_store(&original_quick_exit, find("quick_exit"));
}

static __attribute__((noreturn)) void call(ending *known, const char *name, int status)
{
    ending *original = known != NULL ? known : find(name); /* in a process that nobody has armed */
    if (original != NULL) {
        original(status);
    }
    end_process(status);
}

void exit(int status)
{
    taskd_before_exit(status, __builtin_return_address(0));
    call(atomic_load(&original_exit), "exit", status);
}

void quick_exit(int status)
{
    taskd_before_exit(status, __builtin_return_address(0));
    call(atomic_load(&original_quick_exit), "quick_exit", status);
}

void _exit(int status)
{
    taskd_before_exit(status, __builtin_return_address(0));
    end_process(status);
}

void _Exit(int status)
{
    taskd_before_exit(status, __builtin_return_address(0));
    end_process(status);
}
