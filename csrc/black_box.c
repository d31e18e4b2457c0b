/* Mapping black boxes, and the clock of their time stamps. */
#define _GNU_SOURCE /* MADV_DONTFORK */
#include "black_box.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void *taskd_map_part(int box_fd, off_t offset, size_t bytes, int *error)
{
    struct stat status;
    if (fstat(box_fd, &status) != 0) {
        *error = -errno;
        return NULL;
    }
    if (status.st_size < TASKD_BOX_BYTES) { /* touching a page behind the end raises SIGBUS */
        *error = -EINVAL;
        return NULL;
    }
    /* Pages may be larger than 4 KiB: then the mapping begins before the part. */
    size_t before = (size_t)(offset % sysconf(_SC_PAGESIZE));
    size_t length = before + bytes;
    char *mapped =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, box_fd, offset - (off_t)before);
    if (mapped == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    if (madvise(mapped, length, MADV_DONTFORK) != 0) {
        *error = -errno;
        munmap(mapped, length);
        return NULL;
    }
    return mapped + before;
}

struct taskd_box_header *taskd_map_header(int box_fd, int *error)
{
    struct taskd_box_header *header = taskd_map_part(box_fd, 0, TASKD_HEADER_BYTES, error);
    if (header != NULL &&
        (header->magic != TASKD_BOX_MAGIC || header->layout_version != TASKD_BOX_LAYOUT_VERSION)) {
        taskd_unmap_header(header);
        *error = -EINVAL;
        return NULL;
    }
    return header;
}

void taskd_unmap_header(struct taskd_box_header *header)
{
    munmap(header, TASKD_HEADER_BYTES);
}

int64_t taskd_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
