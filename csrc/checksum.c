/* Copying memory and knowing afterwards what was copied: a checksum of 64 bits in the same pass.
 *
 * Eight lanes take every eighth word each. A lane is h = (rotate(h) ^ word) * odd: one-to-one in h and in the word, so that a single
 * wrong word always shows. The rotation brings high bits down: without it two words that differ in their top bit alone (a number and
 * its negative) could change places unseen. One multiplication per word runs at twice the speed of memory, so nothing here is written for one
 * processor; and the loop as a whole is no slower than memcpy, because it reads and writes where memcpy does.
 *
 * It finds damage, not forgery.
 */
#include "internal.h"

#include <string.h>

#define LANES 8
#define BLOCK_BYTES (LANES * sizeof(uint64_t))
#define MULTIPLIER 0x9E3779B97F4A7C15u /* odd, about half of its bits set: 2^64 divided by the golden ratio */

static inline uint64_t mixed(uint64_t hash, uint64_t word)
{
    return ((hash << 29 | hash >> 35) ^ word) * MULTIPLIER;
}

static inline void begin(uint64_t lanes[LANES])
{
    for (unsigned lane = 0; lane < LANES; lane++) {
        lanes[lane] = (lane + 1) * MULTIPLIER; /* each its own: words that change lanes show */
    }
}

static inline void take(uint64_t lanes[LANES], const uint64_t words[LANES])
{
    for (unsigned lane = 0; lane < LANES; lane++) {
        lanes[lane] = mixed(lanes[lane], words[lane]);
    }
}

/* What is left behind the last whole block, filled up with zeros: the length tells them from data. */
static uint64_t finish(uint64_t lanes[LANES], const unsigned char *rest, size_t rest_bytes, size_t total_bytes)
{
    if (rest_bytes != 0) {
        uint64_t words[LANES] = {0};
        memcpy(words, rest, rest_bytes);
        take(lanes, words);
    }
    uint64_t hash = total_bytes;
    for (unsigned lane = 0; lane < LANES; lane++) {
        hash = mixed(hash, lanes[lane]);
    }
    return hash ^ hash >> 32;
}

uint64_t taskd_checksum(const void *source, size_t count)
{
    const unsigned char *from = source;
    uint64_t lanes[LANES];
    begin(lanes);
    atomic_thread_fence(memory_order_seq_cst);
    size_t whole = count - count % BLOCK_BYTES;
    for (size_t at = 0; at < whole; at += BLOCK_BYTES) {
        uint64_t words[LANES];
        memcpy(words, from + at, BLOCK_BYTES);
        take(lanes, words);
    }
    uint64_t result = finish(lanes, from + whole, count - whole, count);
    atomic_thread_fence(memory_order_seq_cst);
    return result;
}

uint64_t taskd_copy_checksummed(void *destination, const void *source, size_t count)
{
    const unsigned char *from = source;
    unsigned char *to = destination;
    uint64_t lanes[LANES];
    begin(lanes);
    atomic_thread_fence(memory_order_seq_cst);
    size_t whole = count - count % BLOCK_BYTES;
    for (size_t at = 0; at < whole; at += BLOCK_BYTES) {
        uint64_t words[LANES]; /* read once: the checksum is that of what was written, even if somebody writes to the source */
        memcpy(words, from + at, BLOCK_BYTES);
        memcpy(to + at, words, BLOCK_BYTES);
        take(lanes, words);
    }
    if (count != whole) {
        memcpy(to + whole, from + whole, count - whole);
    }
    uint64_t result = finish(lanes, to + whole, count - whole, count);
    atomic_thread_fence(memory_order_seq_cst);
    return result;
}
