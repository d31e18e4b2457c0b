/* Descriptors that the library keeps for itself in somebody else's process.
 * Private, defined in descriptor.c. */
#ifndef TASKD_DESCRIPTOR_H
#define TASKD_DESCRIPTOR_H

#include <stdbool.h>
#include <sys/types.h>

struct taskd_descriptor {
    int fd; /* -1: none */
    dev_t device;
    ino_t inode;
};

/* Duplicates `fd`: the caller may close its own. Not 0 to 2, which belong to the program, open or
 * not; not inherited by execve(). 0, or -errno and no descriptor. */
int taskd_duplicate(struct taskd_descriptor *made, int fd);

/* Whether the number still stands for the same file: a program may close descriptors that it does
 * not know, and open others. Safe in signal handlers. */
bool taskd_is_intact(const struct taskd_descriptor *descriptor);

#endif
