# Mirrors csrc/include/taskd.h one to one.
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "taskd.h" nogil:
    const int TASKD_ABI_VERSION

    int taskd_abi_version() noexcept
    int64_t taskd_layout_value(const char *name) noexcept
    int taskd_guard_start(int box_fd, int life_fd) noexcept
    int taskd_watch(int box_fd, uint64_t token, int pipe_fd) noexcept
    int taskd_unwatch(int box_fd) noexcept
    int taskd_waits_hook(const char *library) noexcept
    int taskd_waits_expire(const int32_t *tids, int count) noexcept
    int taskd_waits_forgive(const int32_t *tids, int count) noexcept
    int taskd_is_preloaded() noexcept
    int taskd_last_words_start(int box_fd, int stacks_signal) noexcept
