/* Copies with checksum: any length and alignment, nothing outside is touched, and every change
 * shows. */
#define _GNU_SOURCE
#include "check.h"

enum { LONGEST = 300, ROOM = 64 + LONGEST + 64 };

static uint64_t state = 88172645463325252u;

static unsigned char random_byte(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned char)(state >> 24);
}

static void any_length_and_alignment(void)
{
    unsigned char source[ROOM], target[ROOM];
    for (size_t count = 0; count <= LONGEST; count++) {
        size_t from = count % 17, to = count * 7 % 19;
        for (size_t i = 0; i < ROOM; i++) {
            source[i] = random_byte();
            target[i] = 0xA5;
        }
        uint64_t sum = taskd_copy_checksummed(target + to, source + from, count);
        CHECK(memcmp(target + to, source + from, count) == 0);
        for (size_t i = 0; i < ROOM; i++)
            CHECK((i >= to && i < to + count) || target[i] == 0xA5);
        CHECK(sum == taskd_checksum(source + from, count));
        CHECK(sum == taskd_checksum(target + to, count));
        CHECK(sum != taskd_checksum(source + from, count + 1));
    }
    CHECK(taskd_copy_checksummed(NULL, NULL, 0) == taskd_checksum(NULL, 0));
}

static void every_flipped_bit_shows(void)
{
    unsigned char bytes[LONGEST];
    for (size_t i = 0; i < LONGEST; i++)
        bytes[i] = random_byte();
    uint64_t sum = taskd_checksum(bytes, LONGEST);
    for (size_t bit = 0; bit < LONGEST * 8; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        CHECK(taskd_checksum(bytes, LONGEST) != sum);
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    CHECK(taskd_checksum(bytes, LONGEST) == sum);
}

/* Numbers and their negatives, small counters: words that differ in few bits, at every distance. */
static void every_exchange_of_two_words_shows(void)
{
    enum { WORDS = 96 };
    uint64_t words[WORDS];
    for (size_t kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < WORDS; i++) {
            uint64_t one = 0x3FF0000000000000u;
            words[i] = kind == 0   ? i
                       : kind == 1 ? one ^ (uint64_t)(i % 2) << 63
                                   : (uint64_t)1 << i % 64;
        }
        uint64_t sum = taskd_checksum(words, sizeof words);
        for (size_t i = 0; i < WORDS; i++) {
            for (size_t j = i + 1; j < WORDS; j++) {
                uint64_t kept = words[i];
                if (kept == words[j])
                    continue;
                words[i] = words[j];
                words[j] = kept;
                CHECK(taskd_checksum(words, sizeof words) != sum);
                words[j] = words[i];
                words[i] = kept;
            }
        }
    }
}

static void zeros_of_different_lengths_differ(void)
{
    static const unsigned char zeros[LONGEST];
    uint64_t sums[LONGEST];
    for (size_t i = 0; i < LONGEST; i++) {
        sums[i] = taskd_checksum(zeros, i);
        for (size_t j = 0; j < i; j++)
            CHECK(sums[i] != sums[j]);
    }
}

int main(void)
{
    any_length_and_alignment();
    every_flipped_bit_shows();
    every_exchange_of_two_words_shows();
    zeros_of_different_lengths_differ();
    return 0;
}
