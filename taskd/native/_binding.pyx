# cython: language_level=3
"""libtaskd as Python functions: converts types and turns a negative errno into NativeLibraryError. No policy."""

import os

from libc.stdint cimport uint64_t

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
