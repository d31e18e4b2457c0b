"""libtaskd's hooks against stand-ins of NCCL and HCCL.

Everything passes through unchanged, and the record is right.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from taskd.native import library
from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.black_box import BlackBox
from taskd.native.collectives import Collectives
from tests.native.programs import DEADLINE_S, ROOT, environment, wait_until
from tests.native.stand_ins import (
    MAIN,
    SIGNATURES,
    SONAMES,
    WAYS,
    build,
    build_stand_in,
    compile_c,
    program_source,
    record,
    run,
    shared,
    stand_in_source,
    tour_source,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]

FAMILIES = sorted(SIGNATURES)
# A communicator A with three collectives and a message, B with one collective, and A's end.
SCENARIO = {
    "nccl": """
    memset(&an_id, 'A', sizeof an_id); seen->next = 0xa000;
        CALL(ncclCommInitRank)(&made, 8, an_id, 0);
    for (int i = 0; i < 3; i++) CALL(ncclAllReduce)(area, area, 10, 7, 0, made, area);
    CALL(ncclSend)(area, 5, 9, 3, made, area);
    void *other = NULL; memset(&an_id, 'B', sizeof an_id); seen->next = 0xb000;
        CALL(ncclCommInitRankConfig)(&other, 4, an_id, 0, area);
    CALL(ncclReduceScatter)(area, area, 10, 8, 0, other, area);
    CALL(ncclCommAbort)(made);
    """,
    "hccl": """
    memset(area, 'A', 4108); seen->next = 0xa000; CALL(HcclCommInitRootInfo)(8, area, 0, &made);
    for (int i = 0; i < 3; i++) CALL(HcclAllReduce)(area, area, 10, 4, 0, made, area);
    CALL(HcclSend)(area, 5, 3, 3, made, area);
    void *other = NULL; memset(area, 'B', 4108); seen->next = 0xb000;
        CALL(HcclCommInitRootInfoConfig)(4, area, 0, area, &other);
    CALL(HcclReduceScatter)(area, area, 10, 10, 0, other, area);
    CALL(HcclCommDestroy)(made);
    """,
}


def python(tmp_path, code, *words, preload=str(LIBRARY_PATH), fds=()):
    """A Python process that knows the stand-ins' directory. Its lines."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={**environment(), "LD_PRELOAD": preload},
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


PYTHON_SIDE = """
import ctypes, os, sys
from taskd.native import collectives, library
from taskd.native.black_box import BlackBox
box = BlackBox.attach(int(sys.argv[1]))
nccl = ctypes.CDLL("./libnccl.so.2")
pointer = ctypes.c_void_p
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
nccl.ncclAllReduce.argtypes = [
    pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, Id, ctypes.c_int]
c_int = ctypes.c_int
nccl.ncclCommSplit.argtypes = [pointer, c_int, c_int, ctypes.POINTER(pointer), pointer]
class Seen(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 64), ("arguments", ctypes.c_uint64 * 16),
                ("calls", ctypes.c_uint64),
                ("result", ctypes.c_int), ("error", ctypes.c_int), ("next", ctypes.c_uint64)]
nccl.stand_in_seen.restype = ctypes.POINTER(Seen)
seen = nccl.stand_in_seen().contents
def make(handle, identity):
    made = pointer()
    seen.next = handle
    nccl.ncclCommInitRank(ctypes.byref(made), 2, Id(identity * 127), 0)
    return made
def reduce(comm):
    return nccl.ncclAllReduce(None, None, 1, 0, 0, comm, None)
"""


# ------------------------------------------------------------ the list


def test_the_list_has_the_functions_with_their_signatures():
    listed = re.findall(
        r"^HOOK_\w+\((\w+), (?:[A-Z]+, )?(\w+),",
        (ROOT / "csrc/collectives/hooks.def").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for _, name in listed) == sorted(
        name for family in FAMILIES for name in SIGNATURES[family]
    )
    assert all(name in SIGNATURES[family.lower()] for family, name in listed)


# ------------------------------------------------------------ passing through


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_results_and_errno_pass_through(tmp_path, box, family, way):
    program = build(tmp_path, family, way, tour_source(family))
    assert run(program, preload="").stdout == "done\n", (
        "without libtaskd the program must work, or this test says nothing"
    )
    assert run(program).stdout == "done\n", "preloaded, without a record"
    run(program, str(box.fd), fds=(box.fd,))
    assert [call.name for call in Collectives(box).calls()] == list(SIGNATURES[family])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_of_a_life(tmp_path, box, family, way):
    found = record(box, build(tmp_path, family, way, SCENARIO[family]))
    made_a, *reduces, send, made_b, scatter, end = found.calls()
    a, b = made_a.communicator, made_b.communicator
    assert [(c.communicator, c.number, c.bytes) for c in reduces] == [
        (a, 1, 40),
        (a, 2, 40),
        (a, 3, 40),
    ]
    assert (send.communicator, send.number, send.bytes, send.peer) == (a, 0, 10, 3)
    assert (scatter.communicator, scatter.number, scatter.bytes) == (b, 1, 10 * 8 * 4)
    assert (end.communicator, end.number, end.bytes) == (a, 0, None)
    assert all(call.leave_ns >= call.enter_ns > 0 for call in found.calls())
    [communicator] = found.communicators()
    assert (communicator.id, communicator.name, communicator.entered, communicator.left) == (
        b,
        f"{family}, 4 ranks",
        1,
        1,
    )
    assert communicator.is_comparable
    assert communicator.entered_at == scatter.enter_ns / 1e9
    assert a != b


def test_the_id_is_the_same_on_all_ranks(tmp_path):
    program = build(
        tmp_path,
        "nccl",
        "linked",
        SCENARIO["nccl"]
        + """
    seen->next = 0xc000; CALL(ncclCommSplit)(other, 1, 0, &made, NULL);
        CALL(ncclAllReduce)(area, area, 1, 7, 0, made, area);
    seen->next = 0xd000; CALL(ncclCommSplit)(other, 1, 0, &made, NULL);
        CALL(ncclAllReduce)(area, area, 1, 7, 0, made, area);
    """,
    )
    ids = []
    for _ in range(2):
        box = BlackBox.create()
        found = record(box, program).communicators()
        assert len(found) == 3
        assert all(communicator.is_comparable for communicator in found)
        ids.append([communicator.id for communicator in found])
        box.close()
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


def test_a_communicator_made_behind_our_back_is_not_compared(tmp_path, box):
    body = (
        "for (int i = 0; i < 2; i++) CALL(ncclAllReduce)(area, area, 1, 7, 0, (void *)0x7000, "
        "area);"
    )
    [communicator] = record(box, build(tmp_path, "nccl", "linked", body)).communicators()
    assert (communicator.entered, communicator.left, communicator.is_comparable) == (2, 2, False)


def test_a_call_that_has_not_come_back_is_seen_as_such(tmp_path, box):
    # The stand-in writes to area[0]: the program hangs there, in the original.
    source = stand_in_source("nccl").replace(
        'strcpy(seen.name, "ncclAllGather");', "for (;;) pause();"
    )
    program = build(
        tmp_path,
        "nccl",
        "linked",
        SCENARIO["nccl"] + "CALL(ncclAllGather)(area, area, 1, 7, other, area);",
    )
    shared(source, tmp_path / SONAMES["nccl"])
    process = subprocess.Popen(
        [str(program), str(box.fd)],
        cwd=tmp_path,
        env={**environment(), "LD_PRELOAD": str(LIBRARY_PATH)},
        pass_fds=[box.fd],
    )
    try:
        found = Collectives(box)
        wait_until(
            lambda: any(call.name == "ncclAllGather" for call in found.calls()), "the call begins"
        )
        assert found.calls()[-1].leave_ns == 0
        assert [(c.entered, c.left) for c in found.communicators()] == [(2, 1)]
    finally:
        process.kill()
        process.wait()


def test_the_ring_keeps_the_last_calls_and_sixty_four_communicators(tmp_path, box):
    body = """for (int i = 1; i <= 70; i++)
        for (int k = 0; k < 10; k++)
            CALL(ncclAllReduce)(area, area, i * 10 + k, 0, 0, (void *)(i * 0x1000L), area);"""
    found = record(box, build(tmp_path, "nccl", "linked", body))
    calls = found.calls()
    assert [call.bytes for call in calls] == list(range(710 - 256, 710))
    assert [call.index for call in calls] == list(range(700 - 256, 700))
    assert len(found.communicators()) == 64
    assert all(c.entered == c.left == 10 for c in found.communicators())
    assert {call.number for call in calls if call.bytes >= 650} == {0}, (
        "there was no place left to count those"
    )


def test_a_hooked_function_that_calls_another_is_one_call(tmp_path, box):
    source = stand_in_source("nccl").replace(
        'strcpy(seen.name, "ncclBcast");',
        "seen.calls++; return ncclBroadcast(a0, a0, a1, a2, a3, a4, a5);",
    )
    program = build(
        tmp_path,
        "nccl",
        "linked",
        'CALL(ncclBcast)(area, 1, 0, 0, (void *)0x1000, area); check(seen->calls == 2, "both");',
    )
    shared(source, tmp_path / SONAMES["nccl"])
    assert [call.name for call in record(box, program).calls()] == ["ncclBcast"]


# ------------------------------------------------------------ forks, threads


FORKS = """
    for (int raw = 0; raw < 2; raw++) {
        pid_t child = raw ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
        if (child == 0) {
            for (int i = 0; i < 20;
                i++) check(CALL(ncclAllReduce)(area, area, 1, 7, 0, other, area) == 0, "child");
            check(seen->calls >= 20, "the stand-in was called"); _exit(33);
        }
        int status; waitpid(child, &status, 0);
            check(WIFEXITED(status) && WEXITSTATUS(status) == 33, "the child ended as it should");
    }
    CALL(ncclAllReduce)(area, area, 1, 7, 0, other, area);
"""


@pytest.mark.parametrize("way", WAYS)
def test_forked_children_do_not_write(tmp_path, box, way):
    program_text = "#include <sys/wait.h>\n#include <sys/syscall.h>\n#include <signal.h>\n"
    build_stand_in(tmp_path, "nccl")
    source = program_text + program_source(
        "nccl", looked_up=way == "looked_up", body=SCENARIO["nccl"] + FORKS
    )
    source = "#define _GNU_SOURCE\n" + source
    beside = [str(tmp_path / SONAMES["nccl"]), "-Wl,-rpath,$ORIGIN"]
    if way == "plugin":
        program = build(tmp_path, "nccl", "plugin", "")
        shared(source, tmp_path / "libplugin.so", *beside)
    else:
        program = compile_c(
            source + MAIN, tmp_path / "program", *(beside if way == "linked" else ["-ldl"])
        )
    found = record(box, program)
    assert len(found.calls()) == 9
    assert [(c.entered, c.left) for c in found.communicators()] == [(2, 2)]


HAMMER = """
static volatile int is_over;
static void *hammer(void *argument)
{
    uintptr_t number = (uintptr_t)argument;
    do { /* a thread may begin when it is over */
        CALL(ncclAllReduce)(area, area, number, 7, 0, (void *)(number * 0x1000), area);
        CALL(ncclSend)(area, number + 100, 0, number, (void *)(number * 0x1000), area);
    } while (!is_over);
    return NULL;
}
int run(int box_fd)
{
    taskd_collectives_start(box_fd);
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, hammer, (void *)(i + 1));
    getchar();      /* until the test closes it */
    is_over = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    return 0;
}
"""


def test_a_reader_never_sees_two_calls_mixed(tmp_path, box):
    program = build(tmp_path, "nccl", "linked", HAMMER)
    found, met = Collectives(box), 0
    identities: dict[int, int] = {}
    process = subprocess.Popen(
        [str(program), str(box.fd)],
        cwd=tmp_path,
        env={**environment(), "LD_PRELOAD": str(LIBRARY_PATH)},
        pass_fds=[box.fd],
        stdin=subprocess.PIPE,
    )
    deadline = time.monotonic() + DEADLINE_S
    try:
        while met < 20:
            assert time.monotonic() < deadline, "the reader and the writers never met"
            calls = found.calls()
            met += 0 < len(calls) < 256  # an entry was being written, or written anew
            for call in calls:
                number = call.peer if call.name == "ncclSend" else call.bytes // 4
                assert identities.setdefault(number, call.communicator) == call.communicator
                if call.name == "ncclSend":
                    assert (call.bytes, call.dtype, call.number) == (number + 100, 0, 0)
                else:
                    assert (call.name, call.dtype, call.peer) == ("ncclAllReduce", 7, None)
                    assert call.number > 0
            assert [call.index for call in calls] == sorted({call.index for call in calls})
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    counted = [communicator.entered for communicator in found.communicators()]
    assert [communicator.left for communicator in found.communicators()] == counted
    assert len(counted) == 4
    assert set(identities.values()) <= {communicator.id for communicator in found.communicators()}
    # the very last ones may have been left out
    assert found.calls()[-1].index >= 2 * sum(counted) - 1 - 256


# ------------------------------------------------------------ Python


def test_the_binding_is_the_preloaded_copy_and_records(tmp_path, box):
    build_stand_in(tmp_path, "nccl")
    lines = python(
        tmp_path,
        PYTHON_SIDE
        + """
print(collectives.is_preloaded(), collectives.start(box), collectives.start(box))
first, second = make(0x1000, b"a"), make(0x2000, b"b")
print([reduce(first), reduce(first), reduce(second)])
files = [line.split()[-1] for line in open('/proc/self/maps')]
print(len({file for file in files if file.endswith('libtaskd.so')}))
""",
        str(box.fd),
        fds=(box.fd,),
    )
    assert lines == ["True True False", "[0, 0, 0]", "1"]
    found = Collectives(box)
    assert sorted((c.entered, c.left, c.name) for c in found.communicators()) == [
        (1, 1, "nccl, 2 ranks"),
        (2, 2, "nccl, 2 ranks"),
    ]
    assert [call.number for call in found.calls()] == [0, 0, 1, 2, 1]


def test_without_preload_nothing_is_seen_and_the_runtime_can_still_write(tmp_path, box):
    build_stand_in(tmp_path, "nccl")
    lines = python(
        tmp_path,
        PYTHON_SIDE
        + """
print(collectives.is_preloaded(), collectives.start(box))
reduce(make(0x1000, b"a"))
collectives.see(7, "default_pg", 3, 2)
collectives.add(7, "gloo:all_reduce", 3, None, 1000, 0)
""",
        str(box.fd),
        preload="",
        fds=(box.fd,),
    )
    assert lines == ["False True"]
    found = Collectives(box)
    assert [(c.id, c.name, c.entered, c.left) for c in found.communicators()] == [
        (7, "default_pg", 3, 2)
    ]
    [call] = found.calls()
    assert (call.name, call.communicator, call.number, call.bytes, call.dtype, call.leave_ns) == (
        "gloo:all_reduce",
        7,
        3,
        None,
        None,
        0,
    )


def test_a_new_generation_forgets_the_communicators_and_not_the_calls(tmp_path, box):
    build_stand_in(tmp_path, "nccl")
    python(
        tmp_path,
        PYTHON_SIDE
        + """
collectives.reset()
collectives.start(box)
reduce(make(0x1000, b"a"))
for number in range(1, 80):
    collectives.see(number, "x" * 50, 1, 0)
collectives.reset()
collectives.see(5, "new", 1, 0)
collectives.see(5, "new", 2, 1)
collectives.see(0, "no id", 2, 1)
""",
        str(box.fd),
        fds=(box.fd,),
    )
    found = Collectives(box)
    assert [(c.id, c.name, c.entered, c.left) for c in found.communicators()] == [(5, "new", 2, 1)]
    assert [call.name for call in found.calls()] == ["ncclCommInitRank", "ncclAllReduce"]


def test_a_child_of_the_forkserver_s_kind_may_start_its_own_record(tmp_path, box):
    build_stand_in(tmp_path, "nccl")
    other = BlackBox.create()
    python(
        tmp_path,
        PYTHON_SIDE
        + """
other = int(sys.argv[2])
collectives.start(box)
reduce(make(0x1000, b"a"))
child = os.fork()
if child == 0:
    collectives.start(BlackBox.attach(other))
    reduce(make(0x2000, b"b"))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        str(box.fd),
        str(other.fd),
        fds=(box.fd, other.fd),
    )
    assert len(Collectives(box).calls()) == len(Collectives(other).calls()) == 2
    assert Collectives(box).communicators()[0].id != Collectives(other).communicators()[0].id
    other.close()


def test_what_is_no_black_box_is_refused(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(100)
        with pytest.raises(Exception, match="Invalid argument"):
            library.load().collectives_start(file.fileno())
