/* Guard and watch through the C ABI: what rings the alarm, what does not, and what is refused. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

/* In place of the C library's: a thread that has been started may have ended before anybody else
 * can give it its name. */
int pthread_setname_np(pthread_t thread, const char *name)
{
    CHECK(pthread_equal(thread, pthread_self()));
    return prctl(PR_SET_NAME, name, 0, 0, 0);
}

struct worker {
    pid_t pid;
    int box;
    int facts;  /* the child says here how far it has come */
    int orders; /* and reads here when to go on */
};

/* A child that guards a new box, says 'g', and then does `body`. */
static struct worker start(void (*body)(struct worker *))
{
    int facts[2];
    int orders[2];
    struct worker worker = {.box = new_box()};
    CHECK(pipe2(facts, O_CLOEXEC) == 0 && pipe2(orders, O_CLOEXEC) == 0);
    worker.pid = fork();
    CHECK(worker.pid >= 0);
    if (worker.pid == 0) {
        worker.facts = facts[1];
        worker.orders = orders[0];
        close(orders[1]);
        CHECK(taskd_guard_start(worker.box, -1) == 0);
        say_byte(worker.facts, 'g');
        body(&worker);
        _exit(0);
    }
    worker.facts = facts[0];
    worker.orders = orders[1];
    close(facts[1]);
    close(orders[0]);
    expect_byte(worker.facts, 'g');
    return worker;
}

static void end(const struct worker *worker)
{
    close(worker->box);
    close(worker->facts);
    close(worker->orders);
}

static void wait_for_order(struct worker *worker)
{
    char byte;
    ssize_t ignored = read(worker->orders, &byte, 1);
    (void)ignored;
}

static struct taskd_death next_death(int fd)
{
    struct taskd_death death;
    CHECK(is_readable(fd, DEADLINE_MS));
    CHECK(read(fd, &death, sizeof death) == sizeof death);
    return death;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void test_numbers(void)
{
    CHECK(taskd_abi_version() == TASKD_ABI_VERSION);
    CHECK(taskd_layout_value("box_bytes") == TASKD_BOX_BYTES);
    CHECK(taskd_layout_value("magic") == TASKD_BOX_MAGIC);
    CHECK(taskd_layout_value("") == -1);
    CHECK(taskd_layout_value("no such name") == -1);
    CHECK(taskd_prefer_soon() <= 0);
}

static void test_refusals(void)
{
    int ends[2];
    int box = new_box();
    int small = memfd_create("small", MFD_CLOEXEC);
    int other = new_box();
    see_box(other)->layout_version = 99;
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    CHECK(ftruncate(small, TASKD_HEADER_BYTES) == 0);

    int strangers[] = {-1, small, other, ends[0]};
    int reasons[] = {-EBADF, -EINVAL, -EINVAL, -EINVAL};
    for (int i = 0; i < 4; i++) {
        CHECK(taskd_guard_start(strangers[i], -1) == reasons[i]);
        CHECK(taskd_watch(strangers[i], 1, ends[1]) == reasons[i]);
        CHECK(taskd_unwatch(strangers[i]) ==
              (strangers[i] == other ? 0 : reasons[i])); /* it may have become one by damage */
    }
    CHECK(taskd_guard_start(box, 9999) == -EBADF);
    CHECK(taskd_watch(box, 1, 9999) == -EBADF);
    CHECK(see_box(box)->guard_state == TASKD_GUARD_NONE);
    close(box), close(small), close(other), close(ends[0]), close(ends[1]);
}

static void do_wait(struct worker *worker)
{
    wait_for_order(worker);
}

static void test_a_kill_rings_once_for_every_watch(void)
{
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    struct worker worker = start(do_wait);
    unsigned seen = 0;
    for (uint64_t token = 0; token < 8; token++)
        CHECK(taskd_watch(worker.box, token, ends[1]) == 0);
    CHECK(taskd_unwatch(worker.box) == 0); /* not for a guarded box */
    CHECK(!is_readable(ends[0], 0));
    uint64_t before = now_ns();
    kill(worker.pid, SIGKILL);
    for (int i = 0; i < 8; i++) {
        struct taskd_death death = next_death(ends[0]);
        CHECK(death.token < 8 && (seen & (1u << death.token)) == 0);
        CHECK(death.result == EOWNERDEAD && death.reserved == 0);
        CHECK(before <= death.monotonic_ns && death.monotonic_ns <= now_ns());
        seen |= 1u << death.token;
    }
    CHECK(ended_with(worker.pid) == -SIGKILL);
    CHECK(taskd_watch(worker.box, 99, ends[1]) == 0); /* a late one learns of it, too */
    CHECK(next_death(ends[0]).token == 99);
    close(ends[1]);
    CHECK(is_readable(ends[0], DEADLINE_MS) && read(ends[0], ends, 1) == 0);
    close(ends[0]);
    end(&worker);
}

static void *return_at_once(void *argument)
{
    return argument;
}

static void do_end_threads(struct worker *worker)
{
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, return_at_once, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    say_byte(worker->facts, 't');
    wait_for_order(worker);
}

static void do_fork(struct worker *worker)
{
    for (int end = 0; end < 2; end++) {
        pid_t child = fork();
        if (child == 0) {
            CHECK(taskd_guard_start(worker->box, -1) == -EBUSY);
            if (end == 1)
                raise(SIGKILL);
            _exit(0);
        }
        CHECK(ended_with(child) == (end == 1 ? -SIGKILL : 0));
    }
    say_byte(worker->facts, 't');
    wait_for_order(worker);
}

static void do_exec(struct worker *worker)
{
    wait_for_order(worker);
    execl("/bin/sh", "sh", "-c", "read line", (char *)NULL);
}

static void do_return(struct worker *worker)
{
    wait_for_order(worker);
}

/* `is_quiet`: the worker first does something that must not ring, and says 't'. */
static void rings_at_the_end_of(void (*body)(struct worker *), int is_quiet, int number)
{
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    struct worker worker = start(body);
    CHECK(taskd_watch(worker.box, 5, ends[1]) == 0);
    if (is_quiet)
        expect_byte(worker.facts, 't');
    CHECK(!is_readable(ends[0], 0));
    if (number == SIGSTOP) {
        int status;
        CHECK(kill(worker.pid, SIGSTOP) == 0);
        CHECK(waitpid(worker.pid, &status, WUNTRACED) == worker.pid && WIFSTOPPED(status));
        CHECK(!is_readable(ends[0], 200));
        number = SIGKILL;
    }
    if (number != 0)
        CHECK(kill(worker.pid, number) == 0);
    else
        say_byte(worker.orders, 'x');
    CHECK(next_death(ends[0]).token == 5);
    kill(worker.pid, SIGKILL); /* what became of exec */
    ended_with(worker.pid);
    close(ends[0]), close(ends[1]);
    end(&worker);
}

static void test_unwatch_before_a_guard(void)
{
    int ends[2];
    int box = new_box();
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    CHECK(taskd_watch(box, 1, ends[1]) == 0);
    close(ends[1]);
    CHECK(taskd_unwatch(box) == 0);
    CHECK(is_readable(ends[0], DEADLINE_MS) && read(ends[0], ends + 1, 1) == 0);
    CHECK(taskd_guard_start(box, -1) == -EBUSY);
    close(ends[0]);
    close(box);
}

static void test_the_end_of_the_agent_ends_the_worker(void)
{
    int life[2];
    int facts[2];
    int box = new_box();
    CHECK(pipe2(life, O_CLOEXEC) == 0 && pipe2(facts, O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        close(life[1]);
        CHECK(taskd_guard_start(box, life[0]) == 0);
        close(life[0]);
        say_byte(facts[1], 'g');
        for (;;)
            pause();
    }
    expect_byte(facts[0], 'g');
    close(life[0]);
    close(life[1]);
    CHECK(ended_with(pid) == -SIGTERM);
    close(facts[0]), close(facts[1]), close(box);
}

/* The system refuses the thread, or the mapping: an error, a box without a guard, and a watch that
 * can be let go. */
static void test_a_guard_that_cannot_start(int limit)
{
    int ends[2];
    int box = new_box();
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit rlimit = {.rlim_cur = 1, .rlim_max = 1};
        CHECK(getuid() != 0 || setuid(65534) == 0);
        CHECK(setrlimit((__rlimit_resource_t)limit, &rlimit) == 0);
        int result = taskd_guard_start(box, -1);
        _exit(result == -EAGAIN || result == -ENOMEM ? 0 : 1);
    }
    CHECK(ended_with(pid) == 0);
    CHECK(see_box(box)->guard_state < TASKD_GUARD_HELD);
    CHECK(taskd_watch(box, 1, ends[1]) == 0);
    CHECK(taskd_unwatch(box) == 0);
    close(ends[1]);
    CHECK(is_readable(ends[0], DEADLINE_MS) && read(ends[0], ends + 1, 1) == 0);
    close(ends[0]);
    close(box);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    test_numbers();
    test_refusals();
    test_a_kill_rings_once_for_every_watch();
    rings_at_the_end_of(do_return, 0, 0);
    rings_at_the_end_of(do_exec, 0, 0);
    rings_at_the_end_of(do_end_threads, 1, SIGKILL);
    rings_at_the_end_of(do_fork, 1, SIGTERM);
    rings_at_the_end_of(do_wait, 0, SIGSTOP);
    test_unwatch_before_a_guard();
    test_the_end_of_the_agent_ends_the_worker();
    /* Tools that watch memory need both themselves, and end the program when they do not get them.
     */
    if (getenv("TASKD_TEST_TOOL") == NULL) {
        test_a_guard_that_cannot_start(RLIMIT_NPROC);
        test_a_guard_that_cannot_start(RLIMIT_AS);
    }
    return 0;
}
