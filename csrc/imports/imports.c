/* The imports of loaded libraries: finding the slots that the dynamic linker filled, through the
 * library's own relocations, and pointing them at other functions. No code is changed, and nobody
 * else's imports are. A slot lies in the library's data, or in the part of it that was made
 * read-only once it was filled (RELRO). */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include "imports.h"

#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct search {
    const char *library;
    struct taskd_import *imports;
    size_t count;
    bool is_found;
};

static void take_slot(struct search *search, const char *name, void **slot)
{
    for (size_t k = 0; k < search->count; k++)
        if (search->imports[k].slot == NULL && strcmp(name, search->imports[k].name) == 0)
            search->imports[k].slot = slot;
}

static void search_slots(struct search *search, ElfW(Addr) base, const ElfW(Dyn) * dynamic)
{
    ElfW(Addr) of[DT_NUM] = {0}; /* what the library says of itself, by tag: addresses and sizes */
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag > 0 && dynamic->d_tag < DT_NUM)
            of[dynamic->d_tag] = dynamic->d_un.d_ptr;
    const char *strings = (const char *)of[DT_STRTAB];
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)of[DT_SYMTAB];
    if (strings == NULL || symbols == NULL)
        return;
    const ElfW(Rela) *
        tables[] = {(const ElfW(Rela) *)of[DT_JMPREL], (const ElfW(Rela) *)of[DT_RELA]};
    const size_t sizes[] = {of[DT_PLTRELSZ], of[DT_RELASZ]};
    for (int table = 0; table < 2; table++) {
        for (size_t i = 0; tables[table] != NULL && i < sizes[table] / sizeof(ElfW(Rela)); i++) {
            size_t index = ELF64_R_SYM(tables[table][i].r_info);
            if (index != 0)
                take_slot(search, strings + symbols[index].st_name,
                          (void **)(base + tables[table][i].r_offset));
        }
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *argument)
{
    (void)size;
    struct search *search = argument;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (strcmp(slash != NULL ? slash + 1 : info->dlpi_name, search->library) != 0)
        return 0;
    search->is_found = true;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            search_slots(search, info->dlpi_addr,
                         (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr));
    return 1;
}

int taskd_find_imports(const char *library, struct taskd_import *imports, size_t count)
{
    struct search search = {.library = library, .imports = imports, .count = count};
    for (size_t k = 0; k < count; k++)
        imports[k].slot = NULL;
    dl_iterate_phdr(visit, &search);
    return search.is_found ? 0 : -ENOENT;
}

/* How the page is mapped now, or -1. Asked of the kernel and not of the library's headers: somebody
 * else who redirects imports may have made it writable for good, and relies on that. */
static int protection_of(uintptr_t page)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL)
        return -1;
    int protection = -1;
    uintptr_t first;
    uintptr_t behind;
    char flags[5];
    while (protection < 0 &&
           fscanf(maps, "%" SCNxPTR "-%" SCNxPTR " %4s%*[^\n]", &first, &behind, flags) == 3)
        if (first <= page && page < behind)
            protection = (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) |
                         (flags[2] == 'x' ? PROT_EXEC : 0);
    fclose(maps);
    return protection;
}

static int redirect(const struct taskd_import *import, void *replacement)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t page = (uintptr_t)import->slot & ~((uintptr_t)page_bytes - 1);
    int before = protection_of(page);
    bool is_writable = before >= 0 && (before & PROT_WRITE) != 0;
    if (!is_writable && mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE) != 0)
        return -errno;
    __atomic_store_n(import->slot, replacement, __ATOMIC_RELEASE); /* threads may be calling it */
    if (!is_writable && before >= 0)
        mprotect((void *)page, page_bytes,
                 before); /* failing leaves it writable, which harms nothing */
    return 0;
}

int taskd_redirect_import(const struct taskd_import *import, void *replacement)
{
    /* One at a time: another thread's slot may lie in the same page, and would be read-only again
     * before it is written. */
    static pthread_mutex_t redirecting = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&redirecting);
    int result = redirect(import, replacement);
    pthread_mutex_unlock(&redirecting);
    return result;
}
