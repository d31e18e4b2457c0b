/* Copying memory and knowing afterwards what was copied: a checksum of 64 bits in the same pass.
 *
 * Eight lanes take every eighth word each. A lane is h = (rotate(h) ^ word) * odd: one-to-one in h
 * and in the word, so that a single wrong word always shows. The rotation brings high bits down:
 * without it two words that differ in their top bit alone (a number and its negative) could change
 * places unseen. One multiplication per word runs at twice the speed of memory, so nothing here is
 * written for one processor; and the loop as a whole is no slower than memcpy, because it reads and
 * writes where memcpy does.
 *
 * It finds damage, not forgery.
 */
#include "include/taskd.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#define LANES 8
#define BLOCK_BYTES (LANES * sizeof(uint64_t))
#define MULTIPLIER 0x9E3779B97F4A7C15u /* 2^64 over the golden ratio: odd, half of its bits set */

static inline uint64_t mixed(uint64_t hash, uint64_t word)
{
    return ((hash << 29 | hash >> 35) ^ word) * MULTIPLIER;
}

static inline void take(uint64_t lanes[LANES], const uint64_t words[LANES])
{
    for (unsigned lane = 0; lane < LANES; lane++)
        lanes[lane] = mixed(lanes[lane], words[lane]);
}

/* Each block is read once: the checksum is that of what was written, even if somebody writes to the
 * source meanwhile. Inlined for each value of `is_copy`. */
static inline __attribute__((always_inline)) uint64_t pass(unsigned char *to,
                                                           const unsigned char *from, size_t count,
                                                           bool is_copy)
{
    uint64_t lanes[LANES];
    uint64_t words[LANES];
    for (unsigned lane = 0; lane < LANES; lane++)
        lanes[lane] = (lane + 1) * MULTIPLIER; /* each its own: words that change lanes show */
    atomic_thread_fence(memory_order_seq_cst);
    size_t rest = count % BLOCK_BYTES;
    for (size_t at = 0; at < count - rest; at += BLOCK_BYTES) {
        memcpy(words, from + at, BLOCK_BYTES);
        if (is_copy)
            memcpy(to + at, words, BLOCK_BYTES);
        take(lanes, words);
    }
    if (rest != 0) { /* filled up with zeros: the length tells them from data */
        memset(words, 0, sizeof words);
        memcpy(words, from + count - rest, rest);
        if (is_copy)
            memcpy(to + count - rest, words, rest);
        take(lanes, words);
    }
    uint64_t hash = count;
    for (unsigned lane = 0; lane < LANES; lane++)
        hash = mixed(hash, lanes[lane]);
    atomic_thread_fence(memory_order_seq_cst);
    return hash ^ hash >> 32;
}

uint64_t taskd_checksum(const void *source, size_t count)
{
    return pass(NULL, source, count, false);
}

uint64_t taskd_copy_checksummed(void *destination, const void *source, size_t count)
{
    return pass(destination, source, count, true);
}
