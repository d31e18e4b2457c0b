/* The record of collectives through the C ABI: several writers, a reader that never sees two calls
 * mixed, children that write nothing. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WRITERS = 4, CALLS_EACH = 20000, GROUPS_EACH = 4 };

static struct taskd_collectives *area;
static _Atomic int running;

static struct taskd_collectives *see_area(int box)
{
    void *mapped = mmap(NULL, TASKD_COLLECTIVES_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, box,
                        TASKD_COLLECTIVES_OFFSET);
    CHECK(mapped != MAP_FAILED);
    return mapped;
}

static uint64_t load(const void *word, memory_order order)
{
    return atomic_load_explicit((_Atomic uint64_t *)word, order);
}

/* As another process reads: the mark, the words, and the mark again. 0: it was being written, or
 * holds nothing. */
static int read_call(size_t place, struct taskd_call *copy)
{
    uint64_t words[sizeof *copy / sizeof(uint64_t)];
    const uint64_t *entry = (const uint64_t *)&area->calls[place];
    words[0] = load(&entry[0], memory_order_acquire);
    for (size_t i = 1; i < sizeof words / sizeof words[0]; i++)
        words[i] = load(&entry[i], memory_order_relaxed);
    /* An acquire fence would do, but ThreadSanitizer does not know fences. Read-modify-write by
     * nothing is as strong. */
    uint64_t again =
        atomic_fetch_add_explicit((_Atomic uint64_t *)&entry[0], 0, memory_order_acq_rel);
    if (words[0] == 0 || words[0] % 2 != 0 || words[0] != again)
        return 0;
    memcpy(copy, words, sizeof *copy);
    return 1;
}

/* Every word of a call follows from its number, so that a mixture shows. */
static void *write_calls(void *argument)
{
    uint64_t writer = (uint64_t)(uintptr_t)argument;
    for (int64_t n = 1; n <= CALLS_EACH; n++) {
        uint64_t id = writer * 1000 + (uint64_t)(n % GROUPS_EACH) + 1;
        CHECK(taskd_collectives_see(id, "group", n, n - 1) == 0);
        CHECK(taskd_collectives_add(
                  id, writer % 2 ? "gloo:all_reduce" : "gloo:a_longer_name_than_fits_into_it", n,
                  n * 8, n * 3, n * 5) == 0);
    }
    atomic_fetch_sub(&running, 1);
    return NULL;
}

static void *forget_again_and_again(void *argument)
{
    while (atomic_load(&running) > 0) {
        CHECK(taskd_collectives_reset() == 0);
        poll(NULL, 0, 1);
    }
    return argument;
}

/* A child has no record, whatever the writers were doing when it was forked; it may start one of
 * its own. */
static void fork_a_child(void)
{
    uint64_t before = load(&area->next, memory_order_acquire);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(taskd_collectives_add(99999, "child", 1, 1, 1, 1) == -ENOENT);
        CHECK(taskd_collectives_see(99999, "child", 1, 1) == -ENOENT);
        CHECK(taskd_collectives_reset() == -ENOENT);
        int own = new_box();
        CHECK(taskd_collectives_start(own) == 0);
        CHECK(taskd_collectives_add(99999, "child", 1, 1, 1, 1) == 0);
        struct taskd_collectives *mine = see_area(own);
        CHECK(mine->next == 1 && mine->calls[0].mark == 2 && mine->calls[0].communicator == 99999);
        _exit(0);
    }
    CHECK(ended_with(pid) == 0);
    CHECK(load(&area->next, memory_order_acquire) >= before);
}

static int look_at_all(void)
{
    int seen = 0;
    for (size_t place = 0; place < TASKD_CALLS; place++) {
        struct taskd_call call;
        if (!read_call(place, &call))
            continue;
        uint64_t writer = call.communicator / 1000;
        CHECK((call.mark / 2 - 1) % TASKD_CALLS == place);
        CHECK(writer < WRITERS && call.number >= 1 && call.number <= CALLS_EACH);
        CHECK(call.communicator == writer * 1000 + (uint64_t)(call.number % GROUPS_EACH) + 1);
        CHECK(call.bytes == call.number * 8 && call.enter_ns == call.number * 3 &&
              call.leave_ns == call.number * 5);
        CHECK(call.dtype == -1 && call.peer == -1);
        CHECK(strncmp(call.name,
                      writer % 2 ? "gloo:all_reduce" : "gloo:a_longer_name_than_fits_into_it",
                      TASKD_NAME_BYTES - 1) == 0);
        CHECK(call.name[TASKD_NAME_BYTES - 1] == '\0');
        seen++;
    }
    return seen;
}

static void test_before_the_start_and_refusals(int box)
{
    int small = memfd_create("small", MFD_CLOEXEC);
    CHECK(taskd_collectives_reset() == -ENOENT);
    CHECK(taskd_collectives_see(1, "", 0, 0) == -ENOENT);
    CHECK(taskd_collectives_add(1, "", 0, 0, 0, 0) == -ENOENT);
    CHECK(taskd_collectives_forget(1) == -ENOENT);
    CHECK(taskd_collectives_start(-1) == -EBADF);
    CHECK(taskd_collectives_start(small) == -EINVAL);
    CHECK(taskd_collectives_start(box) == 0); /* one that was refused may try again */
    CHECK(taskd_collectives_start(box) == -EBUSY);
    CHECK(taskd_collectives_see(0, "", 0, 0) == -EINVAL);
    CHECK(taskd_collectives_forget(0) == -EINVAL);
    close(small);
}

static void test_the_table(void)
{
    for (uint64_t id = 1; id <= TASKD_COMMUNICATORS; id++)
        CHECK(taskd_collectives_see(id, "a name that is too long for its place", 3, 2) == 0);
    CHECK(taskd_collectives_see(TASKD_COMMUNICATORS + 1, "", 0, 0) == -ENOSPC);
    CHECK(taskd_collectives_forget(TASKD_COMMUNICATORS + 1) == 0); /* there is none */
    CHECK(taskd_collectives_forget(3) == 0 && area->communicators[2].id == 0);
    CHECK(taskd_collectives_see(TASKD_COMMUNICATORS + 1, "", 9, 9) == 0);
    CHECK(area->communicators[2].id == TASKD_COMMUNICATORS + 1);
    CHECK(taskd_collectives_see(7, "", 5, 4) == 0); /* one that is known finds its place */
    CHECK(area->communicators[6].id == 7 && area->communicators[6].entered == 5 &&
          area->communicators[6].left == 4);
    CHECK(area->communicators[6].entered_ns > 0 &&
          area->communicators[6].name[TASKD_NAME_BYTES - 1] == '\0');
    CHECK(taskd_collectives_reset() == 0);
    for (size_t place = 0; place < TASKD_COMMUNICATORS; place++)
        CHECK(area->communicators[place].id == 0 && area->communicators[place].entered == 0);
}

static void test_writers_a_reader_and_children(void)
{
    pthread_t threads[WRITERS + 1];
    atomic_store(&running, WRITERS);
    for (uintptr_t writer = 0; writer < WRITERS; writer++)
        CHECK(pthread_create(&threads[writer], NULL, write_calls, (void *)writer) == 0);
    CHECK(pthread_create(&threads[WRITERS], NULL, forget_again_and_again, NULL) == 0);
    for (int looks = 0; atomic_load(&running) > 0; looks++) {
        look_at_all();
        if (looks % 50 == 0 && looks < 500)
            fork_a_child();
    }
    for (int i = 0; i <= WRITERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(area->next == WRITERS * CALLS_EACH);
    CHECK(look_at_all() >
          TASKD_CALLS / 2); /* a call is left out only where a writer was a whole round behind */
    fork_a_child();
}

/* A writer that stands in the middle of an entry: the others go round it. */
static void test_an_entry_that_is_being_written_is_left_alone(void)
{
    struct taskd_call *stands = &area->calls[area->next % TASKD_CALLS];
    struct taskd_call before;
    stands->mark = stands->mark + 1;
    memcpy(&before, stands, sizeof before);
    for (int n = 0; n < 2 * TASKD_CALLS; n++)
        CHECK(taskd_collectives_add(1, "gloo:broadcast", 1, 8, 3, 5) == 0);
    CHECK(memcmp(&before, stands, sizeof before) == 0);
}

int main(void)
{
    int box = new_box();
    area = see_area(box);
    test_before_the_start_and_refusals(box);
    test_the_table();
    test_writers_a_reader_and_children();
    test_an_entry_that_is_being_written_is_left_alone();
    close(box);
    return 0;
}
