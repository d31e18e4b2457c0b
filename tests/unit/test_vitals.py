"""What an agent sees of its workers: real processes that sleep, work, are stopped.

And an agent that slept itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from taskd.agent.vitals import activity as kernel
from taskd.agent.vitals import progress as vitals
from taskd.agent.vitals.progress import Vitals
from taskd.core.marks import Activity
from taskd.native.black_box import BlackBox, Phase
from taskd.wire import messages, translate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.core.marks import Mark

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
PTRACE_O_TRACEEXIT, PTRACE_EVENT_EXIT = 0x40, 6
AT_ITS_EXIT = (signal.SIGTRAP | PTRACE_EVENT_EXIT << 8) << 8 | 0x7F  # a status of wait(2)
WAIT_FOR_THREADS = 0x40000000  # __WALL


def ptrace(request: int, pid: int, data: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return libc.ptrace(request, pid, None, data)


@dataclasses.dataclass
class Worker:
    pid: int | None
    box: BlackBox
    incarnation: int = 0


class Program:
    """A process that does one thing; its black box says that it has hung from the beginning."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        self.box = BlackBox.create()
        self.box.begin(self.process.pid, 0)
        self.box.mark_phase(Phase.FORWARD)
        self.worker = Worker(self.process.pid, self.box)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.box.close()


@pytest.fixture
def start() -> Iterator:
    programs = []

    def run(code: str) -> Program:
        programs.append(Program(code))
        return programs[-1]

    yield run
    for program in programs:
        program.end()


def looked_at(program: Program, wanted: str, deadline_s: float = 20.0) -> Mark:
    """The first mark with that activity; looks as an agent does."""
    looks, end = Vitals(), time.monotonic() + deadline_s
    seen = []
    while time.monotonic() < end:
        (mark,) = looks.look(time.monotonic(), 0.25, {3: program.worker})
        seen.append(mark.activity)
        if mark.activity == wanted:
            return mark
        time.sleep(0.25)  # the agent's interval
    raise AssertionError(f"never {wanted}: {seen}")


@pytest.mark.parametrize("how", ["time.sleep(1000)", "select.select([], [], [], 1000)"])
def test_a_process_that_sleeps(start, how) -> None:
    mark = looked_at(
        start(f"import select, time; print('ready', flush=True); {how}"), Activity.ASLEEP
    )
    assert (mark.rank, mark.incarnation, mark.phase) == (3, 0, "forward")
    assert mark.still_s > 0.7


def test_a_process_that_works(start) -> None:
    looked_at(start("print('ready', flush=True)\nwhile True: pass"), Activity.BUSY)


def test_a_process_whose_child_works_is_busy(start) -> None:
    looked_at(
        start(
            "import subprocess, sys; print('ready', flush=True); "
            "subprocess.run([sys.executable, '-c', 'while True: pass'])"
        ),
        Activity.BUSY,
    )


def test_a_process_whose_short_children_work_one_after_the_other_is_busy(start) -> None:
    child = "import time\nend = time.process_time() + 0.05\nwhile time.process_time() < end: pass"
    looked_at(
        start(
            "import subprocess, sys; print('ready', flush=True)\nwhile True: "
            f"subprocess.run([sys.executable, '-Sc', {child!r}])"
        ),
        Activity.BUSY,
    )


def test_a_process_whose_child_has_a_session_of_its_own_is_busy(start) -> None:
    """A compiler of torch's, for example.

    The main thread waits for a thread that reads its answer.
    """
    looked_at(
        start("""if True:
        import subprocess, sys, threading
        code = "import os\\nparent = os.getppid()\\nwhile os.getppid() == parent: pass"
        subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
        print("ready", flush=True)
        threading.Event().wait()"""),
        Activity.BUSY,
    )


def test_a_process_whose_other_threads_work_is_busy(start) -> None:
    """A tokenizer, a pool of threads: the main thread waits for them."""
    looked_at(
        start("""if True:
        import hashlib, threading
        def work(data=bytes(1 << 20)):
            while True:
                hashlib.sha256(data)
        threading.Thread(target=work, daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()"""),
        Activity.BUSY,
    )


@pytest.fixture
def rival() -> Iterator[int]:
    """A processor that another process keeps busy. Its number."""
    processor = max(os.sched_getaffinity(0))
    code = (
        f"import os\nos.sched_setaffinity(0, [{processor}])\nprint('ready', flush=True)\nwhile "
        "True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield processor
        process.kill()


def test_a_thread_that_wants_to_work_is_seen_to_whether_it_gets_a_processor_or_not(
    start, rival: int
) -> None:
    """As on a machine with far more to do than processors.

    Here by a policy that lets everybody else go first. The thread needs no interpreter lock, or it
    would sleep now and then to hand it over.
    """
    program = start(f"""if True:
        import hashlib, os, threading
        thread = threading.Thread(
            target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", (1 << 31) - 1), daemon=True)
        thread.start()
        def worked_ns():
            with open(f"/proc/self/task/{{thread.native_id}}/schedstat") as file:
                return int(file.read().split()[0])
        while worked_ns() < 100_000_000:
            pass  # on its way into the hash it needs the interpreter lock
        os.sched_setaffinity(thread.native_id, [{rival}])
        os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        print("ready", flush=True)
        threading.Event().wait()""")
    pid = program.process.pid
    earlier = kernel.activity_of(time.monotonic(), pid, kernel.Processes())
    looked_at(program, Activity.BUSY)
    later = kernel.activity_of(time.monotonic(), pid, kernel.Processes())
    assert later.longest_runnable_s(earlier) > 0.8 * (later.looked_at - earlier.looked_at)


def test_threads_that_watch_and_wait_for_a_processor_now_and_then_are_no_work() -> None:
    """On a full machine each of their wakings takes a while."""
    earlier = kernel.Activity(
        100.0, 1.0, 1.0, 0.0, 0, 0, {tid: kernel.Thread(float(tid), 5) for tid in (1, 2, 3)}
    )
    now = {
        1: kernel.Thread(1.0, 5),
        2: kernel.Thread(2.3, 9),
        3: kernel.Thread(3.4, 7, is_ready=True),
        4: kernel.Thread(0.1, 1),
    }
    later = kernel.Activity(101.0, 1.0, 1.0, 0.0, 0, 0, now)
    assert later.longest_runnable_s(earlier) == pytest.approx(0.4)
    assert later.longest_runnable_s(earlier) < vitals._RUNNABLE_SHARE


def test_a_thread_that_gets_no_processor_at_all_wants_one_all_the_time() -> None:
    """The kernel counts a wait when it is over."""
    starved = kernel.Thread(3.0, 7, is_ready=True)
    looks = [kernel.Activity(at, 1.0, 1.0, 0.0, 0, 0, {1: starved}) for at in (100.0, 102.0)]
    assert looks[1].longest_runnable_s(looks[0]) == 2.0
    asleep = kernel.Activity(102.0, 1.0, 1.0, 0.0, 0, 0, {1: kernel.Thread(3.0, 7)})
    assert asleep.longest_runnable_s(looks[0]) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        "__import__('subprocess').run(['sleep', '1000'])",
        "a = __import__('socket').socketpair(); a[0].recv(1)",
        "a = __import__('socket').socketpair(); a[0].settimeout(1000); a[0].recv(1)",
    ],
    ids=["child", "socket", "socket with a time-out"],
)
def test_a_process_that_waits_for_something_outside(start, call: str) -> None:
    """An upload by a program, a logger that waits for its server."""
    looked_at(start(f"print('ready', flush=True); {call}"), Activity.DISK)


def test_a_process_one_of_whose_threads_waits_for_a_disk(start) -> None:
    """The main thread waits for a thread that writes a large file to its end (fsync).

    Here for one that the kernel holds in the same state, until the child that it made ends.
    """
    program = start("""if True:
        import ctypes, platform, signal, threading, time
        number, libc = {"x86_64": 56, "aarch64": 220}[platform.machine()], ctypes.CDLL(None)
        def wait_uninterruptibly(clone_vfork=0x4000):
            if libc.syscall(number, clone_vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
                time.sleep(1000)
        threading.Thread(target=wait_uninterruptibly, daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()""")
    mark = looked_at(program, Activity.DISK)
    pid = program.process.pid
    states = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
            states.append(file.read().rpartition(")")[2].split()[0])
    assert sorted(states) == ["D", "S"]
    assert mark.still_s > 0.4


def test_one_that_has_just_done_something_has_slept_since_then_only(start) -> None:
    """It writes a file bit by bit, with pauses of 1.5 s by the clock of the looks."""
    program = start("""if True:
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        print("ready", flush=True)
        while signal.sigwait([signal.SIGUSR1]):
            open("/dev/null", "w").write("1")
            print("written", flush=True)""")
    pid, vitals, began, seen = program.process.pid, Vitals(), time.monotonic(), []
    for number in range(24):
        if number % 6 == 5:
            os.kill(pid, signal.SIGUSR1)
            assert program.process.stdout.readline() == b"written\n"
        while kernel.status_of(pid).state != "S":
            time.sleep(0.001)
        (mark,) = vitals.look(began + 0.25 * number, 0.25, {3: program.worker})
        seen.append(mark)
    assert Activity.BUSY in {mark.activity for mark in seen}
    asleep = [mark.still_s for mark in seen if mark.activity == Activity.ASLEEP]
    assert asleep
    assert max(asleep) < 2.0
    assert seen[-1].still_s > 5.0 or seen[-1].activity == Activity.ASLEEP


def test_one_that_was_stopped_begins_anew_when_it_is_let_go(start) -> None:
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    vitals = Vitals()
    os.kill(program.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    stopped_at = time.monotonic()
    for after_s in range(10):
        (mark,) = vitals.look(stopped_at + after_s, 1.0, {3: program.worker})
    assert mark.activity == Activity.STOPPED
    assert mark.still_s > 8.5
    os.kill(program.process.pid, signal.SIGCONT)
    os.waitid(os.P_PID, program.process.pid, os.WCONTINUED)
    (mark,) = vitals.look(stopped_at + 10.0, 1.0, {3: program.worker})
    assert mark.still_s == pytest.approx(1.0)


def test_one_in_pythons_debugger_is_held(start) -> None:
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    program.box.mark_python(waiting=False, debugged=True)
    looked_at(program, Activity.TRACED)


def test_a_process_that_reads_a_little_now_and_then_is_busy(start) -> None:
    looked_at(
        start(
            "import time; print('ready', flush=True)\nwhile True:\n  "
            "open('/proc/self/stat').read(); time.sleep(0.3)"
        ),
        Activity.BUSY,
    )


def test_a_stopped_process(start) -> None:
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    os.kill(program.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    looked_at(program, Activity.STOPPED)


def test_a_process_under_a_debugger(start) -> None:
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    if ptrace(PTRACE_SEIZE, program.process.pid) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    looked_at(program, Activity.TRACED)


def test_a_killed_process_that_the_kernel_has_not_let_go_of_is_ending(start) -> None:
    """As one that gives back a large memory: a thread of it is held at its end by ptrace."""
    program = start("""if True:
        import threading, time
        thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        thread.start()
        print("ready", flush=True)
        while True: pass""")
    pid = program.process.pid
    (held,) = {int(name) for name in os.listdir(f"/proc/{pid}/task")} - {pid}
    if ptrace(PTRACE_SEIZE, held, PTRACE_O_TRACEEXIT) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    looked_at(program, Activity.BUSY)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(held, WAIT_FOR_THREADS) == (held, AT_ITS_EXIT)
    looked_at(program, Activity.ENDING)
    assert program.process.poll() is None
    assert ptrace(PTRACE_DETACH, held) == 0
    assert program.process.wait() == -signal.SIGKILL


def test_a_process_that_has_ended_is_no_error(start) -> None:
    program = start("print('ready', flush=True)")
    program.process.wait()
    vitals = Vitals()
    for _ in range(2):
        (mark,) = vitals.look(time.monotonic() + 5.0, 0.25, {0: program.worker})
        assert mark.activity == Activity.UNKNOWN


def test_a_worker_that_goes_on_is_not_looked_up() -> None:
    box = BlackBox.create()
    box.begin(1, 0)
    (mark,) = Vitals().look(time.monotonic(), 1.0, {0: Worker(1, box)})
    assert mark.activity == Activity.UNKNOWN
    assert mark.still_s < 0.7
    box.close()


def test_an_agent_that_slept_does_not_blame_its_workers() -> None:
    box = BlackBox.create()
    box.begin(1, 0)
    box.mark_phase(Phase.FORWARD)
    vitals, began = Vitals(), time.monotonic()
    vitals.look(began, 1.0, {0: Worker(None, box)})
    (mark,) = vitals.look(began + 60.0, 1.0, {0: Worker(None, box)})
    assert mark.still_s == 0
    (mark,) = vitals.look(began + 61.0, 1.0, {0: Worker(None, box)})
    assert mark.still_s == pytest.approx(1.0)
    assert vitals.is_urgent
    vitals.look(began + 62.0, 5.0, {0: Worker(None, box)})
    (mark,) = vitals.look(began + 67.0, 1.0, {0: Worker(None, box)})
    assert mark.still_s == pytest.approx(7.0)
    assert not vitals.is_urgent  # it stands for long: once a second is enough
    box.close()


def test_a_worker_that_sets_up_or_has_returned_stands_in_nobody_s_way() -> None:
    box = BlackBox.create()
    box.begin(1, 0)
    vitals, now = Vitals(), time.monotonic()
    for phase in (Phase.BOOT, Phase.ENTERED, Phase.RETURNED, Phase.PAUSED):
        box.mark_phase(phase)
        for later in range(10):
            vitals.look(now + later, 1.0, {0: Worker(None, box)})
        assert not vitals.is_urgent
    box.close()


def test_a_damaged_box_is_told_of_once_and_its_marks_can_be_sent(caplog, monkeypatch) -> None:
    """Generation -7 of a living worker.

    Every heartbeat of its node was refused as malformed, and the node taken for dead.
    """
    monkeypatch.setattr(logging.getLogger("taskd"), "propagate", True)
    box = BlackBox.create()
    box.begin(1, 0)
    box.mark_phase(Phase.FORWARD)
    vitals, now, worker = Vitals(), time.monotonic(), Worker(1, box)
    box.mark_generation(-7)
    box.mark_version(-7)
    for later in range(3):
        marks_seen = vitals.look(now + later, 1.0, {3: worker, 4: Worker(1, box)})
        message = messages.Heartbeat(marks_seen)
        translate.check(message)
        assert [(mark.generation, mark.version) for mark in marks_seen] == [(0, None), (0, None)]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "the black box of rank 3 (incarnation 0) is damaged: version -7 cannot be" in said[0]
    worker.incarnation = 1
    vitals.look(now + 3, 1.0, {3: worker})
    assert (
        len([record for record in caplog.records if "rank 3 (incarnation 1)" in record.message])
        == 1
    )
    box.close()
