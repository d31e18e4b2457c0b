"""How a process ended.

The kernel's counters from files as kernels write them, a real kill for lack of memory, and what is
made of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.agent.vitals.endings import Endings
from taskd.agent.vitals.memory_kills import MemoryKills, cgroup_files, read_counter
from taskd.core.faults import Fault, FaultKind
from taskd.native import box_layout as layout
from taskd.native.black_box import BlackBox

V1 = "9:name=systemd:/\n4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n"
V2 = "0::/system.slice/one.scope\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
EVENTS = "low 0\nhigh 0\nmax 1502\noom 3\noom_kill {0}\noom_group_kill 7\n"
VMSTAT = "nr_free_pages 1\noom_kill {}\nballoon_inflate 0\n"
RECORD = (
    "3,1021,5012345,-;Memory cgroup out of memory: Killed process {} (python) total-vm:1kB, "
    "anon-rss:1kB, file-rss:0kB\n"
)


class Machine:
    """Files as a kernel shows them."""

    def __init__(self, root: Path, groups: str, counter: str | None, template: str) -> None:
        self.root = root
        self.counter = None if counter is None else root / counter
        self.template = template
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups)
        self.set(0, 0)

    def set(self, cgroup: int, machine: int) -> None:
        if self.counter is not None:
            self.counter.parent.mkdir(parents=True, exist_ok=True)
            self.counter.write_text(self.template.format(cgroup))
        (self.root / "proc/vmstat").write_text(VMSTAT.format(machine))

    def kills(self) -> MemoryKills:
        return MemoryKills(f"{self.root}/proc", f"{self.root}/cgroup", f"{self.root}/kmsg")


LAYOUTS = {
    "v1": (V1, "cgroup/memory/jobs/one/memory.oom_control", OOM_CONTROL),
    "v1 in a container": (V1, "cgroup/memory/memory.oom_control", OOM_CONTROL),
    "v2": (V2, "cgroup/system.slice/one.scope/memory.events", EVENTS),
    "v2 in a container": (V2, "cgroup/memory.events", EVENTS),
    "v2 beside v1": (V2, "cgroup/unified/system.slice/one.scope/memory.events", EVENTS),
}


@pytest.fixture(params=LAYOUTS)
def machine(request, tmp_path):
    return Machine(tmp_path, *LAYOUTS[request.param])


def test_a_kill_in_the_control_group_is_told_with_the_counter(machine):
    kills = machine.kills()
    assert kills.reason(1, 0.0) is None
    machine.set(1, 1)
    assert kills.reason(1, 1.0) == "cgroup oom_kill 0 → 1"
    assert kills.reason(2, 1.0) is None
    machine.set(2, 2)
    assert kills.reason(3, 2.0) == "cgroup oom_kill 1 → 2"


def test_each_of_several_kills_at_once_belongs_to_one_death(machine):
    kills = machine.kills()
    machine.set(2, 2)
    assert [kills.reason(pid, 1.0) for pid in (1, 2, 3)] == [
        "cgroup oom_kill 0 → 2",
        "cgroup oom_kill 0 → 2",
        None,
    ]


def test_a_kill_that_no_death_belongs_to_is_forgotten(machine):
    kills = machine.kills()
    machine.set(2, 2)
    assert kills.reason(1, 1.0) is not None
    assert kills.reason(2, 100.0) is None
    machine.set(3, 3)
    assert kills.reason(2, 101.0) == "cgroup oom_kill 2 → 3"


def test_without_a_control_group_the_machine_s_counter_must_do(tmp_path):
    machine = Machine(tmp_path, "0::/\n", None, "")
    kills = machine.kills()
    machine.set(0, 1)
    assert kills.reason(1, 1.0) == "oom_kill of the machine 0 → 1"


def test_the_kernel_s_log_names_the_process(tmp_path):
    machine = Machine(tmp_path, *LAYOUTS["v1"])
    log = tmp_path / "kmsg"
    log.write_text(RECORD.format(77))
    kills = machine.kills()
    assert kills.reason(77, 0.0) is None  # before our time
    with log.open("a") as file:
        file.write(RECORD.format(78))
    machine.set(1, 1)
    assert kills.reason(78, 1.0) == "the kernel killed it for lack of memory, cgroup oom_kill 0 → 1"
    kills.close()
    kills.close()
    assert kills.reason(78, 100.0) is None


@pytest.mark.parametrize("namespace", [4026531836, 4026532198], ids=["host", "container"])
def test_the_kill_of_somebody_else_says_nothing_where_the_log_names_him(
    tmp_path, namespace: int
) -> None:
    machine = Machine(tmp_path, "0::/\n", None, "")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    log = tmp_path / "kmsg"
    log.write_text("")
    kills = machine.kills()
    with log.open("a") as file:
        file.write(RECORD.format(78))
    machine.set(0, 1)
    is_host = namespace == 4026531836
    assert kills.reason(77, 1.0) == (None if is_host else "oom_kill of the machine 0 → 1")
    if is_host:
        assert kills.reason(78, 1.0) == "the kernel killed it for lack of memory"
        assert kills.reason(78, 2.0) is None
    kills.close()


def test_reading_the_kernel_s_log_does_not_keep_this_process_from_being_forked():
    from taskd.agent.spawning.processes import device_files

    before = device_files()
    with contextlib.closing(MemoryKills()):
        assert device_files() == before


def test_a_machine_that_shows_nothing_says_nothing(tmp_path):
    kills = MemoryKills(f"{tmp_path}/proc", f"{tmp_path}/cgroup", f"{tmp_path}/kmsg")
    assert kills.reason(1, 0.0) is None
    (tmp_path / "odd").write_bytes(b"oom_kill -1\noom_kill x\n\xff\xfe")
    assert read_counter(f"{tmp_path}/odd") is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("\n::\nnonsense\n")
    assert cgroup_files(f"{tmp_path}/proc", f"{tmp_path}/cgroup") == []


# ---------------------------------------------------------------------- a real one

EAT = (
    "import os; os.write(1, b'.'); os.read(0, 1); b = [bytearray(b'x' * 1048576) for _ in "
    "range(400)]; os.write(1, b'too much room')"
)


@contextlib.contextmanager
def control_group():
    """A new one with little memory.

    Yields (directory, base of the mount, text of /proc/self/cgroup for it).
    """
    name = f"taskd-test-{os.getpid()}"
    for base, limit, text in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "4:memory:/{}\n"),
        ("/sys/fs/cgroup", "memory.max", "0::/{}\n"),
    ):
        group = Path(base, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text("67108864")
        except OSError:
            group.rmdir()
            continue
        try:
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group, text.format(name)
        finally:
            group.rmdir()
        return
    pytest.skip("control groups cannot be made here")


def test_a_real_kill_for_lack_of_memory_is_told(tmp_path):
    with control_group() as (group, text):
        if (
            read_counter(
                str(
                    next(
                        (
                            p
                            for p in (group / "memory.oom_control", group / "memory.events")
                            if p.exists()
                        ),
                        group,
                    )
                )
            )
            is None
        ):
            pytest.skip("this kernel does not count the kills of a control group")
        (tmp_path / "self").mkdir()
        (tmp_path / "self/cgroup").write_text(text)
        kills = MemoryKills(proc=str(tmp_path))
        victim = subprocess.Popen(
            [sys.executable, "-c", EAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert victim.stdout.read(1) == b"."
            (group / "cgroup.procs").write_text(str(victim.pid))
            victim.stdin.write(b".")
            victim.stdin.close()
            assert victim.wait(60) == -signal.SIGKILL
        finally:
            victim.kill()
            victim.wait()
            victim.stdout.close()
        reason = kills.reason(victim.pid, 0.0)
        assert reason is not None
        assert "cgroup oom_kill 0 → 1" in reason
        kills.close()


# ---------------------------------------------------------------------- what is made of it

LIFE = (3, 7)


@pytest.fixture
def box():
    with contextlib.closing(BlackBox.create()) as made:
        made.begin(4321, 7)
        yield made


@pytest.fixture
def endings(tmp_path):
    machine = Machine(tmp_path, *LAYOUTS["v2"])
    made = Endings(machine.kills())
    made.machine = machine
    yield made
    made.close()


def write(box, kind, number, code=1, *, complete=True):
    text = (
        b'[python]\nCurrent thread 0x1 (most recent call first):\n  File "x", line 1 in '
        b"f\n\n[native]\nlib(f+0x1)[0x1]\n"
    )
    values = {
        layout.WORDS_OFFSET_STATE: 2 if complete else 1,
        layout.WORDS_OFFSET_KIND: kind,
        layout.WORDS_OFFSET_NUMBER: number,
        layout.WORDS_OFFSET_CODE: code,
        layout.WORDS_OFFSET_ADDRESS: 16,
        layout.WORDS_OFFSET_TID: 4321,
        layout.WORDS_OFFSET_TEXT_BYTES: len(text),
        layout.WORDS_OFFSET_MONOTONIC_NS: int((box.progress_at + 1) * 1e9),
    }
    for offset, value in values.items():
        struct.pack_into("=q", box._map, offset, value)
    box._map[layout.TEXT_OFFSET : layout.TEXT_OFFSET + len(text)] = text


def said():
    return Fault(
        FaultKind.EXITED,
        *LIFE,
        "exit 1 after ValueError: x",
        signature="ValueError: x",
        traceback="T",
        exit_code=1,
    )


def test_a_crash_is_described_by_what_it_wrote(endings, box):
    write(box, 1, 11)
    fault = endings.words(LIFE, -11, box, 0.0)
    assert (fault.kind, fault.detail) == (
        FaultKind.CRASHED,
        "SIGSEGV at address 0x10 (SEGV_MAPERR) in the main thread",
    )
    assert fault.signature == "SIGSEGV"  # wherever the address of the next one is
    assert "in f" in fault.traceback
    assert "lib(f+0x1)" in fault.traceback


@pytest.mark.parametrize(
    ("kind", "number", "status", "detail"),
    [
        (1, 11, 139, "exit 139 after SIGSEGV at address 0x10 (SEGV_MAPERR) in the main thread"),
        (1, 11, -6, "SIGABRT after SIGSEGV at address 0x10 (SEGV_MAPERR) in the main thread"),
        (1, 11, -9, "SIGKILL after SIGSEGV at address 0x10 (SEGV_MAPERR) in the main thread"),
        (2, 3, 3, "exit 3 called in the main thread"),
        (2, -1, 255, "exit 255 called in the main thread"),
        (2, 3, -11, "SIGSEGV after exit 3 called in the main thread"),
    ],
)
def test_the_status_stays_true_if_the_words_say_something_else(
    endings, box, kind, number, status, detail
):
    write(box, kind, number)
    assert endings.words(LIFE, status, box, 0.0).detail == detail


def test_words_that_were_not_finished_are_used_and_said_to_be(endings, box):
    write(box, 1, 11, complete=False)
    assert endings.words(LIFE, -11, box, 0.0).detail.endswith(
        "in the main thread, while it wrote its last words"
    )


def test_an_exception_says_more_than_the_exit_that_it_ends_in_but_less_than_a_crash(endings, box):
    write(box, 2, 1)
    endings.said(LIFE, said())
    assert endings.words(LIFE, 1, box, 0.0) == said()
    # said once
    assert endings.words(LIFE, 1, box, 0.0).detail == "exit 1 called in the main thread"
    write(box, 1, 11)
    endings.said(LIFE, said())
    assert endings.words(LIFE, -11, box, 0.0).detail.startswith("SIGSEGV at")


def test_a_good_end_and_stacks_on_demand_say_nothing(endings, box):
    write(box, 1, 11)
    assert endings.words(LIFE, 0, box, 0.0) is None
    write(box, 3, 42)
    assert endings.words(LIFE, -11, box, 0.0) is None


def test_the_kernel_is_asked_about_a_kill_that_is_not_ours(endings, box):
    endings.machine.set(1, 1)
    endings.signalled(LIFE, signal.SIGKILL)
    assert endings.words(LIFE, -9, box, 0.0) is None
    fault = endings.words((4, 0), -9, box, 0.0)
    assert (fault.kind, fault.detail, fault.signature) == (
        FaultKind.KILLED,
        "SIGKILL, cgroup oom_kill 0 → 1",
        "SIGKILL",
    )
    assert endings.words((5, 0), -9, box, 0.0) is None
    endings.signalled((6, 0), signal.SIGTERM)
    assert endings.words((6, 0), -15, box, 0.0) is None


def test_an_interpreter_that_finds_no_script_says_which(machine) -> None:
    endings = Endings(machine.kills())
    note = "the script /data/train.py is not a readable file"
    with contextlib.closing(endings), contextlib.closing(BlackBox.create()) as box:
        endings.started((1, 2), note)
        words = endings.words((1, 2), 2, box, 100.0)
        assert words is not None
        assert (words.kind, words.detail, words.signature) == (
            FaultKind.EXITED,
            f"exit 2 of a fresh interpreter: {note}",
            "exit 2",
        )
        assert endings.words((1, 2), 2, box, 100.0) is None  # it was about that life
        for status in (0, 1, -9):
            endings.started((1, 3), note)
            assert endings.words((1, 3), status, box, 100.0) is None
