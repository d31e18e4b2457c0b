"""Stacks on demand, reading what was written, and the line that preloads the library."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.native import box_layout as layout
from taskd.native import last_words, library
from taskd.native.black_box import BlackBox
from taskd.native.last_words import Kind
from tests.native import programs
from tests.native.crashing import START, command, running, words_of

pytestmark = pytest.mark.skipif(
    library.load() is None or shutil.which("gcc") is None, reason="libtaskd or gcc is not there"
)


def take(process, box, timeout_s=programs.DEADLINE_S) -> last_words.LastWords:
    count = last_words.request(process.pid, box)
    assert count is not None
    words = last_words.wait(box, count, time.monotonic() + timeout_s)
    assert words is not None, "no answer"
    assert words.kind is Kind.STACKS
    assert words.is_main
    return words


WHEREABOUTS = {
    "a C loop with the interpreter lock": ("held.loop_for_ever()", "loop_for_ever"),
    "a C loop without it": ("crashes.loop_for_ever()", "loop_for_ever"),
    "a sleep": ("time.sleep(600)", "nanosleep" if sys.version_info >= (3, 11) else "select"),
    "a lock": ("(lock := threading.Lock()).acquire() and lock.acquire()", "PyThread_acquire_lock"),
    "a Python loop": ("\n    while True: pass", ""),
    "a read": ("sys.stdin.read()", "read"),
}


@pytest.mark.parametrize("where", WHEREABOUTS)
def test_stacks_are_taken_wherever_the_main_thread_is(box, crashes, where):
    call, function = WHEREABOUTS[where]
    # start() returns before `other` is entered, which it never is once the lock is held for ever
    body = (
        START
        + """
is_there = threading.Event()
def other():
    is_there.set()
    time.sleep(600)
threading.Thread(target=other, daemon=True).start()
is_there.wait()
"""
    )
    body += f"def innermost():\n    say('ready')\n    {call}\ninnermost()\n"
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        for _ in range(3):
            words = take(process, box)
            assert "in innermost" in words.python
            assert "in other" in words.python
        programs.wait_until(
            lambda: function in take(process, box).native, f"{function} in the native stack"
        )
        assert process.poll() is None


def test_a_stopped_process_answers_when_it_goes_on(box, crashes):
    with running(START + "say('ready')\nheld.loop_for_ever()\n", box, crashes) as process:
        programs.expect(process, "ready")
        programs.wait_until(lambda: "loop_for_ever" in take(process, box).native, "in the loop")
        process.send_signal(signal.SIGSTOP)
        programs.wait_until(
            lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T", "stopped"
        )
        count = last_words.request(process.pid, box)
        assert count is not None
        assert last_words.wait(box, count, time.monotonic() + 0.2) is None
        process.send_signal(signal.SIGCONT)
        words = last_words.wait(box, count, time.monotonic() + programs.DEADLINE_S)
        assert words is not None
        assert "loop_for_ever" in words.native


def test_stacks_are_of_the_main_thread_whoever_gets_the_signal(box, crashes):
    # The main thread lets others have it first.
    body = (
        START
        + f"""
number = int.from_bytes(box.read({layout.WORDS_OFFSET_STACKS_SIGNAL}, 8), 'little')
def other():
    say('ready')
    time.sleep(600)
threading.Thread(target=other, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
sys.stdin.readline()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
def innermost():
    time.sleep(600)
innermost()
"""
    )
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        count = last_words.request(process.pid, box)
        process.stdin.write("\n")
        process.stdin.flush()
        assert last_words.wait(box, count, time.monotonic() + programs.DEADLINE_S) is not None
        programs.wait_until(lambda: "in innermost" in take(process, box).python, "the main thread")


def test_a_thousand_requests_change_no_result(box, crashes):
    body = (
        START
        + f"""
say(crashes.compute(1000000))
say('ready')
results = set()
while int.from_bytes(box.read({layout.WORDS_OFFSET_REQUESTED}, 8), 'little') < 1000:
    results.add(crashes.compute(1000000))
    assert sum(range(1000)) == 499500
say(*results)
sys.stdin.readline()
"""
    )
    with running(body, box, crashes) as process:
        alone = programs.read_line(process)
        programs.expect(process, "ready")
        for _ in range(1000):
            take(process, box)
        assert programs.read_line(process) == alone
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(programs.DEADLINE_S) == 0
    assert last_words.read(box).requested >= 1000


def test_after_stacks_a_crash_is_told(box, crashes):
    with running(
        START + "say('ready')\nsys.stdin.readline()\ncrashes.crash_null()\n", box, crashes
    ) as process:
        programs.expect(process, "ready")
        take(process, box)
        assert last_words.read_of_end(box) is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(programs.DEADLINE_S) == -signal.SIGSEGV
    assert words_of(box).number == signal.SIGSEGV


def test_a_program_that_has_given_the_signal_up_or_another_program_is_not_ended_by_a_request(
    box, crashes
):
    for body in (
        (
            "signal.signal(int.from_bytes(box.read(%d, 8), 'little'), "
            "signal.SIG_DFL)\nsay('ready')\ntime.sleep(600)\n"
        ),
        "# %d\nos.execv('/bin/sh', ['sh', '-c', 'echo ready; exec sleep 600'])\n",
    ):
        with running(
            START + body.replace("%d", str(layout.WORDS_OFFSET_STACKS_SIGNAL)), box, crashes
        ) as process:
            programs.expect(process, "ready")
            assert last_words.request(process.pid, box) is None
            assert process.poll() is None


def test_a_crash_while_stacks_are_written_is_told(box, crashes):
    # The main thread writes its stacks again and again; the other one crashes somewhere within.
    body = (
        START
        + """
number = int.from_bytes(box.read({0}, 8), 'little')
def other():
    say('ready')
    sys.stdin.readline()
    crashes.crash_null()
threading.Thread(target=other, daemon=True).start()
while True:
    os.kill(os.getpid(), number)
""".replace("{0}", str(layout.WORDS_OFFSET_STACKS_SIGNAL))
    )
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(programs.DEADLINE_S) == -signal.SIGSEGV
    assert "crash_null" in words_of(box).native


def test_a_process_that_is_gone_or_not_armed_gives_no_stacks(box, crashes):
    assert last_words.request(os.getpid(), box) is None
    done = subprocess.Popen(
        command(START, box, crashes), env=programs.environment(), pass_fds=[box.fd]
    )
    assert done.wait(programs.DEADLINE_S) == 0
    assert last_words.request(done.pid, box) is None


# ---------------------------------------------------------------------- reading


@settings(max_examples=300)
@given(
    head=st.binary(max_size=layout.LAST_WORDS_BYTES), text=st.binary(max_size=2000), data=st.data()
)
def test_no_bytes_in_the_box_can_harm_the_reader(head, text, data):
    box = BlackBox.create()
    try:
        box._map[layout.WORDS_OFFSET_STATE : layout.WORDS_OFFSET_STATE + len(head)] = head
        box._map[layout.TEXT_OFFSET : layout.TEXT_OFFSET + len(text)] = text
        if data.draw(st.booleans()):  # mostly plausible
            for offset, most in (
                (layout.WORDS_OFFSET_STATE, 3),
                (layout.WORDS_OFFSET_KIND, 4),
                (layout.WORDS_OFFSET_NUMBER, 70),
                (layout.WORDS_OFFSET_CODE, 140),
                (layout.WORDS_OFFSET_TEXT_BYTES, 3000),
            ):
                struct.pack_into("=q", box._map, offset, data.draw(st.integers(-most, most)))
            for offset in (layout.WORDS_OFFSET_DETAIL, layout.WORDS_OFFSET_THREAD):
                box._map[offset : offset + 3] = data.draw(
                    st.sampled_from([b"a\nb", b"\t\r\x1b", b"\xff\xe2\x80", b"\x00\x00\x00"])
                )
        last_words.read_of_end(box)
        words = last_words.read(box)
        if words is not None:
            assert len(words.summary()) < 700
            assert "\n" not in words.summary()
            assert len(words.text().encode()) <= last_words.MAX_TEXT_BYTES
    finally:
        box.close()


def test_a_long_text_is_cut_so_that_both_stacks_are_seen(box):
    struct.pack_into("=qq", box._map, layout.WORDS_OFFSET_STATE, 2, 1)
    threads = [f"Thread {n}:\n" + '  File "x.py", line 1 in f\n' * 90 for n in range(30)]
    threads[17] = threads[17].replace("Thread 17", "Current thread 17")
    text = (
        "[python]\n" + "\n".join(threads) + "\n[native]\n" + "lib.so(f+0x1)[0x1]\n" * 400
    ).encode()
    struct.pack_into("=q", box._map, layout.WORDS_OFFSET_TEXT_BYTES, len(text))
    box._map[layout.TEXT_OFFSET : layout.TEXT_OFFSET + len(text)] = text
    words = last_words.read(box)
    shown = words.text()
    assert len(shown.encode()) <= last_words.MAX_TEXT_BYTES
    assert shown.startswith("Current thread 17")
    assert "Native stack" in shown
    assert shown.count("(cut)") >= 2


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("St13runtime_error", "std::runtime_error"),
        ("N3c105ErrorE", "c10::Error"),
        ("7MyError", "MyError"),
        ("i", "i"),
        ("St6vectorIiSaIiEE", "St6vectorIiSaIiEE"),
        ("", ""),
        ("999x", "999x"),
        ("N", "N"),
        ("St", "std"),
        ("0", "0"),
    ],
)
def test_plain_names_of_cpp_are_made_readable(mangled, name):
    assert last_words.demangle(mangled) == name


# ---------------------------------------------------------------------- preloading


def test_the_line_that_preloads_us_can_be_evaluated_by_a_shell():
    script = (
        f'eval "$({sys.executable} -m taskd.native)" && echo "$LD_PRELOAD" && cat /proc/self/maps'
    )
    done = subprocess.run(
        ["sh", "-c", script], env=programs.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == str(library.LIBRARY_PATH)
    assert done.stdout.count("libtaskd.so") > 1
    with_other = programs.environment() | {"LD_PRELOAD": "libm.so.6"}
    done = subprocess.run(
        ["sh", "-c", script], env=with_other, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == f"libm.so.6:{library.LIBRARY_PATH}"


def test_without_a_library_there_is_a_reason_instead_of_a_line(monkeypatch, capsys, tmp_path):
    from taskd.native.__main__ import main

    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "libtaskd.so")
    assert main() == 1
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "a b" / "libtaskd.so")
    (tmp_path / "a b" / "libtaskd.so").touch()
    assert main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "install taskd with a C compiler" in said.err
    assert "cannot be preloaded" in said.err


def test_a_feature_that_needs_preloading_says_once_what_is_missing():
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format='%(levelname)s %(message)s')
from taskd.native.library import require_preloaded
first = [require_preloaded('profiling of communication') for _ in range(3)]
print(first, require_preloaded('another'))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "[False, False, False] False"
    assert len(lines) == 3
    assert lines[0].startswith(
        "ERROR the libtaskd.so has not been loaded: profiling of "
        "communication does not work. Run `export"
    )
    env = programs.environment() | {"LD_PRELOAD": str(library.LIBRARY_PATH)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[True, True, True] True\n"
