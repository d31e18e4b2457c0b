/* What the C tests share: a check that ends the program, boxes, children, and waiting for facts
 * with a deadline. */
#ifndef TASKD_TEST_CHECK_H
#define TASKD_TEST_CHECK_H

#include "taskd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEADLINE_MS                                                                                \
    60000 /* for facts that take milliseconds: valgrind on a busy machine is no failure */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s (errno %d)\n", __FILE__, __LINE__, #condition,    \
                    errno);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static inline int new_box(void)
{
    uint64_t magic = TASKD_BOX_MAGIC;
    uint32_t version = TASKD_BOX_LAYOUT_VERSION;
    int fd = memfd_create("taskd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0);
    CHECK(ftruncate(fd, TASKD_BOX_BYTES) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    CHECK(pwrite(fd, &magic, sizeof magic, 0) == sizeof magic);
    CHECK(pwrite(fd, &version, sizeof version, 8) == sizeof version);
    return fd;
}

static inline struct taskd_box_header *see_box(int fd)
{
    void *header = mmap(NULL, TASKD_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(header != MAP_FAILED);
    return header;
}

/* Whether something can be read, or (with the same answer) the other end is closed. */
static inline int is_readable(int fd, int timeout_ms)
{
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    int count;
    while ((count = poll(&poller, 1, timeout_ms)) < 0 && errno == EINTR) {
    }
    return count == 1;
}

/* One byte from a child that has come to a certain point. */
static inline void expect_byte(int fd, char wanted)
{
    char byte = 0;
    CHECK(is_readable(fd, DEADLINE_MS));
    CHECK(read(fd, &byte, 1) == 1);
    CHECK(byte == wanted);
}

static inline void say_byte(int fd, char byte)
{
    CHECK(write(fd, &byte, 1) == 1);
}

static inline int ended_with(pid_t pid)
{
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

#endif
