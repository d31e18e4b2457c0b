"""The death alarm with real processes.

It rings for every end of a worker, once, and for nothing else.
"""

import logging
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from taskd.native import death_alarm, library
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import DeathAlarm
from tests.native.programs import (
    GUARD,
    READ,
    ROOT,
    ending,
    environment,
    expect,
    is_readable,
    read_line,
    start,
    wait_until,
)

pytestmark = pytest.mark.slow
needs_library = pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here")


@pytest.fixture
def box():
    box = BlackBox.create()
    yield box
    box.close()


@pytest.fixture
def alarm():
    alarm = DeathAlarm()
    yield alarm
    alarm.close()


def deaths(alarm):
    assert is_readable(alarm.fd), "the alarm did not ring"
    return alarm.read()


@needs_library
def test_it_rings_for_a_killed_worker_with_token_and_time(box, alarm):
    worker = start(GUARD + READ, box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        assert alarm.watch((1 << 64) - 1, box)
        assert not is_readable(alarm.fd, 0)
        before = time.monotonic()
        worker.kill()
        [(token, died_at)] = deaths(alarm)
    assert token == (1 << 64) - 1
    assert before <= died_at <= time.monotonic()
    assert alarm.read() == []


@needs_library
def test_a_watch_that_comes_before_the_guard_waits_for_it(box, alarm):
    worker = start(READ + GUARD + READ, box.fd)
    with ending(worker):
        assert alarm.watch(1, box)
        worker.stdin.write("go\n")
        worker.stdin.flush()
        expect(worker, "guarded True")
        assert not is_readable(alarm.fd, 0)
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]


@needs_library
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "os._exit(3)",
        "raise ValueError",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os.abort()",
        "os.execvp('true', ['true'])",
        "threading.Thread(target=os._exit, args=(0,)).start()",
    ],
)
def test_it_rings_however_the_worker_ends(box, alarm, end):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    worker = start(GUARD + READ + end, box.fd, stderr=subprocess.DEVNULL)
    with ending(worker):
        expect(worker, "guarded True")
        alarm.watch(1, box)
        worker.stdin.write("go\n")
        worker.stdin.flush()
        assert [token for token, _ in deaths(alarm)] == [1]


@needs_library
def test_a_forked_child_that_outlives_the_worker_is_not_taken_for_it(box, alarm):
    life_read, life_write = os.pipe()
    fork = (
        "child = os.fork()\nif child == 0:\n    say('child', os.getpid())\n    "
        "sys.stdin.readline()\n    os._exit(0)\n"
    )
    worker = start(GUARD + fork + "os.waitpid(child, 0)", box.fd, life_read)
    with ending(worker):
        expect(worker, "guarded True")
        child = int(read_line(worker).split()[1])
        child_fd = os.pidfd_open(child)
        alarm.watch(1, box)
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]
        assert not is_readable(child_fd, 0), (
            "the child must still be there for this test to say anything"
        )
        worker.stdin.close()
        assert is_readable(child_fd)
        os.close(child_fd)
    os.close(life_read)
    os.close(life_write)


@needs_library
def test_forked_children_can_neither_ring_the_alarm_nor_guard_the_box(box, alarm, caplog):
    fork = """
for end in (0, signal.SIGKILL):
    child = os.fork()
    if child == 0:
        say('child', guard(box, None), guard(BlackBox.attach(int(sys.argv[1])), None))
        os.kill(os.getpid(), end)
        os._exit(0)
    os.waitpid(child, 0)
    say('reaped')
"""
    worker = start(GUARD + fork + READ, box.fd, stderr=subprocess.DEVNULL)
    with ending(worker):
        alarm.watch(1, box)
        expect(worker, "guarded True")
        for _ in range(2):
            expect(worker, "child False False")
            expect(worker, "reaped")
        assert not is_readable(alarm.fd, 0)
        worker.kill()
        assert len(deaths(alarm)) == 1


@needs_library
def test_threads_that_end_do_not_ring(box, alarm):
    body = """
for _ in range(20):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
say('ended')
"""
    worker = start(GUARD + body + READ, box.fd)
    with ending(worker):
        alarm.watch(1, box)
        expect(worker, "guarded True")
        expect(worker, "ended")
        assert not is_readable(alarm.fd, 0)
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]


@needs_library
def test_a_stopped_worker_does_not_ring_and_makes_no_marks(box, alarm):
    worker = start(GUARD + READ, box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        alarm.watch(1, box)
        worker.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(worker.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        marked = box.alive_at
        assert not is_readable(alarm.fd, 0.5)
        assert box.alive_at == marked
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: box.alive_at > marked, "a new mark")
        assert not is_readable(alarm.fd, 0)
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]


@needs_library
@pytest.mark.parametrize(
    ("limit", "reason"),
    [("RLIMIT_NPROC", "Resource temporarily unavailable"), ("RLIMIT_AS", "Cannot allocate memory")],
)
def test_a_guard_that_cannot_start_is_one_line_and_the_worker_goes_on(box, alarm, limit, reason):
    # Root is exempt from the first limit, hence the other user.
    body = f"""
import logging, resource
from taskd.native import library
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
library.load()
if os.getuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.{limit}, (1, 1))
"""
    worker = start(body + GUARD + READ, box.fd)
    with ending(worker):
        alarm.watch(1, box)
        line = read_line(worker)
        assert line.startswith(
            "WARNING no death alarm in this process: taskd_guard_start failed"
        ), line
        assert reason in line
        expect(worker, "guarded False")
        assert box.alive_at is None
        worker.kill()
        worker.wait()
        assert not is_readable(alarm.fd, 0), (
            "nothing was guarded: only the pidfd tells of this death"
        )
        alarm.unwatch(1)


@needs_library
def test_each_of_many_lives_rings_for_itself(alarm):
    boxes = [BlackBox.create() for _ in range(4)]
    workers = [start(GUARD + READ, box.fd) for box in boxes]
    with ending(*workers):
        for token, (worker, box) in enumerate(zip(workers, boxes, strict=True)):
            expect(worker, "guarded True")
            alarm.watch(token, box)
        for token in (2, 0, 3, 1):
            workers[token].kill()
            assert [dead for dead, _ in deaths(alarm)] == [token]
    for box in boxes:
        box.close()


@needs_library
def test_two_agents_may_watch_one_life_and_late_ones_learn_of_it_too(box, alarm):
    other = DeathAlarm()
    worker = start(GUARD + READ, box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        alarm.watch(1, box)
        other.watch(2, box)
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]
        assert [token for token, _ in deaths(other)] == [2]
    alarm.watch(3, box)
    assert [token for token, _ in deaths(alarm)] == [3]
    other.close()


@needs_library
def test_the_box_may_be_closed_on_both_sides_while_the_alarm_is_armed(box, alarm):
    worker = start(GUARD + "box.close()\nsay('closed')\n" + READ, box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        expect(worker, "closed")
        alarm.watch(1, box)
        box.close()
        worker.kill()
        assert [token for token, _ in deaths(alarm)] == [1]
        alarm.unwatch(1)


@needs_library
def test_unwatch_lets_a_watch_go_that_never_saw_a_guard(box):
    ours, theirs = os.pipe()
    binding = library.load()
    binding.watch(box.fd, 1, theirs)
    os.close(theirs)
    binding.unwatch(box.fd)
    assert is_readable(ours)
    assert os.read(ours, 1) == b"", "end of file: the watch has let go of its end without a report"
    os.close(ours)


@needs_library
def test_a_box_that_was_given_up_cannot_be_guarded_any_more(box, alarm, caplog):
    alarm.watch(1, box)
    alarm.unwatch(1)
    alarm.unwatch(1)
    assert not death_alarm.guard(box, None)
    assert "busy" in caplog.text


@needs_library
def test_a_closed_alarm_does_not_disturb_the_death(box):
    alarm = DeathAlarm()
    worker = start(GUARD + READ, box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        alarm.watch(1, box)
        alarm.close()
        alarm.close()
        worker.kill()


@needs_library
def test_the_guard_marks_the_time_while_the_worker_lives(box):
    worker = start(GUARD + "hold_the_gil_for_ever()", box.fd)
    with ending(worker):
        expect(worker, "guarded True")
        first = box.alive_at
        assert first <= time.monotonic()
        wait_until(lambda: box.alive_at > first, "a new mark")


@needs_library
def test_wrong_descriptors_are_refused_with_a_reason(box, alarm, caplog, tmp_path):
    closed = os.dup(box.fd)
    os.close(closed)
    assert not death_alarm.guard(box, closed)
    assert "Bad file descriptor" in caplog.text
    binding = library.load()
    with (
        (tmp_path / "short").open("w+b") as file,
        pytest.raises(Exception, match="Invalid argument"),
    ):
        binding.watch(file.fileno(), 1, alarm.fd)
    assert BlackBox.attach(os.dup(box.fd)).alive_at is None, (
        "a refused guard leaves the box as it was"
    )


CTYPES_WATCH = """
import os, sys
from taskd.native import _ctypes_binding as binding
from taskd.native.black_box import BlackBox
box = BlackBox.create()
if os.fork() == 0:
    binding.guard_start(box.fd, -1)
    os._exit(0)
ours, theirs = os.pipe()
binding.watch(box.fd, 7, theirs)
sys.exit(0 if os.read(ours, 24)[0] == 7 else 1)
"""


@needs_library
def test_without_the_compiled_binding_ctypes_does_the_same():
    from taskd.native import _binding, _ctypes_binding

    assert _ctypes_binding.BUILT_FOR_ABI == _binding.BUILT_FOR_ABI == _ctypes_binding.abi_version()
    assert _ctypes_binding.layout_value("box_bytes") == _binding.layout_value("box_bytes")
    done = subprocess.run(
        [sys.executable, "-c", CTYPES_WATCH], env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0


# ---------------------------------------------------------------- without the library


@pytest.fixture
def fresh_load():
    library.find.cache_clear()
    yield
    library.find.cache_clear()


def test_without_the_library_nothing_rings_and_a_line_says_so(fresh_load, monkeypatch, caplog, box):
    monkeypatch.setenv("TASKD_NATIVE", "off")
    caplog.set_level(logging.INFO)
    alarm = DeathAlarm()
    assert not alarm.available
    assert not alarm.watch(1, box)
    assert not death_alarm.guard(box, None)
    assert not is_readable(alarm.fd, 0)
    assert alarm.read() == []
    alarm.unwatch(1)
    alarm.close()
    assert caplog.records == []
    library.tell_absence()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "switched off by TASKD_NATIVE" in caplog.text


def test_a_library_that_is_not_there_is_one_warning(fresh_load, monkeypatch, caplog):
    for name in ("taskd.native._binding", "taskd.native._ctypes_binding"):
        monkeypatch.setitem(sys.modules, name, None)
    assert library.load() is None
    library.tell_absence()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be loaded" in caplog.text


@needs_library
def test_a_library_of_another_version_is_one_warning(fresh_load, monkeypatch, caplog):
    binding = sys.modules["taskd.native._binding"]
    built_for = binding.BUILT_FOR_ABI
    monkeypatch.setattr(binding, "BUILT_FOR_ABI", 99)
    assert library.load() is None
    library.tell_absence()
    assert f"its ABI version is {built_for}, 99 is needed" in caplog.text


def test_importing_the_native_side_loads_neither_torch_nor_zmq():
    code = (
        "import sys, taskd, taskd.native.death_alarm; sys.exit(bool({'torch', 'zmq'} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment(), cwd=ROOT, timeout=60, check=False
        ).returncode
        == 0
    )
