/* Finding the functions that the interposers stand in front of. Decides which original a call
 * means.
 *
 * A caller that is linked with the library would, without us, have got the first definition in the
 * global scope behind us (RTLD_NEXT), or else the one among its own dependencies: libtorch_cuda.so
 * is opened with RTLD_LOCAL, and brings its own libnccl.so. That depends on where the call comes
 * from, and is remembered by return address. A caller that came by another way still (a function
 * pointer that was passed on) gets the definition of any loaded library.
 *
 * What was found is kept from being unloaded: its address is remembered here and in the program's
 * own tables.
 */
#define _GNU_SOURCE /* dladdr1, RTLD_NEXT */
#include "hooks.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <string.h>

#define SITES 1024 /* call sites that are remembered: 16 KiB, touched at the first call */
#define PROBES 16

static _Atomic(void *) global_originals[HOOK_COUNT];
static _Atomic(void *) looked_up_originals[HOOK_COUNT];

static struct site {
    _Atomic uint64_t key; /* 0: free. Never changes again */
    _Atomic(void *) original;
} sites[SITES];

static const char *name_of(enum taskd_hook_number hook)
{
    return taskd_hooks[hook].name;
}

/* The first definition behind this library that is not our own. */
static void *find_global(enum taskd_hook_number hook, const void *own)
{
    void *found = taskd_real_dlsym()(RTLD_NEXT, name_of(hook));
    return found == own ? NULL : found;
}

/* In the library of this name and its dependencies, if it is loaded. */
static void *find_in(const char *path, enum taskd_hook_number hook, const void *own)
{
    void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL)
        return NULL;
    void *found = taskd_real_dlsym()(handle, name_of(hook));
    dlclose(handle);
    return found == own ? NULL : found;
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

/* In any library. Its path is copied first: dlopen() within dl_iterate_phdr() would wait for
 * itself. */
static void *find_anywhere(enum taskd_hook_number hook, const void *own)
{
    struct nth nth;
    memset(nth.path, 0, sizeof nth.path);
    for (size_t n = 0;; n++) {
        nth.left = n;
        if (dl_iterate_phdr(take_nth, &nth) == 0)
            return NULL;
        /* What has no path is the program, which RTLD_NEXT knew, or the kernel's own. */
        void *found = strchr(nth.path, '/') == NULL ? NULL : find_in(nth.path, hook, own);
        if (found != NULL)
            return found;
    }
}

static void keep_loaded(void *address)
{
    Dl_info info;
    struct link_map *map = NULL;
    /* The program itself has no name here, and stays; dlopen() would leave an error behind. */
    if (dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) != 0 && map != NULL &&
        map->l_name[0] != '\0')
        dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

/* The entry of this key; NULL: it has none, and cannot have one if `is_new`. */
static struct site *site_of(uint64_t key, bool is_new)
{
    for (size_t probe = 0; probe < PROBES; probe++) {
        struct site *site = &sites[(key + probe) % SITES];
        uint64_t seen = atomic_load(&site->key);
        if (seen == 0 && is_new && atomic_compare_exchange_strong(&site->key, &seen, key))
            return site;
        if (seen == key)
            return site;
        if (seen == 0)
            return NULL;
    }
    return NULL;
}

static void *search(enum taskd_hook_number hook, const void *own, const void *caller, uint64_t key)
{
    int error = errno;
    void *found = find_global(hook, own);
    if (found != NULL) {
        atomic_store(&global_originals[hook], found);
    } else {
        Dl_info info;
        struct link_map *map = NULL;
        if (dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) != 0 && map != NULL &&
            map->l_name[0] != '\0')
            found = find_in(map->l_name, hook, own);
        if (found == NULL)
            found = find_anywhere(hook, own);
        struct site *site = found != NULL ? site_of(key, true) : NULL;
        if (site != NULL) /* else the call is searched for each time */
            atomic_store(&site->original, found);
    }
    if (found != NULL)
        keep_loaded(found);
    errno = error;
    return found;
}

void *taskd_linked_original(enum taskd_hook_number hook, const void *own, const void *caller)
{
    void *found = atomic_load(&global_originals[hook]);
    if (found != NULL)
        return found;
    /* Not the address alone: one place in a program may call several functions by a pointer. */
    uint64_t key = (uint64_t)(uintptr_t)caller * 64 + hook;
    struct site *site = site_of(key, false);
    found = site != NULL ? atomic_load(&site->original) : NULL;
    return found != NULL ? found : search(hook, own, caller, key);
}
_Static_assert(HOOK_COUNT <= 64, "a key has six bits for it");

bool taskd_has_original(enum taskd_hook_number hook, const void *own)
{
    return find_global(hook, own) != NULL || find_anywhere(hook, own) != NULL;
}

void *taskd_looked_up_original(enum taskd_hook_number hook)
{
    return atomic_load(&looked_up_originals[hook]);
}

bool taskd_claim_looked_up(enum taskd_hook_number hook, void *found)
{
    void *known = NULL;
    if (!atomic_compare_exchange_strong(&looked_up_originals[hook], &known, found))
        return known == found;
    keep_loaded(found);
    return true;
}
