/* Names of peers without a name server.
 *
 * c10d describes each connection of a TCPStore client by the peer's name, for log lines, and asks
 * getnameinfo() for it. Where no resolver answers, that takes as long as the resolver's timeouts,
 * 10 s and more.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "../include/taskd.h"
#include "imports.h"

#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <stdatomic.h>

typedef int getnameinfo_function(const struct sockaddr *, socklen_t, char *, socklen_t, char *,
                                 socklen_t, int);

static _Atomic(getnameinfo_function *) original;

static int numeric(const struct sockaddr *address, socklen_t address_bytes, char *host,
                   socklen_t host_bytes, char *service, socklen_t service_bytes, int flags)
{
    /* Who insists on a name means it: numbers would be an error (EAI_NONAME). */
    if ((flags & NI_NAMEREQD) == 0)
        flags |= NI_NUMERICHOST | NI_NUMERICSERV;
    return atomic_load(&original)(address, address_bytes, host, host_bytes, service, service_bytes,
                                  flags);
}

int taskd_names_numeric(const char *library)
{
    struct taskd_import import = {.name = "getnameinfo"};
    int result = taskd_find_imports(library, &import, 1);
    if (result != 0)
        return result;
    getnameinfo_function *found = (getnameinfo_function *)dlsym(RTLD_DEFAULT, import.name);
    if (import.slot == NULL || found == NULL)
        return -ENOSYS;
    atomic_store(&original, found);
    return taskd_redirect_import(&import, (void *)numeric);
}
