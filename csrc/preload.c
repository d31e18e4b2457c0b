/* TEMPORARY definition, to be replaced by the real csrc/preload.c. */
#include "include/taskd.h"

#include <stdlib.h>
#include <string.h>

int taskd_is_preloaded(void)
{
    const char *preloaded = getenv("LD_PRELOAD");
    return preloaded != NULL && strstr(preloaded, "libtaskd.so") != NULL;
}
