/* Our own dlsym(): gives out the interposers to programs that look a hooked function up.
 *
 * A program that looks a function up in a library which it opened itself (torch_npu, ctypes) would
 * never meet us. So, preloaded, dlsym() is ours: it lets the real one look, and answers with the
 * interposer of the function found. One per name: should a second library with the same name turn
 * up, its own function is given out, and goes unrecorded. Whether a record has been started does
 * not matter, because programs look functions up long before. Every other question, and for our
 * names RTLD_DEFAULT and RTLD_NEXT if there is an original at all, goes to the next dlsym() by a
 * jump, so that it sees the caller's own return address, on which its answers depend.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "hooks.h"

#include <dlfcn.h>
#include <string.h>

#ifdef TASKD_DLSYM_VERSION

/* What the trampoline does: return `address` if `is_final`, else go on to the next dlsym(). Two
 * registers. */
struct verdict {
    void *address;
    uintptr_t is_final;
};

static struct verdict replacement_of(enum taskd_hook_number hook, void *handle)
{
    static const struct verdict ask_the_next = {NULL, 0};
    const char *name = taskd_hooks[hook].name;
    const struct taskd_interposers *own = &taskd_interposers[hook];
    void *found = own->exported;
    if (handle != RTLD_DEFAULT &&
        handle != RTLD_NEXT) /* whose answer depends on the caller's place */
        found = __atomic_load_n(&taskd_next_dlsym, __ATOMIC_RELAXED)(handle, name);
    if (found == NULL)
        return ask_the_next;
    if (found == own->exported) {
        if (taskd_has_original(hook, own->exported))
            return ask_the_next;
        taskd_real_dlsym()(RTLD_NEXT, name); /* fails, and dlerror() says so */
        return (struct verdict){NULL, 1};
    }
    return (struct verdict){taskd_claim_looked_up(hook, found) ? own->looked_up : found, 1};
}

TASKD_NOT_SANITIZED __attribute__((visibility("hidden"), used)) struct verdict
taskd_dlsym_verdict(void *handle, const char *name)
{
    taskd_real_dlsym(); /* finds the next one, which the trampoline needs */
    if (name != NULL && (name[0] == 'n' || name[0] == 'H') && name[1] == 'c' && name[2] == 'c' &&
        name[3] == 'l')
        for (int hook = 0; hook < HOOK_COUNT; hook++)
            if (strcmp(name, taskd_hooks[hook].name) == 0)
                return replacement_of((enum taskd_hook_number)hook, handle);
    return (struct verdict){NULL, 0};
}

/* void *dlsym(void *handle, const char *name), see above. In assembly because C has no jump that
 * leaves the caller's frame alone for certain. */
#if defined(__x86_64__)
#define TYPE "@function"
#define TRAMPOLINE                                                                                 \
    "    endbr64\n"                                                                                \
    "    subq $24, %rsp; .cfi_def_cfa_offset 32\n"                                                 \
    "    movq %rdi, 16(%rsp)\n"                                                                    \
    "    movq %rsi, 8(%rsp)\n"                                                                     \
    "    call taskd_dlsym_verdict\n"                                                               \
    "    movq 8(%rsp), %rsi\n"                                                                     \
    "    movq 16(%rsp), %rdi\n"                                                                    \
    "    addq $24, %rsp; .cfi_def_cfa_offset 8\n"                                                  \
    "    testq %rdx, %rdx\n"                                                                       \
    "    jz 1f\n"                                                                                  \
    "    ret\n"                                                                                    \
    "1:  jmpq *taskd_next_dlsym(%rip)\n"
#else
#define TYPE "%function"
#define TRAMPOLINE                                                                                 \
    "    hint #34\n" /* bti c */                                                                   \
    "    stp x29, x30, [sp, #-32]!; .cfi_def_cfa_offset 32\n"                                      \
    "    .cfi_offset x29, -32; .cfi_offset x30, -24\n"                                             \
    "    mov x29, sp\n"                                                                            \
    "    stp x0, x1, [sp, #16]\n"                                                                  \
    "    bl taskd_dlsym_verdict\n"                                                                 \
    "    mov x9, x0\n"                                                                             \
    "    mov x10, x1\n"                                                                            \
    "    ldp x0, x1, [sp, #16]\n"                                                                  \
    "    ldp x29, x30, [sp], #32\n"                                                                \
    "    .cfi_restore x29; .cfi_restore x30; .cfi_def_cfa_offset 0\n"                              \
    "    cbnz x10, 1f\n"                                                                           \
    "    adrp x16, taskd_next_dlsym\n"                                                             \
    "    ldr x16, [x16, #:lo12:taskd_next_dlsym]\n"                                                \
    "    br x16\n" /* x16: allowed to land on a function's first instruction */                    \
    "1:  mov x0, x9\n"                                                                             \
    "    ret\n"
#endif

__asm__(".pushsection .text\n"
        ".globl dlsym\n"
        ".type dlsym, " TYPE "\n"
        ".p2align 4\n"
        "dlsym:\n"
        "    .cfi_startproc\n" TRAMPOLINE "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n"
        ".popsection\n");

#endif
