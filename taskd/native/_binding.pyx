# cython: language_level=3
"""libtaskd as Python functions: converts types, raises NativeLibraryError for a negative errno.

No policy.
"""

import os

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from taskd.native cimport _libtaskd as c

from taskd.errors import NativeLibraryError

BUILT_FOR_ABI = c.TASKD_ABI_VERSION


cdef _check(str function, int result):
    if result < 0:
        raise NativeLibraryError(f"{function} failed: {os.strerror(-result)} (errno {-result})")


def abi_version():
    return c.taskd_abi_version()


def layout_value(str name not None):
    return c.taskd_layout_value(name.encode())


def guard_start(int box_fd, int life_fd):
    cdef int result
    with nogil:
        result = c.taskd_guard_start(box_fd, life_fd)
    _check("taskd_guard_start", result)


def watch(int box_fd, uint64_t token, int pipe_fd):
    cdef int result
    with nogil:
        result = c.taskd_watch(box_fd, token, pipe_fd)
    _check("taskd_watch", result)


def unwatch(int box_fd):
    cdef int result
    with nogil:
        result = c.taskd_unwatch(box_fd)
    _check("taskd_unwatch", result)


def prefer_soon():
    _check("taskd_prefer_soon", c.taskd_prefer_soon())


def waits_hook(str library not None):
    _check("taskd_waits_hook", c.taskd_waits_hook(library.encode()))


cdef int32_t *_numbers(list tids) except NULL:
    cdef int32_t *numbers = <int32_t *>malloc((len(tids) + 1) * sizeof(int32_t))
    if numbers == NULL:
        raise MemoryError
    for index, tid in enumerate(tids):
        numbers[index] = tid
    return numbers


def waits_expire(list tids not None):
    cdef int32_t *numbers = _numbers(tids)
    cdef int count = len(tids)
    cdef int woken
    with nogil:
        woken = c.taskd_waits_expire(numbers, count)
    free(numbers)
    return woken


def waits_forgive(list tids not None):
    cdef int32_t *numbers = _numbers(tids)
    c.taskd_waits_forgive(numbers, len(tids))
    free(numbers)


def is_preloaded():
    return c.taskd_is_preloaded() == 1


def last_words_start(int box_fd, int stacks_signal):
    cdef int result
    with nogil:
        result = c.taskd_last_words_start(box_fd, stacks_signal)
    _check("taskd_last_words_start", result)
    return result


def last_words_python(int all_threads_signal, int one_thread_signal):
    _check(
        "taskd_last_words_python",
        c.taskd_last_words_python(all_threads_signal, one_thread_signal),
    )


def collectives_start(int box_fd):
    _check("taskd_collectives_start", c.taskd_collectives_start(box_fd))


def collectives_reset():
    _check("taskd_collectives_reset", c.taskd_collectives_reset())


def collectives_see(uint64_t communicator, str name not None, int64_t entered, int64_t left):
    _check(
        "taskd_collectives_see",
        c.taskd_collectives_see(communicator, name.encode(), entered, left),
    )


def collectives_add(
    uint64_t communicator,
    str name not None,
    int64_t number,
    int64_t size,
    int64_t enter_ns,
    int64_t leave_ns,
):
    _check(
        "taskd_collectives_add",
        c.taskd_collectives_add(communicator, name.encode(), number, size, enter_ns, leave_ns),
    )


def collectives_forget(uint64_t communicator):
    _check("taskd_collectives_forget", c.taskd_collectives_forget(communicator))


def names_numeric(str library not None):
    _check("taskd_names_numeric", c.taskd_names_numeric(library.encode()))


def copy_checksummed(uintptr_t destination, uintptr_t source, size_t count):
    cdef uint64_t result
    with nogil:
        result = c.taskd_copy_checksummed(<void *>destination, <const void *>source, count)
    return result


def checksum(uintptr_t source, size_t count):
    cdef uint64_t result
    with nogil:
        result = c.taskd_checksum(<const void *>source, count)
    return result
