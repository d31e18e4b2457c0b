/* The functions that come before those of NCCL and HCCL when libtaskd is preloaded. All of one
 * shape, without any policy: find the original, tell the record that the call begins, call, tell
 * that it has ended.
 *
 * Each hook has two interposers. The exported one is what programs reach that are linked with the
 * library: which of several originals they mean follows from where the call comes from. The other
 * one is what dlsym() gives out, and stands for one original.
 *
 * errno and the result are those of the original. Without an original the call fails as the library
 * itself would say it.
 */
#define _GNU_SOURCE /* dprintf */
#include "hooks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ncclUniqueId, which is passed by value, and HcclRootInfo. */
struct taskd_nccl_id {
    char bytes[128];
};
struct taskd_hccl_root {
    char bytes[4108];
};

#define NONE (-1)

#define NCCL_MISSING 2 /* ncclSystemError */
#define HCCL_MISSING 4 /* HCCL_E_INTERNAL */

/* Results after which a communicator exists: success, and for NCCL that it is still being made. */
#define NCCL_IS_MADE(result) ((result) == 0 || (result) == 7)
#define HCCL_IS_MADE(result) ((result) == 0)

static int missing(const char *name, int result)
{
    static _Atomic int was_said;
    int error = errno;
    if (atomic_exchange(&was_said, 1) == 0)
        dprintf(STDERR_FILENO, "taskd: no library in this process has %s: the call fails\n", name);
    errno = error;
    return result;
}

/* The shape. `passage`, `original` and `result` are names that the list does not use for
 * parameters. */
#define INTERPOSER(linkage, function, name, family, find, enter, leave, parameters, arguments)     \
    linkage int function parameters                                                                \
    {                                                                                              \
        int(*original) parameters = (int(*) parameters)find;                                       \
        if (original == NULL)                                                                      \
            return missing(#name, family##_MISSING);                                               \
        struct taskd_passage passage;                                                              \
        enter;                                                                                     \
        int result = original arguments;                                                           \
        leave;                                                                                     \
        return result;                                                                             \
    }
#define LINKED(name) taskd_linked_original(HOOK_##name, (void *)name, __builtin_return_address(0))
#define LOOKED_UP(name) taskd_looked_up_original(HOOK_##name)
#define BOTH(name, family, enter, leave, parameters, arguments)                                    \
    TASKD_API int name parameters;                                                                 \
    INTERPOSER(, name, name, family, LINKED(name), enter, leave, parameters, arguments)            \
    INTERPOSER(static, looked_up_##name, name, family, LOOKED_UP(name), enter, leave, parameters,  \
               arguments)
#define MADE(family, made) ((made) != NULL && family##_IS_MADE(result) ? *(made) : NULL)

#define HOOK_CALL(family, kind, name, handle, count, dtype, peer, share, ...)                      \
    BOTH(name, family,                                                                             \
         taskd_enter_call(&passage, HOOK_##name, handle, (int64_t)(count), dtype, peer, share),    \
         taskd_leave_call(&passage), __VA_ARGS__)
#define HOOK_INIT(family, name, key, key_bytes, ranks, made, ...)                                  \
    BOTH(name, family, taskd_enter_init(&passage, HOOK_##name, key, key_bytes),                    \
         taskd_leave_init(&passage, HOOK_##name, MADE(family, made), ranks), __VA_ARGS__)
#define HOOK_SPLIT(family, name, parent, key, key_bytes, step, made, ...)                          \
    BOTH(name, family, taskd_enter_split(&passage, HOOK_##name, parent, key, key_bytes, step),     \
         taskd_leave_init(&passage, HOOK_##name, MADE(family, made), NONE), __VA_ARGS__)
#include "hooks.def"

const struct taskd_interposers taskd_interposers[HOOK_COUNT] = {
#define ENTRY(name) [HOOK_##name] = {(void *)name, (void *)looked_up_##name},
#define HOOK_CALL(family, kind, name, ...) ENTRY(name)
#define HOOK_INIT(family, name, ...) ENTRY(name)
#define HOOK_SPLIT(family, name, ...) ENTRY(name)
#include "hooks.def"
};
