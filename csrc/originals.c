/* Finding what the interposers stand in front of, and the dlsym() that gives them out. Decides which original a call means.
 *
 * A caller that is linked with the library would, without us, have got the first definition in the global scope behind us (RTLD_NEXT), or
 * else the one among its own dependencies: libtorch_cuda.so is opened with RTLD_LOCAL, and brings its own libnccl.so. That depends on
 * where the call comes from, and is remembered by return address. A caller that came by another way still (a function pointer that
 * was passed on) gets the definition of any loaded library.
 *
 * A program that looks a function up in a library which it opened itself (torch_npu, ctypes) would never meet us. So, preloaded, dlsym()
 * is ours: it lets the real one look, and answers with the interposer of the function found. One per name: should a second library
 * with the same name turn up, its own function is given out, and goes unrecorded. Whether a record has been started does not matter,
 * because programs look functions up long before. Every other question, and for our names RTLD_DEFAULT and RTLD_NEXT if there is an
 * original at all, goes to the next dlsym() by a jump, so that it sees the caller's own return address, on which its answers depend.
 *
 * What was found is kept from being unloaded: its address is remembered here and in the program's own tables.
 */
#define _GNU_SOURCE /* dlvsym, dladdr1, RTLD_NEXT */
#include "hooks.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <string.h>

#define SITES 1024 /* call sites that are remembered: 16 KiB, touched when a function is first called */
#define PROBES 16

typedef void *dlsym_function(void *, const char *);

static _Atomic(void *) global_originals[HOOK_COUNT];
static _Atomic(void *) looked_up_originals[HOOK_COUNT];

static struct site {
    _Atomic uint64_t key; /* 0: free. Never changes again */
    _Atomic(void *) original;
} sites[SITES];

/* The version that dlsym() has had since the platform exists: every C library for it has it, and finding it cannot fail, which would cost
 * an allocation in the wrong moment (allocators call dlsym() too). */
#if defined(__GLIBC__) && defined(__x86_64__)
#define DLSYM_VERSION "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define DLSYM_VERSION "GLIBC_2.17"
#endif

#ifdef DLSYM_VERSION
static dlsym_function *libc_dlsym;

/* What would answer without us: another interposer's that comes behind this library (tools that share a GPU have one), or the C library's.
 * Read by the trampoline below. */
__attribute__((visibility("hidden"), used)) dlsym_function *taskd_next_dlsym;

static void *no_dlsym(void *handle, const char *name)
{
    (void)handle;
    (void)name;
    return NULL;
}

/* A sanitizer's runtime calls dlsym() before it is ready for code that it has instrumented. */
#define BEFORE_SANITIZERS __attribute__((no_sanitize("address", "undefined", "thread")))

BEFORE_SANITIZERS static dlsym_function *real_dlsym(void)
{
    dlsym_function *real = __atomic_load_n(&libc_dlsym, __ATOMIC_ACQUIRE);
    if (real == NULL) {
        real = (dlsym_function *)dlvsym(RTLD_DEFAULT, "dlsym", DLSYM_VERSION);
        if (real == NULL)
            real = no_dlsym;
        dlsym_function *next = (dlsym_function *)real(RTLD_NEXT, "dlsym");
        __atomic_store_n(&taskd_next_dlsym, next != NULL ? next : real, __ATOMIC_RELAXED);
        __atomic_store_n(&libc_dlsym, real, __ATOMIC_RELEASE);
    }
    return real;
}

static void *ask_next(void *handle, const char *name)
{
    real_dlsym();
    return __atomic_load_n(&taskd_next_dlsym, __ATOMIC_RELAXED)(handle, name);
}
#else
static dlsym_function *real_dlsym(void)
{
    return dlsym;
}
#endif

/* Not ours, and so a possible original. */
static void *other(enum taskd_hook_number hook, void *found)
{
    return found == taskd_hooks[hook].exported ? NULL : found;
}

/* In the library of this name and its dependencies, if it is loaded. */
static void *find_in(const char *path, enum taskd_hook_number hook)
{
    void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL)
        return NULL;
    void *found = other(hook, real_dlsym()(handle, taskd_hooks[hook].name));
    dlclose(handle);
    return found;
}

struct nth {
    size_t left;
    char path[PATH_MAX];
};

static int take_nth(struct dl_phdr_info *info, size_t size, void *argument)
{
    (void)size;
    struct nth *nth = argument;
    if (nth->left-- != 0)
        return 0;
    strncpy(nth->path, info->dlpi_name, sizeof nth->path - 1);
    return 1;
}

/* In any library. Its name is copied first: opening within dl_iterate_phdr() would wait for itself. */
static void *find_anywhere(enum taskd_hook_number hook)
{
    struct nth nth;
    memset(nth.path, 0, sizeof nth.path);
    for (size_t n = 0;; n++) {
        nth.left = n;
        if (dl_iterate_phdr(take_nth, &nth) == 0)
            return NULL;
        /* What has no path is the program, which RTLD_NEXT knew, or the kernel's own. */
        void *found = strchr(nth.path, '/') == NULL ? NULL : find_in(nth.path, hook);
        if (found != NULL)
            return found;
    }
}

static void keep_loaded(void *address)
{
    Dl_info info;
    if (dladdr(address, &info) != 0 && info.dli_fname != NULL)
        dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

static void remember_site(uint64_t key, void *original)
{
    for (size_t probe = 0; probe < PROBES; probe++) {
        struct site *site = &sites[(key + probe) % SITES];
        uint64_t none = 0;
        if (atomic_compare_exchange_strong(&site->key, &none, key) || none == key) {
            atomic_store_explicit(&site->original, original, memory_order_release);
            return;
        }
    }
    /* No room: this one is searched for each time. */
}

static void *search(enum taskd_hook_number hook, const void *caller, uint64_t key)
{
    int error = errno;
    void *found = other(hook, real_dlsym()(RTLD_NEXT, taskd_hooks[hook].name));
    if (found != NULL) {
        atomic_store_explicit(&global_originals[hook], found, memory_order_release);
    } else {
        Dl_info info;
        struct link_map *map = NULL;
        if (dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) != 0 && map != NULL && map->l_name[0] != '\0')
            found = find_in(map->l_name, hook);
        if (found == NULL)
            found = find_anywhere(hook);
        if (found != NULL)
            remember_site(key, found);
    }
    if (found != NULL)
        keep_loaded(found);
    errno = error;
    return found;
}

void *taskd_linked_original(enum taskd_hook_number hook, const void *caller)
{
    void *found = atomic_load_explicit(&global_originals[hook], memory_order_acquire);
    if (found != NULL)
        return found;
    /* Not the address alone: one place in a program may call several functions through a pointer. */
    uint64_t key = (uint64_t)(uintptr_t)caller * 64 + hook;
    for (size_t probe = 0; probe < PROBES; probe++) {
        struct site *site = &sites[(key + probe) % SITES];
        uint64_t seen = atomic_load_explicit(&site->key, memory_order_relaxed);
        if (seen == key) {
            found = atomic_load_explicit(&site->original, memory_order_acquire);
            if (found != NULL)
                return found;
        }
        if (seen == 0)
            break;
    }
    return search(hook, caller, key);
}
_Static_assert(HOOK_COUNT <= 64, "a key has six bits for it");

void *taskd_looked_up_original(enum taskd_hook_number hook)
{
    return atomic_load_explicit(&looked_up_originals[hook], memory_order_acquire);
}

#ifdef DLSYM_VERSION

/* What the trampoline does: return `address` if `is_final`, else go on to the real dlsym(). Two registers. */
struct verdict {
    void *address;
    uintptr_t is_final;
};

/* Somebody asks for whatever comes first or next, and that may be us. True, if there is anything behind us: then the real dlsym() may say
 * so. Else there is no such function, and dlerror() knows. */
static bool has_original(enum taskd_hook_number hook)
{
    if (other(hook, real_dlsym()(RTLD_NEXT, taskd_hooks[hook].name)) != NULL || find_anywhere(hook) != NULL)
        return true;
    real_dlsym()(RTLD_NEXT, taskd_hooks[hook].name);
    return false;
}

static struct verdict replacement_of(enum taskd_hook_number hook, void *handle)
{
    static const struct verdict ask_the_real_one = {NULL, 0};
    bool is_open_question = handle == RTLD_DEFAULT || handle == RTLD_NEXT; /* which only the caller's place answers */
    void *found = is_open_question ? taskd_hooks[hook].exported : ask_next(handle, taskd_hooks[hook].name);
    if (found == NULL)
        return ask_the_real_one;
    if (found == taskd_hooks[hook].exported)
        return has_original(hook) ? ask_the_real_one : (struct verdict){NULL, 1};
    void *known = NULL;
    if (atomic_compare_exchange_strong(&looked_up_originals[hook], &known, found))
        keep_loaded(found);
    else if (known != found)
        return (struct verdict){found, 1};
    return (struct verdict){taskd_hooks[hook].looked_up, 1};
}

BEFORE_SANITIZERS __attribute__((visibility("hidden"), used)) struct verdict taskd_dlsym_verdict(void *handle, const char *name)
{
    real_dlsym(); /* finds the next one, which the trampoline needs */
    if (name != NULL && (name[0] == 'n' || name[0] == 'H') && name[1] == 'c' && name[2] == 'c' && name[3] == 'l')
        for (int hook = 0; hook < HOOK_COUNT; hook++)
            if (strcmp(name, taskd_hooks[hook].name) == 0)
                return replacement_of((enum taskd_hook_number)hook, handle);
    return (struct verdict){NULL, 0};
}

/* void *dlsym(void *handle, const char *name), see above. In assembly because C has no jump that leaves the frame of the caller alone for
 * certain. */
#if defined(__x86_64__)
__asm__(".pushsection .text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        ".p2align 4\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call taskd_dlsym_verdict\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    testq %rdx, %rdx\n"
        "    jz 1f\n"
        "    ret\n"
        "1:  jmpq *taskd_next_dlsym(%rip)\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n"
        ".popsection\n");
#else
__asm__(".pushsection .text\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        ".p2align 4\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    stp x29, x30, [sp, #-32]!\n"
        "    .cfi_def_cfa_offset 32\n"
        "    .cfi_offset x29, -32\n"
        "    .cfi_offset x30, -24\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    bl taskd_dlsym_verdict\n"
        "    mov x9, x0\n"
        "    mov x10, x1\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x29, x30, [sp], #32\n"
        "    .cfi_restore x29\n"
        "    .cfi_restore x30\n"
        "    .cfi_def_cfa_offset 0\n"
        "    cbnz x10, 1f\n"
        "    adrp x16, taskd_next_dlsym\n"
        "    ldr x16, [x16, #:lo12:taskd_next_dlsym]\n"
        "    br x16\n" /* x16: allowed to land on a function's first instruction */
        "1:  mov x0, x9\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n"
        ".popsection\n");
#endif

#endif

/* Which comes first in the order in which libraries were loaded: this one, or the C library? */
struct order {
    uintptr_t ours;
    uintptr_t theirs;
    int result;
};

static int compare(struct dl_phdr_info *info, size_t size, void *argument)
{
    (void)size;
    struct order *order = argument;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type != PT_LOAD)
            continue;
        if (order->theirs - start < segment->p_memsz)
            return 1;
        if (order->ours - start < segment->p_memsz) {
            order->result = 1;
            return 1;
        }
    }
    return 0;
}

int taskd_is_preloaded(void)
{
    struct order order = {.ours = (uintptr_t)&sites, .theirs = (uintptr_t)real_dlsym()};
    dl_iterate_phdr(compare, &order);
    return order.result;
}
