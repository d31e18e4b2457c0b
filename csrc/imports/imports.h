/* Redirecting the imports of a loaded library. Private, defined in imports.c. */
#ifndef TASKD_IMPORTS_H
#define TASKD_IMPORTS_H

#include <stddef.h>

/* One function that a loaded library imports, and the place that holds the address which it calls;
 * NULL: it does not import it. */
struct taskd_import {
    const char *name;
    void **slot;
};

/* Fills the slots of `imports`, whose names are given. 0, or -ENOENT: `library` ("libtorch_cpu.so")
 * is not loaded. */
int taskd_find_imports(const char *library, struct taskd_import *imports, size_t count);

/* Lets the library call `replacement` from now on; the protection of the page stays what it was. 0
 * or -errno. The slot is not NULL. */
int taskd_redirect_import(const struct taskd_import *import, void *replacement);

#endif
