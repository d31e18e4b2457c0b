# Mirrors csrc/include/taskd.h one to one.
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "taskd.h" nogil:
    const int TASKD_ABI_VERSION

    int taskd_abi_version() noexcept
    int64_t taskd_layout_value(const char *name) noexcept
    int taskd_guard_start(int box_fd, int life_fd) noexcept
    int taskd_watch(int box_fd, uint64_t token, int pipe_fd) noexcept
    int taskd_unwatch(int box_fd) noexcept
    int taskd_prefer_soon() noexcept
    int taskd_waits_hook(const char *library) noexcept
    int taskd_waits_expire(const int32_t *tids, int count) noexcept
    int taskd_waits_forgive(const int32_t *tids, int count) noexcept
    int taskd_is_preloaded() noexcept
    int taskd_last_words_start(int box_fd, int stacks_signal) noexcept
    int taskd_last_words_python(int all_threads_signal, int one_thread_signal) noexcept
    int taskd_collectives_start(int box_fd) noexcept
    int taskd_collectives_reset() noexcept
    int taskd_collectives_see(uint64_t id, const char *name, int64_t entered, int64_t left) noexcept
    int taskd_collectives_add(
        uint64_t id,
        const char *name,
        int64_t number,
        int64_t bytes,
        int64_t enter_ns,
        int64_t leave_ns,
    ) noexcept
    int taskd_collectives_forget(uint64_t id) noexcept
    int taskd_names_numeric(const char *library) noexcept
    uint64_t taskd_copy_checksummed(void *destination, const void *source, size_t count) noexcept
    uint64_t taskd_checksum(const void *source, size_t count) noexcept
