/* What the three parts of the hooks share: preload.c (the interposers), originals.c (what they call), collectives.c (the record). */
#ifndef TASKD_HOOKS_H
#define TASKD_HOOKS_H

#include "internal.h"

#include <stdbool.h>

enum taskd_hook_number {
#define HOOK_CALL(family, kind, name, ...) HOOK_##name,
#define HOOK_INIT(family, name, ...) HOOK_##name,
#define HOOK_SPLIT(family, name, ...) HOOK_##name,
#include "hooks.def"
#undef HOOK_CALL
#undef HOOK_INIT
#undef HOOK_SPLIT
    HOOK_COUNT
};

enum taskd_hook_family { NCCL, HCCL };
enum taskd_hook_kind { COLLECTIVE, POINT, BRACKET, END, INIT, SPLIT };
enum taskd_share { WHOLE, PER_RANK };

struct taskd_hook {
    char name[TASKD_NAME_BYTES];
    void *exported;  /* the interposer that callers reach who are linked with the library */
    void *looked_up; /* the one that dlsym() gives out */
    enum taskd_hook_family family;
    enum taskd_hook_kind kind;
};

extern const struct taskd_hook taskd_hooks[HOOK_COUNT];

/* ---- originals.c ------------------------------------------------------------------------------------------------- */

/* What `caller`, an address in the code that called the exported interposer, would have called without us. NULL: there is none (now). */
void *taskd_linked_original(enum taskd_hook_number hook, const void *caller);

/* What dlsym() found when it gave out the other interposer. Never NULL then. */
void *taskd_looked_up_original(enum taskd_hook_number hook);

/* ---- collectives.c ----------------------------------------------------------------------------------------------- */

/* One call on its way through. On the stack of the interposer. */
struct taskd_passage {
    uint64_t index;  /* in the sequence of all calls; only valid if `is_recorded` */
    uint64_t id;     /* INIT and SPLIT: of the communicator to come */
    uint32_t place;  /* of the communicator, COLLECTIVE only; TASKD_COMMUNICATORS: none */
    uint32_t serial; /* of what was in that place */
    bool is_outermost;
    bool is_recorded;
};

void taskd_enter_call(struct taskd_passage *passage, enum taskd_hook_number hook, void *handle, int64_t count, int64_t dtype,
                      int64_t peer, enum taskd_share share);
void taskd_leave_call(struct taskd_passage *passage);
void taskd_enter_init(struct taskd_passage *passage, enum taskd_hook_number hook, const void *key, size_t key_bytes);
void taskd_enter_split(struct taskd_passage *passage, enum taskd_hook_number hook, void *parent, const void *key, size_t key_bytes,
                       unsigned step);
/* `made`: the new communicator, NULL if there is none. `ranks`: how many it has, -1: not known. */
void taskd_leave_init(struct taskd_passage *passage, enum taskd_hook_number hook, void *made, int64_t ranks);

#endif
