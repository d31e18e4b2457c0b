/* The numbers of the layout by name, and the proof that the structs have the offsets that taskd.h
 * writes beside their members. */
#include "include/taskd.h"

#include <stddef.h>
#include <string.h>

#define HEADER(field) offsetof(struct taskd_box_header, field)
#define SLOT(field) offsetof(struct taskd_slot_header, field)
#define WORDS(field) (HEADER(last_words) + offsetof(struct taskd_last_words, field))
#define COMMUNICATOR(field) offsetof(struct taskd_communicator, field)
#define CALL(field) offsetof(struct taskd_call, field)

#define PROVE(fact) _Static_assert(fact, #fact)

PROVE(sizeof(struct taskd_box_header) == TASKD_HEADER_BYTES);
PROVE(HEADER(guard_state) == 12 && HEADER(alive_ns) == 16 && HEADER(guard_tid) == 24);
PROVE(HEADER(owner_word) == 64 && HEADER(pid) == 128 && HEADER(version) == 152);
PROVE(HEADER(committed) == 160 && HEADER(progress_ns) == 184 && HEADER(phase_ns) == 256);
PROVE(HEADER(last_words) == 512 && sizeof(struct taskd_last_words) == TASKD_LAST_WORDS_BYTES);
PROVE(sizeof(struct taskd_communicator) == 64 && sizeof(struct taskd_call) == 96);
PROVE(offsetof(struct taskd_collectives, calls) == 4160 && sizeof(struct taskd_death) == 24);
PROVE(sizeof(struct taskd_slot_header) == TASKD_SLOT_HEADER_BYTES); /* payloads are aligned */

/* Areas follow each other without overlap. */
#define EXTRAS_END (TASKD_EXTRAS_OFFSET + TASKD_EXTRAS_SLOTS * TASKD_EXTRAS_BYTES)
#define COMMON_END (TASKD_COMMON_OFFSET + TASKD_COMMON_SLOTS * TASKD_COMMON_BYTES)
PROVE(TASKD_LAYOUT_OFFSET + TASKD_LAYOUT_BYTES == TASKD_EXTRAS_OFFSET);
PROVE(EXTRAS_END == TASKD_COMMON_OFFSET && COMMON_END == TASKD_COLLECTIVES_OFFSET);
PROVE(TASKD_COMMON_SLOTS > TASKD_EXTRAS_SLOTS); /* one is always free */
PROVE(sizeof(struct taskd_collectives) <= TASKD_COLLECTIVES_BYTES);
PROVE(TASKD_COLLECTIVES_OFFSET + TASKD_COLLECTIVES_BYTES <= TASKD_TEXT_OFFSET);
PROVE(TASKD_COLLECTIVES_OFFSET % 4096 == 0 && TASKD_TEXT_OFFSET % 4096 == 0); /* mapped alone */
PROVE(TASKD_TEXT_OFFSET + TASKD_TEXT_BYTES == TASKD_BOX_BYTES); /* a text too long just fails */

static const struct {
    const char *name;
    int64_t value;
} values[] = {
    {"magic", TASKD_BOX_MAGIC},
    {"layout_version", TASKD_BOX_LAYOUT_VERSION},
    {"box_bytes", TASKD_BOX_BYTES},
    {"layout_offset", TASKD_LAYOUT_OFFSET},
    {"layout_bytes", TASKD_LAYOUT_BYTES},
    {"extras_offset", TASKD_EXTRAS_OFFSET},
    {"extras_bytes", TASKD_EXTRAS_BYTES},
    {"extras_slots", TASKD_EXTRAS_SLOTS},
    {"common_offset", TASKD_COMMON_OFFSET},
    {"common_bytes", TASKD_COMMON_BYTES},
    {"common_slots", TASKD_COMMON_SLOTS},
    {"slot_header_bytes", TASKD_SLOT_HEADER_BYTES},
    {"offset_magic", HEADER(magic)},
    {"offset_layout_version", HEADER(layout_version)},
    {"offset_guard_state", HEADER(guard_state)},
    {"offset_alive_ns", HEADER(alive_ns)},
    {"offset_pid", HEADER(pid)},
    {"offset_incarnation", HEADER(incarnation)},
    {"offset_phase", HEADER(phase)},
    {"offset_version", HEADER(version)},
    {"offset_committed", HEADER(committed)},
    {"offset_generation", HEADER(generation)},
    {"offset_progress", HEADER(progress)},
    {"offset_progress_ns", HEADER(progress_ns)},
    {"offset_python_ns", HEADER(python_ns)},
    {"offset_waiting", HEADER(waiting)},
    {"offset_slowest_ns", HEADER(slowest_ns)},
    {"offset_slowest_long_ns", HEADER(slowest_long_ns)},
    {"offset_phase_ns", HEADER(phase_ns)},
    {"offset_phase_count", HEADER(phase_count)},
    {"phases", TASKD_PHASES},
    {"words_offset_state", WORDS(state)},
    {"words_offset_kind", WORDS(kind)},
    {"words_offset_number", WORDS(number)},
    {"words_offset_code", WORDS(code)},
    {"words_offset_address", WORDS(address)},
    {"words_offset_tid", WORDS(tid)},
    {"words_offset_monotonic_ns", WORDS(monotonic_ns)},
    {"words_offset_text_bytes", WORDS(text_bytes)},
    {"words_offset_requested", WORDS(requested)},
    {"words_offset_frame_count", WORDS(frame_count)},
    {"words_offset_frames", WORDS(frames)},
    {"words_offset_thread", WORDS(thread)},
    {"words_offset_detail", WORDS(detail)},
    {"words_offset_stacks_signal", WORDS(stacks_signal)},
    {"words_offset_stay", WORDS(stay)},
    {"last_words_bytes", TASKD_LAST_WORDS_BYTES},
    {"text_offset", TASKD_TEXT_OFFSET},
    {"text_bytes", TASKD_TEXT_BYTES},
    {"frames", TASKD_FRAMES},
    {"collectives_offset", TASKD_COLLECTIVES_OFFSET},
    {"collectives_bytes", TASKD_COLLECTIVES_BYTES},
    {"communicators", TASKD_COMMUNICATORS},
    {"communicators_offset", offsetof(struct taskd_collectives, communicators)},
    {"communicator_bytes", sizeof(struct taskd_communicator)},
    {"communicator_offset_entered", COMMUNICATOR(entered)},
    {"communicator_offset_left", COMMUNICATOR(left)},
    {"communicator_offset_name", COMMUNICATOR(name)},
    {"calls", TASKD_CALLS},
    {"calls_offset", offsetof(struct taskd_collectives, calls)},
    {"call_bytes", sizeof(struct taskd_call)},
    {"call_offset_name", CALL(name)},
    {"name_bytes", TASKD_NAME_BYTES},
    {"slot_offset_complete", SLOT(complete)},
    {"slot_offset_version", SLOT(version)},
    {"slot_offset_length", SLOT(length)},
    {"slot_offset_checksum", SLOT(checksum)},
    {"slot_offset_common", SLOT(common)},
    {"slot_offset_common_checksum", SLOT(common_checksum)},
    {"guard_held", TASKD_GUARD_HELD},
    {"death_bytes", sizeof(struct taskd_death)},
};

int taskd_abi_version(void)
{
    return TASKD_ABI_VERSION;
}

int64_t taskd_layout_value(const char *name)
{
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        if (strcmp(values[i].name, name) == 0)
            return values[i].value;
    return -1;
}
