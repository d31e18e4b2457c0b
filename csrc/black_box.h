/* Black boxes as the library sees them: mapping one, its atomic words, the clock of its time
 * stamps. Private, defined in black_box.c. */
#ifndef TASKD_BLACK_BOX_H
#define TASKD_BLACK_BOX_H

#include "include/taskd.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

/* A word of a box, for atomic access. The public header declares plain integers, because C++ reads
 * it too; C11 atomics of their size have the same representation. */
#define TASKD_ATOMIC(word) ((_Atomic __typeof__(word) *)&(word))
_Static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "a futex word");
_Static_assert(sizeof(_Atomic uint64_t) == sizeof(uint64_t), "a time stamp");

/* A shared view of a part of the file `box_fd`, which forked children do not inherit. NULL and
 * *error = -errno if the file is too short for a black box. Its content is not looked at. */
void *taskd_map_part(int box_fd, off_t offset, size_t bytes, int *error);

/* The same of the header page; also refuses what does not begin like a black box. */
struct taskd_box_header *taskd_map_header(int box_fd, int *error);
void taskd_unmap_header(struct taskd_box_header *header);

/* CLOCK_MONOTONIC. Safe in signal handlers. */
int64_t taskd_monotonic_ns(void);

#endif
