/* The functions that come before those of NCCL and HCCL when libtaskd is preloaded. All of one shape, without any policy: find the
 * original (originals.c), tell the record that the call begins (collectives.c), call, tell that it has ended.
 *
 * Each hook has two interposers. The exported one is what programs reach that are linked with the library: which of several originals
 * they mean follows from where the call comes from. The other one is what dlsym() gives out, and stands for one original.
 *
 * errno and the result are those of the original. Without an original the call fails as the library itself would say it.
 */
#define _GNU_SOURCE
#include "hooks.h"

#include <errno.h>
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
    if (atomic_exchange(&was_said, 1) == 0) {
        char line[128] = "taskd: no library in this process has ";
        strcat(line, name);
        strcat(line, ": the call fails\n");
        ssize_t ignored = write(STDERR_FILENO, line, strlen(line));
        (void)ignored;
    }
    errno = error;
    return result;
}

/* The shape. `passage`, `original` and `result` are names that the list does not use for parameters. */
#define INTERPOSER(linkage, function, name, family, find, parameters, arguments, enter, leave)                                 \
    linkage int function parameters                                                                                            \
    {                                                                                                                          \
        int(*original) parameters = (int(*) parameters)find;                                                                   \
        if (original == NULL)                                                                                                  \
            return missing(#name, family##_MISSING);                                                                           \
        struct taskd_passage passage;                                                                                          \
        enter;                                                                                                                 \
        int result = original arguments;                                                                                       \
        leave;                                                                                                                 \
        return result;                                                                                                         \
    }

#define BOTH(name, family, parameters, arguments, enter, leave)                                                                \
    TASKD_API int name parameters;                                                                                             \
    INTERPOSER(, name, name, family, taskd_linked_original(HOOK_##name, __builtin_return_address(0)), parameters, arguments,   \
               enter, leave)                                                                                                   \
    INTERPOSER(static, looked_up_##name, name, family, taskd_looked_up_original(HOOK_##name), parameters, arguments, enter, leave)

#define HOOK_CALL(family, kind, name, parameters, arguments, handle, count, dtype, peer, share)                                \
    BOTH(name, family, parameters, arguments,                                                                                  \
         taskd_enter_call(&passage, HOOK_##name, handle, (int64_t)(count), dtype, peer, share), taskd_leave_call(&passage))
#define HOOK_INIT(family, name, parameters, arguments, key, key_bytes, ranks, made)                                            \
    BOTH(name, family, parameters, arguments, taskd_enter_init(&passage, HOOK_##name, key, key_bytes),                         \
         taskd_leave_init(&passage, HOOK_##name, (made) != NULL && family##_IS_MADE(result) ? *(made) : NULL, ranks))
#define HOOK_SPLIT(family, name, parameters, arguments, parent, key, key_bytes, step, made)                                    \
    BOTH(name, family, parameters, arguments, taskd_enter_split(&passage, HOOK_##name, parent, key, key_bytes, step),          \
         taskd_leave_init(&passage, HOOK_##name, (made) != NULL && family##_IS_MADE(result) ? *(made) : NULL, NONE))
#include "hooks.def"
#undef HOOK_CALL
#undef HOOK_INIT
#undef HOOK_SPLIT

#define ENTRY(family, kind, name) [HOOK_##name] = {#name, (void *)name, (void *)looked_up_##name, family, kind},
#define HOOK_CALL(family, kind, name, ...) ENTRY(family, kind, name)
#define HOOK_INIT(family, name, ...) ENTRY(family, INIT, name)
#define HOOK_SPLIT(family, name, ...) ENTRY(family, SPLIT, name)
const struct taskd_hook taskd_hooks[HOOK_COUNT] = {
#include "hooks.def"
};
