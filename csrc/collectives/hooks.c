/* The table of hooked functions: what is known of each without its code. */
#include "hooks.h"

const struct taskd_hook taskd_hooks[HOOK_COUNT] = {
#define HOOK_CALL(family, kind, name, ...) [HOOK_##name] = {#name, family, kind},
#define HOOK_INIT(family, name, ...) [HOOK_##name] = {#name, family, INIT},
#define HOOK_SPLIT(family, name, ...) [HOOK_##name] = {#name, family, SPLIT},
#include "hooks.def"
};
