/* Descriptors of the library's own, each with the identity of the file that it was opened for. */
#define _GNU_SOURCE /* F_DUPFD_CLOEXEC */
#include "descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

int taskd_duplicate(struct taskd_descriptor *made, int fd)
{
    struct stat status;
    made->fd = -1;
    if (fstat(fd, &status) != 0)
        return -errno;
    made->device = status.st_dev;
    made->inode = status.st_ino;
    made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return made->fd < 0 ? -errno : 0;
}

bool taskd_is_intact(const struct taskd_descriptor *descriptor)
{
    struct stat status;
    return fstat(descriptor->fd, &status) == 0 && status.st_dev == descriptor->device &&
           status.st_ino == descriptor->inode;
}
