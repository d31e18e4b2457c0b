"""The black box.

What is written is read, what was torn is not, and the layout is that of taskd.h.
"""

import os
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.errors import NativeLibraryError
from taskd.native import black_box, box_layout, box_payloads, library
from taskd.native.black_box import BlackBox, Phase
from taskd.wire import schema

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def box():
    box = BlackBox.create()
    yield box
    box.close()


def test_every_constant_is_the_one_the_library_was_built_with():
    binding = library.load()
    if binding is None:
        pytest.skip("libtaskd is not built here")
    names = re.findall(r'^    \{"(\w+)",', (ROOT / "csrc/layout.c").read_text(), re.MULTILINE)
    ours = {
        name: getattr(box_layout, name.upper())
        for name in names
        if name not in {"guard_held", "death_bytes"}
    }
    assert len(ours) > 15
    assert {name: binding.layout_value(name) for name in ours} == ours
    assert binding.layout_value("no such name") == -1


def test_a_new_box_says_nothing(box):
    assert (box.pid, box.version, box.phase, box.alive_at) == (None, None, Phase.BOOT, None)
    assert box.read_extras() == {}
    assert box.read_layout() is None


def test_what_one_side_marks_the_other_side_reads(box):
    other = BlackBox.attach(os.dup(box.fd))
    box.begin(pid=4711, incarnation=3)
    box.mark_phase(Phase.OPTIMIZER)
    box.mark_version(12)
    assert (other.pid, other.incarnation, other.phase, other.version) == (
        4711,
        3,
        Phase.OPTIMIZER,
        12,
    )
    box.mark_version(0)
    assert other.version == 0
    other.close()


def test_the_file_is_private_sealed_sparse_and_not_inherited(box):
    status = os.fstat(box.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == box_layout.BOX_BYTES
    assert status.st_blocks * 512 <= 64 * 1024
    assert not os.get_inheritable(box.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(box.fd, 4096)


def test_extras_keep_the_last_two_versions(box):
    for version in range(5):
        assert box.write_extras(version, b"v%d" % version)
    assert box.read_extras() == {3: b"v3", 4: b"v4"}


def test_committed_extras_win_over_pending_ones_of_the_same_version(box):
    assert box.write_extras(7, b"pending", pending=True)
    assert box.read_extras() == {7: b"pending"}
    box.write_extras(6, b"six")
    assert box.read_extras() == {6: b"six", 7: b"pending"}
    box.write_extras(7, b"committed")
    assert box.read_extras() == {6: b"six", 7: b"committed"}


def test_what_was_committed_before_the_job_went_back_does_not_win(box):
    for version in (6, 7, 8):
        box.write_extras(version, b"before %d" % version)
    box.write_extras(7, b"seven")  # from an older snapshot
    assert box.read_extras() == {7: b"seven"}
    box.write_extras(8, b"pending", pending=True)
    assert box.read_extras() == {7: b"seven", 8: b"pending"}


def test_what_is_committed_is_told_from_what_is_pending(box):
    assert (box.read_committed(), box.read_pending()) == ({}, {})
    box.write_extras(6, b"six")
    box.write_extras(7, b"pending", pending=True)
    assert (box.read_committed(), box.read_pending()) == ({6: b"six"}, {7: b"pending"})
    box.write_extras(7, b"committed")
    assert box.read_committed() == {6: b"six", 7: b"committed"}
    assert box.read_pending() == {7: b"pending"}  # superseded


def test_the_last_of_two_writes_of_one_version_wins(box):
    box.write_extras(1, b"first")
    box.write_extras(1, b"second")
    assert box.read_extras() == {1: b"second"}


def test_the_largest_payloads_fit_and_larger_ones_change_nothing(box):
    largest = os.urandom(box_payloads.MAX_EXTRAS_PAYLOAD_BYTES)
    assert box.write_extras(1, largest)
    assert box.write_extras(2, largest)
    assert box.write_extras(3, largest, pending=True)
    assert box.write_layout(b"x" * box_payloads.MAX_LAYOUT_PAYLOAD_BYTES)
    assert not box.write_extras(4, largest + b"x")
    assert not box.write_layout(b"y" * (box_payloads.MAX_LAYOUT_PAYLOAD_BYTES + 1))
    assert box.read_extras() == {1: largest, 2: largest, 3: largest}
    assert box.read_layout() == b"x" * box_payloads.MAX_LAYOUT_PAYLOAD_BYTES


def test_empty_payloads_are_payloads(box):
    box.write_extras(0, b"")
    box.write_layout(b"")
    assert box.read_extras() == {0: b""}
    assert box.read_layout() == b""


def test_what_versions_have_in_common_is_in_front_of_each(box):
    first, second = b"generators 1, ", b"generators 2, "
    box.write_extras(1, b"one", common=first)
    box.write_extras(2, b"two", common=first)
    box.write_extras(3, b"three", common=second, pending=True)
    assert box.read_extras() == {1: first + b"one", 2: first + b"two", 3: second + b"three"}
    box.write_extras(3, b"three", common=second)
    box.write_extras(4, b"four")
    assert box.read_extras() == {3: second + b"three", 4: b"four"}


def test_a_common_part_that_is_too_large_for_its_place_is_kept_all_the_same(box):
    large = os.urandom(box_payloads.MAX_COMMON_PAYLOAD_BYTES + 1)
    box.write_extras(1, b"one", common=large)
    box.write_extras(2, b"two", common=large[:-1])
    assert box.read_extras() == {1: large + b"one", 2: large[:-1] + b"two"}


class Died(BaseException):
    """Stands for the end of the process in the middle of a write."""


def die_when_the_checksum_is_taken(monkeypatch):
    def die(*_):
        raise Died

    monkeypatch.setattr(zlib, "adler32", die)


@pytest.mark.parametrize("pending", [False, True])
def test_a_death_in_the_middle_of_a_write_costs_only_that_write(box, monkeypatch, pending):
    box.write_extras(1, b"one")
    box.write_extras(2, b"two")
    box.write_extras(3, b"three?", pending=True)
    with monkeypatch.context() as patch:
        die_when_the_checksum_is_taken(patch)
        with pytest.raises(Died):
            box.write_extras(3, b"three", pending=pending)
    assert box.read_extras() == ({1: b"one", 2: b"two"} if pending else {2: b"two", 3: b"three?"})
    box.write_extras(3, b"three")
    assert box.read_extras()[3] == b"three"
    assert box.read_extras()[2] == b"two"


@pytest.mark.parametrize("pending", [False, True])
def test_a_death_in_the_middle_of_a_common_part_costs_only_that_write(box, monkeypatch, pending):
    commons = [b"common %d, " % number for number in range(4)]
    for version in (1, 2):
        box.write_extras(version, b"", common=commons[version])
    box.write_extras(3, b"", common=commons[3], pending=True)
    with monkeypatch.context() as patch:
        die_when_the_checksum_is_taken(patch)
        with pytest.raises(Died):
            box.write_extras(3, b"", common=commons[0], pending=pending)
    assert box.read_extras() == {1: commons[1], 2: commons[2], 3: commons[3]}


def test_a_torn_layout_is_no_layout(box, monkeypatch):
    box.write_layout(b"old")
    with monkeypatch.context() as patch:
        die_when_the_checksum_is_taken(patch)
        with pytest.raises(Died):
            box.write_layout(b"new")
    assert box.read_layout() is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, box_payloads.MAX_COUNT),
            st.binary(max_size=64),
            st.booleans(),
            st.integers(0, 5),
        ),
        max_size=12,
    ),
    st.binary(max_size=4096),
)
def test_the_newest_committed_payload_is_always_there_and_noise_is_never_taken_for_one(
    writes, noise
):
    box = BlackBox.create()
    committed = {}
    commons = [b"%d" % number for number in range(6)]
    for version, payload, pending, common in writes:
        assert box.write_extras(version, payload, common=commons[common], pending=pending)
        if not pending:
            committed = {version: commons[common] + payload}
        found = box.read_extras()
        assert all((v, found[v]) in {(w, commons[c] + p) for w, p, _, c in writes} for v in found)
        assert committed.items() <= found.items()
    os.pwrite(box.fd, noise, box_layout.EXTRAS_OFFSET)
    box.read_extras()
    box.close()


WRITER = """
import os, sys
from taskd.native.black_box import BlackBox
box = BlackBox.attach(int(sys.argv[1]))
box.begin(os.getpid(), 1)
version = 0
while True:
    version += 1
    box.write_extras(version, b"%d," % version * 20000, pending=True)
    box.write_extras(version, b"%d," % version * 20000)
    box.mark_version(version)
    if version == 20:
        print("running", flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_complete_extras_for_its_version():
    for _ in range(5):
        box = BlackBox.create()
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(box.fd)],
            pass_fds=[box.fd],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        with writer:
            assert writer.stdout.readline() == b"running\n"
            writer.send_signal(signal.SIGKILL)
        extras = box.read_extras()
        assert box.pid == writer.pid
        assert box.version in extras
        assert all(payload == b"%d," % version * 20000 for version, payload in extras.items())
        box.close()


def test_a_forked_child_writes_to_nobody(box):
    box.begin(os.getpid(), 1)
    box.mark_version(5)
    pid = os.fork()
    if pid == 0:
        box.mark_version(99)
        box.write_extras(99, b"child")
        os._exit(0 if box.version == 99 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.version == 5
    assert box.read_extras() == {}


def test_what_is_no_black_box_is_refused_and_left_open(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"something else")
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(NativeLibraryError, match="no black box of layout 2"):
        BlackBox.attach(fd)
    os.close(fd)
    with pytest.raises(NativeLibraryError, match="is no black box"):
        BlackBox.attach(fd)


def test_another_layout_version_is_refused(box):
    os.pwrite(box.fd, b"\x63", box_layout.OFFSET_LAYOUT_VERSION)
    with pytest.raises(NativeLibraryError, match="one version of taskd"):
        BlackBox.attach(box.fd)


def test_closing_twice_is_closing_once(box):
    fd = box.fd
    box.close()
    box.close()
    assert box.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_forgotten_box_gives_its_descriptor_back():
    box = BlackBox.create()
    fd = box.fd
    del box
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_phases_are_timed_and_counted(box):
    box.begin(1, 0)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.CHECKPOINT, Phase.STEP):
        box.mark_phase(phase)
    times = box.phase_times()
    assert {name: count for name, (count, _) in times.items()} == {
        "boot": 1,
        "forward": 1,
        "backward": 1,
        "checkpoint": 1,
    }
    assert box.progress == 4
    assert box.slowest_long_s(Phase.CHECKPOINT) > 0
    assert box.slowest_long_s(Phase.EVALUATION) == 0


def test_the_longest_step_leaves_out_the_first_and_the_checkpoints(box, monkeypatch):
    clock = [0]
    monkeypatch.setattr(black_box.time, "monotonic_ns", lambda: clock[0])
    box.begin(1, 0)
    clock[0] = 30_000_000_000
    box.mark_step(is_first=True)
    assert box.slowest_step_s == 0
    clock[0] += 50_000_000
    box.mark_step()
    box.mark_phase(Phase.CHECKPOINT)
    clock[0] += 60_000_000_000
    box.mark_phase(Phase.STEP)
    clock[0] += 40_000_000
    box.mark_step()
    assert box.slowest_step_s == 0.05
    assert box.slowest_long_s(Phase.CHECKPOINT) == 60


def test_the_longest_step_is_forgotten_after_a_while(box, monkeypatch):
    clock = [0]
    monkeypatch.setattr(black_box.time, "monotonic_ns", lambda: clock[0])
    box.mark_step(is_first=True)
    for took_ms in [1000, *[50] * 256]:
        clock[0] += took_ms * 1_000_000
        box.mark_step()
        assert box.slowest_step_s == 1.0
    for _ in range(256):
        clock[0] += 50_000_000
        box.mark_step()
    assert box.slowest_step_s == 0.05


@given(st.binary(min_size=1024, max_size=1024), st.integers(0, 15))
@settings(max_examples=50)
def test_a_damaged_header_is_read_without_an_error(garbage, place):
    box = BlackBox.create()
    os.pwrite(box.fd, garbage, box_layout.OFFSET_PID if place == 0 else place * 256 + 64)
    for name in (
        "pid",
        "incarnation",
        "phase",
        "version",
        "alive_at",
        "progress_at",
        "python_at",
        "is_waiting",
        "slowest_step_s",
    ):
        getattr(box, name)
    box.phase_times()
    box.read_extras()
    box.read_layout()
    box.close()


NUMBERS = (
    0,
    1,
    2,
    5,
    15,
    16,
    -1,
    -2,
    -7,
    box_payloads.MAX_COUNT,
    box_payloads.MAX_COUNT + 1,
    (1 << 63) - 1,
    -(1 << 63),
)
WORDS = {name: word for name, word, _, _ in black_box._RANGES}


def test_the_limit_of_a_count_is_that_of_the_protocol():
    assert schema.MAX_CLAIM == box_payloads.MAX_COUNT


@pytest.mark.parametrize("number", [-2, -7, -(1 << 63), box_payloads.MAX_COUNT + 1, (1 << 63) - 1])
def test_counts_that_cannot_be_are_not_known_and_the_box_says_so(box, number):
    box.begin(1234, 3)
    box.mark_generation(2)
    box.mark_version(7)
    assert (box.pid, box.incarnation, box.generation, box.version, box.damage) == (
        1234,
        3,
        2,
        7,
        None,
    )
    for name in ("pid", "incarnation", "generation", "version"):
        before = box._words[WORDS[name]]
        box._words[WORDS[name]] = number
        assert getattr(box, name) is None
        assert box.damage == f"{name} {number}"
        box._words[WORDS[name]] = before
    assert box.damage is None


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_a_word_is_its_reader_gives_what_can_be_told(box, number):
    box.begin(1234, 3)
    for word in WORDS.values():
        before, box._words[word] = box._words[word], number
        assert box.pid is None or 0 < box.pid <= 1 << 22
        assert all(
            value is None or 0 <= value <= box_payloads.MAX_COUNT
            for value in (box.incarnation, box.generation, box.version)
        )
        assert all(
            value is None or 0 < value <= 1e10
            for value in (box.alive_at, box.progress_at, box.python_at)
        )
        assert all(
            0 <= value <= 1e10
            for value in (box.slowest_step_s, *map(box.slowest_long_s, black_box.LONG_PHASES))
        )
        assert all(
            count > 0 and 0 <= seconds <= 1e10 for count, seconds in box.phase_times().values()
        )
        box._words[word] = before


@pytest.mark.parametrize("version", [-1, -7, box_payloads.MAX_COUNT + 1])
def test_extras_of_a_version_that_cannot_be_are_none(box, version):
    assert box.write_extras(5, b"good")
    box._write_slot(box_payloads._EXTRAS_WORDS[1], version, b"bad")
    box._words[box_payloads.COMMITTED] = 1
    assert box.read_extras() == {5: b"good"}


MARKED = tuple(
    word
    for name, word in WORDS.items()
    if name in {"phase", "marks", "time of the last mark"}
    or name.startswith(("longest ", "time in ", "visits to "))
)


@pytest.mark.parametrize("number", [*NUMBERS, 100, 10**12])
def test_who_marks_trusts_nothing_in_its_box_and_puts_it_right(box, number, monkeypatch):
    clock = [0]
    monkeypatch.setattr(black_box.time, "monotonic_ns", lambda: clock[0])
    twin = BlackBox.create()  # nothing writes into this one
    for one in (box, twin):
        one.begin(1234, 3)
    for word in MARKED:
        box._words[word] = number
        for phase in Phase:
            clock[0] += 1_000_000
            for one in (box, twin):
                one.mark_phase(phase)
                one.mark_step()
        assert box.read(0, 4096) == twin.read(0, 4096)
    assert box.phase_times()["forward"] == (len(MARKED), len(MARKED) * 0.001)
    twin.close()
