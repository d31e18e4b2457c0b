/* The parts of the hooks. Each calls only those of sections before its own. Private. */
#ifndef TASKD_HOOKS_H
#define TASKD_HOOKS_H

#include "../black_box.h"

enum taskd_hook_number {
#define HOOK_CALL(family, kind, name, ...) HOOK_##name,
#define HOOK_INIT(family, name, ...) HOOK_##name,
#define HOOK_SPLIT(family, name, ...) HOOK_##name,
#include "hooks.def"
    HOOK_COUNT
};

/* ---- hooks.c -------------------------------------------------------------------------------- */

enum taskd_hook_family { NCCL, HCCL };
enum taskd_hook_kind { COLLECTIVE, POINT, BRACKET, END, INIT, SPLIT };
enum taskd_share { WHOLE, PER_RANK };

struct taskd_hook {
    char name[TASKD_NAME_BYTES];
    enum taskd_hook_family family;
    enum taskd_hook_kind kind;
};

extern const struct taskd_hook taskd_hooks[HOOK_COUNT];

/* ---- real_dlsym.c --------------------------------------------------------------------------- */

typedef void *taskd_dlsym(void *handle, const char *name);

/* The version that dlsym() has had since the platform exists: every C library for it has it, and
 * finding it cannot fail, which would cost an allocation in the wrong moment (allocators call
 * dlsym() too). Not defined: there is no dlsym() of ours on this platform. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define TASKD_DLSYM_VERSION "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define TASKD_DLSYM_VERSION "GLIBC_2.17"
#endif

/* A sanitizer's runtime calls dlsym() before it is ready for code that it has instrumented. */
#define TASKD_NOT_SANITIZED __attribute__((no_sanitize("address", "undefined", "thread")))

/* The C library's. */
taskd_dlsym *taskd_real_dlsym(void);

/* What would answer without us: the dlsym() of another interposer that comes behind this library
 * (tools that share a GPU have one), or the C library's. Set by taskd_real_dlsym(). */
extern __attribute__((visibility("hidden"))) taskd_dlsym *taskd_next_dlsym;

/* ---- originals.c ---------------------------------------------------------------------------- */

/* What `caller`, an address in the code that called the exported interposer `own`, would have
 * called without us. NULL: there is none (now). */
void *taskd_linked_original(enum taskd_hook_number hook, const void *own, const void *caller);

/* Whether any library has an original for the exported interposer `own`. */
bool taskd_has_original(enum taskd_hook_number hook, const void *own);

/* What the interposer that dlsym() gives out stands for. Never NULL when it is called. */
void *taskd_looked_up_original(enum taskd_hook_number hook);

/* From now on it stands for `found`; false: it stands for another function already. */
bool taskd_claim_looked_up(enum taskd_hook_number hook, void *found);

/* ---- collectives.c -------------------------------------------------------------------------- */

/* One call on its way through. On the stack of the interposer. */
struct taskd_passage {
    uint64_t index;  /* in the sequence of all calls; only valid if `is_recorded` */
    uint64_t id;     /* INIT and SPLIT: of the communicator to come */
    uint32_t place;  /* of the communicator, COLLECTIVE only; TASKD_COMMUNICATORS: none */
    uint32_t serial; /* of what was in that place */
    bool is_outermost;
    bool is_recorded;
};

void taskd_enter_call(struct taskd_passage *passage, enum taskd_hook_number hook, void *handle,
                      int64_t count, int64_t dtype, int64_t peer, enum taskd_share share);
void taskd_leave_call(struct taskd_passage *passage);
void taskd_enter_init(struct taskd_passage *passage, enum taskd_hook_number hook, const void *key,
                      size_t key_bytes);
void taskd_enter_split(struct taskd_passage *passage, enum taskd_hook_number hook, void *parent,
                       const void *key, size_t key_bytes, unsigned step);
/* `made`: the new communicator, NULL if there is none. `ranks`: how many it has, -1: not known. */
void taskd_leave_init(struct taskd_passage *passage, enum taskd_hook_number hook, void *made,
                      int64_t ranks);

/* ---- preload.c ------------------------------------------------------------------------------ */

/* The two interposers of a hook: the one that callers reach who are linked with the library, and
 * the one that dlsym() gives out. */
struct taskd_interposers {
    void *exported;
    void *looked_up;
};

extern const struct taskd_interposers taskd_interposers[HOOK_COUNT];

#endif
