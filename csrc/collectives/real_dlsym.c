/* The dlsym() that would be called without this library, and whether this library comes first. */
#define _GNU_SOURCE /* dlvsym, RTLD_NEXT */
#include "hooks.h"

#include <dlfcn.h>
#include <link.h>

__attribute__((used)) taskd_dlsym *taskd_next_dlsym; /* read in assembly, too */

#ifdef TASKD_DLSYM_VERSION
static taskd_dlsym *libc_dlsym;

static void *no_dlsym(void *handle, const char *name)
{
    (void)handle;
    (void)name;
    return NULL;
}

TASKD_NOT_SANITIZED taskd_dlsym *taskd_real_dlsym(void)
{
    taskd_dlsym *real = __atomic_load_n(&libc_dlsym, __ATOMIC_ACQUIRE);
    if (real == NULL) {
        real = (taskd_dlsym *)dlvsym(RTLD_DEFAULT, "dlsym", TASKD_DLSYM_VERSION);
        if (real == NULL)
            real = no_dlsym;
        taskd_dlsym *next = (taskd_dlsym *)real(RTLD_NEXT, "dlsym");
        __atomic_store_n(&taskd_next_dlsym, next != NULL ? next : real, __ATOMIC_RELAXED);
        __atomic_store_n(&libc_dlsym, real, __ATOMIC_RELEASE);
    }
    return real;
}
#else
taskd_dlsym *taskd_real_dlsym(void)
{
    return dlsym;
}
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
        order->result = order->ours - start < segment->p_memsz;
        if (order->result || order->theirs - start < segment->p_memsz)
            return 1;
    }
    return 0;
}

int taskd_is_preloaded(void)
{
    struct order order = {(uintptr_t)&taskd_next_dlsym, (uintptr_t)taskd_real_dlsym(), 0};
    dl_iterate_phdr(compare, &order);
    return order.result;
}
