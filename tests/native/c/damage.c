/* A worker that writes anything into its box: the watches in the agent must neither ring, nor spin,
 * nor stay for ever. */
#define _GNU_SOURCE
#include "check.h"

#include <linux/futex.h>
#include <time.h>

static pid_t start_guarded(int box)
{
    int facts[2];
    CHECK(pipe2(facts, O_CLOEXEC) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(taskd_guard_start(box, -1) == 0);
        say_byte(facts[1], 'g');
        for (;;)
            pause();
    }
    expect_byte(facts[0], 'g');
    close(facts[0]), close(facts[1]);
    return pid;
}

/* All watches that write to the other end of `fd` have ended, and none had anything to say. */
static void expect_silent_end(int fd)
{
    char byte;
    CHECK(is_readable(fd, DEADLINE_MS));
    CHECK(read(fd, &byte, 1) == 0);
    close(fd);
}

static uint32_t *word_at(struct taskd_box_header *header, size_t offset)
{
    return (uint32_t *)((char *)header + offset);
}

static const size_t places[] = {
    offsetof(struct taskd_box_header, magic),
    offsetof(struct taskd_box_header, guard_state),
    offsetof(struct taskd_box_header, guard_tid),
    offsetof(struct taskd_box_header, owner_word),
};
static const uint32_t values[] = {
    0,
    1,
    3,
    4,
    77,
    0x7fffffff,
    0x80000000,
    0x80000001,
    0xffffffff,
    FUTEX_OWNER_DIED | 5,
    FUTEX_OWNER_DIED | FUTEX_WAITERS | 5,
};

/* The damage is there before the watch comes. */
static void test_damaged_before(void)
{
    for (size_t p = 1; p < sizeof places / sizeof *places; p++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            int ends[2];
            int box = new_box();
            struct taskd_box_header *header = see_box(box);
            CHECK(pipe2(ends, O_CLOEXEC) == 0);
            header->guard_tid = header->owner_word = 1234;
            header->guard_state = TASKD_GUARD_HELD;
            *word_at(header, places[p]) = values[v];
            CHECK(taskd_watch(box, 1, ends[1]) == 0);
            CHECK(taskd_unwatch(box) == 0);
            close(ends[1]);
            expect_silent_end(ends[0]);
            munmap(header, TASKD_HEADER_BYTES);
            close(box);
        }
    }
}

/* The damage comes while the watch sleeps, and then the worker dies: the kernel may find its mark
 * or not. */
static void test_damaged_while_watched(void)
{
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v += 3) {
            int ends[2];
            int box = new_box();
            struct taskd_box_header *header = see_box(box);
            CHECK(pipe2(ends, O_CLOEXEC) == 0);
            pid_t pid = start_guarded(box);
            CHECK(taskd_watch(box, 1, ends[1]) == 0);
            close(ends[1]);
            while ((__atomic_load_n(&header->owner_word, __ATOMIC_ACQUIRE) & FUTEX_WAITERS) == 0)
                poll(NULL, 0, 1);
            __atomic_store_n(word_at(header, places[p]), values[v], __ATOMIC_RELEASE);
            CHECK(!is_readable(ends[0], 0));
            kill(pid, SIGKILL);
            CHECK(ended_with(pid) == -SIGKILL);
            CHECK(taskd_unwatch(box) == 0);
            expect_silent_end(ends[0]);
            munmap(header, TASKD_HEADER_BYTES);
            close(box);
        }
    }
}

static uint64_t random_state = 20240607;

static uint64_t random_number(void) /* xorshift64: the same bytes in every run */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Random bytes in random places under watches that come and go; after that the box is whole again,
 * and they ring. */
static void test_random_damage(void)
{
    enum { ROUNDS = 300 };
    static unsigned char rung[ROUNDS];
    int ends[2];
    int box = new_box();
    struct taskd_box_header *header = see_box(box);
    struct taskd_box_header whole;
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    pid_t pid = start_guarded(box);
    memcpy(&whole, header, sizeof whole);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        size_t from = random_number() % 96;
        size_t to = from + 1 + random_number() % (sizeof whole - from);
        CHECK(taskd_watch(box, round, ends[1]) == 0);
        for (size_t i = from; i < to; i++)
            ((unsigned char *)header)[i] = (unsigned char)random_number();
        CHECK(taskd_unwatch(box) == 0); /* wakes the sleepers in the middle of it */
        CHECK(!is_readable(ends[0], 0));
        memcpy(header, &whole, sizeof whole);
    }
    CHECK(!is_readable(ends[0], 50));
    kill(pid, SIGKILL);
    CHECK(ended_with(pid) == -SIGKILL);
    CHECK(taskd_unwatch(box) ==
          0); /* the mark of those who slept was overwritten: nobody else would wake them */
    close(ends[1]);
    struct taskd_death death;
    while (is_readable(ends[0], DEADLINE_MS) && read(ends[0], &death, sizeof death) == sizeof death)
        CHECK(death.token < ROUNDS && rung[death.token]++ == 0);
    close(ends[0]);
    close(box);
}

/* Somebody writes to the word all the time: the watch must not compute all the time. */
static void test_a_word_that_never_rests(void)
{
    int ends[2];
    int box = new_box();
    struct taskd_box_header *header = see_box(box);
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    header->guard_tid = header->owner_word = 1234;
    header->guard_state = TASKD_GUARD_HELD;
    pid_t pid = fork();
    if (pid == 0) {
        for (uint32_t i = 0;; i++) {
            __atomic_store_n(&header->owner_word, 1234 | (i & 1 ? FUTEX_WAITERS : 0),
                             __ATOMIC_RELAXED);
        }
    }
    CHECK(taskd_watch(box, 1, ends[1]) == 0);
    struct timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    CHECK(!is_readable(ends[0], 500));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double used_s =
        (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    CHECK(used_s < 0.25);
    kill(pid, SIGKILL);
    CHECK(ended_with(pid) == -SIGKILL);
    header->owner_word = 0;
    CHECK(taskd_unwatch(box) == 0);
    close(ends[1]);
    expect_silent_end(ends[0]);
    close(box);
}

static void test_a_box_cannot_be_cut(void)
{
    int box = new_box();
    CHECK(ftruncate(box, 4096) == -1 && errno == EPERM);
    close(box);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    test_damaged_before();
    test_damaged_while_watched();
    test_random_damage();
    test_a_word_that_never_rests();
    test_a_box_cannot_be_cut();
    return 0;
}
