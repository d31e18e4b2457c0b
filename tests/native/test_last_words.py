"""Last words: real faults in real processes.

Each ends as it would have ended without us, and leaves its story in the box.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from taskd.native import box_layout as layout
from taskd.native import last_words, library
from taskd.native.black_box import BlackBox, Phase
from taskd.native.last_words import Kind
from tests.native import programs
from tests.native.crashing import START, run, running, words_of

pytestmark = pytest.mark.skipif(
    library.load() is None or shutil.which("gcc") is None, reason="libtaskd or gcc is not there"
)


needs_python_in_a_library = pytest.mark.skipif(
    "/libpython" not in Path("/proc/self/maps").read_text(),
    reason="a preloaded function cannot stand before one that is in the interpreter's own file",
)

# ---------------------------------------------------------------------- each way to crash

FAULTS = [
    ("crashes.crash_null()", signal.SIGSEGV, "SIGSEGV at address 0x0 (SEGV_MAPERR)", "crash_null"),
    ("crashes.crash_bus()", signal.SIGBUS, "(BUS_ADRERR)", "crash_bus"),
    ("crashes.crash_divide()", signal.SIGFPE, "(FPE_INTDIV)", "crash_divide"),
    ("crashes.crash_illegal()", signal.SIGILL, "SIGILL at address", "crash_illegal"),
    ("crashes.crash_abort()", signal.SIGABRT, "SIGABRT in the main thread", "crash_abort"),
    ("crashes.crash_raise(11)", signal.SIGSEGV, "SIGSEGV in the main thread", "crash_raise"),
    ("crashes.crash_raise(31)", signal.SIGSYS, "SIGSYS in the main thread", "crash_raise"),
    ("crashes.crash_trap()", signal.SIGTRAP, "SIGTRAP in the main thread", "crash_trap"),
    ("crashes.crash_jump()", signal.SIGSEGV, "SIGSEGV at address 0x0", "crash_jump"),
    ("crashes.crash_overflow(0)", signal.SIGSEGV, "SIGSEGV at address", "crash_overflow"),
    ("ctypes.string_at(0)", signal.SIGSEGV, "SIGSEGV at address 0x0", "ffi_call"),
    ("os.abort()", signal.SIGABRT, "SIGABRT in the main thread", "abort"),
]
X86_ONLY = {"crashes.crash_divide()"}


@pytest.mark.parametrize(
    ("fault", "number", "summary", "function"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_each_crash_leaves_its_signal_and_both_stacks(
    box, crashes, fault, number, summary, function
):
    if fault in X86_ONLY and os.uname().machine != "x86_64":
        pytest.skip("a division by zero is no fault here")
    body = f"def innermost():\n    {fault}\n"
    without = run(body + "innermost()\n", box, crashes)
    assert without.returncode == -number
    assert last_words.read(box) is None
    done = run(START + body + "innermost()\n", box, crashes)
    assert (done.returncode, done.stdout, done.stderr) == (
        without.returncode,
        without.stdout,
        without.stderr,
    )
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.SIGNAL, number)
    assert summary in words.summary()
    assert words.is_main
    assert "Current thread" in words.python
    assert "in innermost" in words.python
    assert function in words.native, words.native
    assert "in innermost" in words.text()
    assert function in words.text()


@pytest.mark.parametrize(
    ("function", "name"),
    [("crash_throw", "std::runtime_error"), ("crash_throw_own", "faults::Worst")],
)
def test_an_uncaught_exception_of_cpp_tells_its_type(box, crashes, throws, function, name):
    loaded_before = f"throws = ctypes.CDLL(sys.argv[3])\n{START}throws.{function}()\n"
    loaded_later = f"{START}throws = ctypes.CDLL(sys.argv[3])\nthrows.{function}()\n"
    for body in (loaded_before, loaded_later):
        assert run(body, box, crashes, throws).returncode == -signal.SIGABRT
        words = words_of(box)
        assert words.detail == name
        assert f"uncaught C++ exception {name}" in words.summary()
        assert "crash_throw" in words.native
        box.close()
        box = BlackBox.create()
    box.close()


def test_a_crash_in_another_thread_names_it(box, crashes):
    done = run(START + "crashes.crash_in_thread(crashes.crash_null)\n", box, crashes)
    assert done.returncode == -signal.SIGSEGV
    words = words_of(box)
    assert not words.is_main
    assert words.thread == "crasher"
    assert words.summary() == "SIGSEGV at address 0x0 (SEGV_MAPERR) in thread crasher"
    assert "crash_null" in words.native
    assert 'File "<string>"' in words.python  # the main thread's, which waits


def test_a_crash_in_a_python_thread_shows_that_thread_first(box, crashes):
    body = """
def in_thread():
    crashes.crash_null()
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""
    assert run(START + body, box, crashes).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert "in in_thread" in words.python.partition("\n\n")[0]
    assert words.python.startswith("Current thread")
    assert "in <module>" in words.python.partition("\n\n")[2]


def test_many_threads_that_crash_at_once_leave_one_story(box, crashes):
    done = run(START + "crashes.crash_many(16)\n", box, crashes)
    assert done.returncode == -signal.SIGSEGV
    words = words_of(box)
    assert words.number == signal.SIGSEGV
    assert "crash_null" in words.native


def without_addresses(text: str) -> str:
    """But for the one that is the same every time."""
    return re.sub(r"0x[0-9a-f]+", "0x…", text)


# ---------------------------------------------------------------------- those who were there, and
# those who came later


@pytest.mark.parametrize("install", ["handle", "handle_once"])
@pytest.mark.parametrize(
    "fault", ["crash_null()", "crash_divide()", "crash_abort()", "crash_raise(11)"]
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_of_the_program_is_called_as_without_us(box, crashes, install, fault, order):
    number = {"crash_null()": 11, "crash_divide()": 8, "crash_abort()": 6, "crash_raise(11)": 11}[
        fault
    ]
    installed, crash = f"crashes.{install}({number})\n", f"crashes.{fault}\n"
    # raise() comes back to a handler that restored the default; the second one ends the process.
    again = "crashes.crash_raise(11)\n" if fault == "crash_raise(11)" else ""
    without = run(installed + crash + again, box, crashes)
    assert without.returncode == -number
    assert "earlier handler" in without.stdout
    with_us = run(
        installed + START + crash + again
        if order == "before"
        else START + installed + crash + again,
        box,
        crashes,
    )
    assert (with_us.returncode, with_us.stderr) == (without.returncode, without.stderr)
    assert without_addresses(with_us.stdout) == without_addresses(without.stdout)
    # one that comes later and restores the default, not what it found, keeps us out of it
    if order == "before":
        assert words_of(box).number == number


@pytest.mark.parametrize(
    "fault",
    ["crash_null()", "crash_abort()", "crash_overflow(0)", "crash_in_thread(crashes.crash_null)"],
)
@pytest.mark.parametrize("order", ["before", "after", "not warned"])
def test_faulthandler_writes_too(box, crashes, fault, order):
    enable = "faulthandler.enable()\n"
    start = {
        "before": enable + START,
        "after": START + enable,
        # As if its alternate stack, a small one, had come later than ours.
        "not warned": "last_words._reserve_stack_of_faulthandler = lambda: None\n" + START + enable,
    }[order]
    without = run(enable + f"crashes.{fault}\n", box, crashes)
    done = run(start + f"crashes.{fault}\n", box, crashes)
    assert done.returncode == without.returncode
    assert done.stderr.splitlines()[0] == without.stderr.splitlines()[0]
    assert "Fatal Python error" in done.stderr
    words = last_words.read(box)
    assert words is not None
    assert words.number == -done.returncode
    if order != "not warned":
        assert words.complete
        assert "crash_" in words.native
        assert "<module>" in words.python


def test_a_python_handler_is_called_as_without_us(box, crashes):
    body = (
        "signal.signal(signal.SIGABRT, lambda *_: (say('python handler'), "
        "os._exit(7)))\n{}os.kill(os.getpid(), 6)\ntime.sleep(20)\n"
    )
    assert run(body.format(""), box, crashes).returncode == 7
    done = run(body.format(START), box, crashes)
    assert (done.returncode, done.stdout) == (7, "python handler\n")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_that_mends_its_faults_goes_on(box, crashes, order):
    install = "crashes.handle_and_mend()\n"
    done = run(
        (install + START if order == "before" else START + install) + "say(crashes.mend(), "
        "crashes.mend())\n",
        box,
        crashes,
    )
    assert (done.returncode, done.stdout) == (0, "2 2\n")
    # The record of a fault that was no end does not stay true: training went on behind it.
    if order == "before":
        assert last_words.read(box) is not None
        box.mark_phase(Phase.STEP)
        words = last_words.read(box)
        struct.pack_into(
            "=q", box._map, layout.WORDS_OFFSET_MONOTONIC_NS, int((words.written_at - 60) * 1e9)
        )
    assert last_words.read_of_end(box) is None


def test_an_ignored_signal_stays_ignored_and_a_fault_does_not(box, crashes):
    body = "signal.signal(signal.SIGSEGV, signal.SIG_IGN)\n" + START
    done = run(body + "os.kill(os.getpid(), 11)\nsay('alive')\n", box, crashes)
    assert (done.returncode, done.stdout) == (0, "alive\n")
    assert last_words.read(box) is None
    assert run(body + "crashes.crash_null()\n", box, crashes).returncode == -signal.SIGSEGV
    assert words_of(box).number == signal.SIGSEGV


def test_a_signal_from_somebody_else_is_told_as_such(box, crashes):
    with running(START + "say('ready')\ntime.sleep(60)\n", box, crashes) as process:
        programs.expect(process, "ready")
        process.send_signal(signal.SIGSEGV)
        assert process.wait(programs.DEADLINE_S) == -signal.SIGSEGV
    assert f"SIGSEGV sent by process {os.getpid()} (SI_USER)" in words_of(box).summary()


def test_a_handler_that_turns_a_crash_into_an_exit_is_seen_through(box, crashes):
    done = run(
        "crashes.handle_by_exit(11)\n" + START + "crashes.crash_null()\n",
        box,
        crashes,
        preload=True,
    )
    assert done.returncode == 139
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.SIGNAL, signal.SIGSEGV)


# ---------------------------------------------------------------------- what may go wrong while
# writing


@pytest.mark.parametrize(
    "hurt", ["for (;;) {}", "*(volatile int *)0 = 1;", "__builtin_trap();", "abort();"]
)
def test_a_stage_that_hangs_or_crashes_does_not_change_the_end(box, crashes, tmp_path, hurt):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text(
        f"#include <stdlib.h>\nvoid *__cxa_current_exception_type(void) {{ {hurt} return 0; }}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"ctypes.CDLL({str(made)!r}, mode=ctypes.RTLD_GLOBAL)\n{START}crashes.crash_abort()\n"
    began = time.monotonic()
    assert run(body, box, crashes).returncode == -signal.SIGABRT
    assert time.monotonic() - began < programs.DEADLINE_S / 2
    words = words_of(box)
    assert "crash_abort" in words.native
    assert words.detail == ""


@needs_python_in_a_library
@pytest.mark.parametrize("hurt", ["for (;;) {}", "*(volatile int *)0 = 1;"])
def test_an_interpreter_that_cannot_be_looked_at_does_not_keep_the_native_stack_away(
    box, crashes, tmp_path, hurt
):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    # Preloaded, so that it is found before the interpreter's own; it does harm only when the
    # handler asks.
    source.write_text(
        f"int is_armed; int Py_IsInitialized(void) {{ if (is_armed) {{ {hurt} }} return 1; }}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = START + (
        "ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed').value = 1\ncrashes.crash_null()\n"
    )
    assert run(body, box, crashes, LD_PRELOAD=str(made)).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert words.python == ""
    assert "crash_null" in words.native


@needs_python_in_a_library
def test_a_crash_in_a_stage_of_an_exit_that_all_signals_are_blocked_for_does_not_change_the_status(
    box, crashes, tmp_path
):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text(
        "int is_armed; int Py_IsInitialized(void) { if (is_armed) *(volatile int *)0 "
        "= 1; return 1; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = (
        START
        + """
ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed').value = 1
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
crashes.exit_here(1, 3)
"""
    )
    assert run(body, box, crashes, LD_PRELOAD=f"{made}:{library.LIBRARY_PATH}").returncode == 3
    words = words_of(box)
    assert (words.kind, words.number, words.python) == (Kind.EXIT, 3, "")
    assert "exit_here" in words.native


@pytest.mark.parametrize("how", ["crashes.crash_abort()", "crashes.crash_null()"])
def test_where_no_timer_can_end_a_stage_no_lock_of_the_allocator_is_taken(
    box, crashes, tmp_path, how
):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text("""
#include <stddef.h>
int is_armed;
void *__libc_malloc(size_t);
void *malloc(size_t size) { while (is_armed) { } return __libc_malloc(size);
    }   /* as if this thread had its lock */
""")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"""
from taskd.native import library
library.load().last_words_start(box.fd, 0)
crash = {how.removesuffix("()")}
armed = ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed')
ctypes.PyDLL(sys.argv[2]).set_and_call(ctypes.byref(armed), crash)
"""
    assert (
        run(body, box, crashes, LD_PRELOAD=str(made)).returncode
        == {"n": -signal.SIGSEGV, "a": -signal.SIGABRT}[how[14]]
    )
    assert "crash_" in words_of(box).native


def test_a_program_that_closes_all_descriptors_still_leaves_signal_and_frames(
    box, crashes, tmp_path
):
    (tmp_path / "other").write_bytes(b"")
    body = (
        START
        + f"""
os.closerange(3, 1000)
for _ in range(20):     # numbers are used again, for something that is not ours
    other = os.open({str(tmp_path / "other")!r}, os.O_RDWR)
crashes.crash_null()
"""
    )
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert words.summary() == "SIGSEGV at address 0x0 (SEGV_MAPERR) in the main thread"
    assert (words.python, words.native) == ("", "")
    assert len(words.frames) > 3
    assert f"[{words.frames[0]:#x}]" in words.text()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_limit_on_the_size_of_files_does_not_change_the_end(box, crashes):
    body = (
        START
        + """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
crashes.crash_null()
"""
    )
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert (words.python, words.native) == ("", "")
    assert len(words.frames) > 3


def test_a_thread_with_a_small_stack_can_tell_too(box, crashes):
    body = START + (
        "threading.stack_size(64 * 1024)\nt = "
        "threading.Thread(target=crashes.crash_null)\nt.start()\nt.join()\n"
    )
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    assert "crash_null" in words_of(box).native


# ---------------------------------------------------------------------- children and successors


@pytest.mark.parametrize(
    "how",
    [
        "crashes.crash_null()",
        "os.abort()",
        "os._exit(9)",
        "crashes.exit_here(0, 9)",
        "os.kill(os.getpid(), box_signal)",
    ],
)
def test_what_a_forked_child_does_is_not_in_the_box(box, crashes, how):
    body = (
        START
        + f"""
box_signal = int.from_bytes(box.read({layout.WORDS_OFFSET_STACKS_SIGNAL}, 8), 'little')
pid = os.fork()
if pid == 0:
    {how}
    os._exit(5)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    done = run(body, box, crashes, preload=True)
    expected = {
        "crashes.crash_null()": "-11",
        "os.abort()": "-6",
        "os.kill(os.getpid(), box_signal)": "5",
    }.get(how, "9")
    assert (done.returncode, done.stdout) == (0, f"{expected}\n")
    assert last_words.read(box) is None


def test_a_child_of_vfork_does_not_write_for_its_parent(box, crashes):
    body = START + (
        "pid = held.vfork_exit(9)\nsay(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = run(body, box, crashes, preload=True)
    assert (done.returncode, done.stdout) == (0, "9\n")
    assert last_words.read(box) is None


def test_a_program_started_by_exec_is_none_of_ours(box, crashes):
    body = START + "os.execv('/bin/sh', ['sh', '-c', 'kill -SEGV $$; exit 3'])\n"
    assert run(body, box, crashes, preload=True).returncode == -signal.SIGSEGV
    assert last_words.read(box) is None


def test_it_starts_once(box, crashes):
    done = run(START + "say(last_words.start(box))\n", box, crashes)
    assert done.stdout == "False\n"
    assert "will leave no stacks" in done.stderr


def test_the_signals_by_which_faulthandler_is_found_are_free_again(box, crashes):
    body = """
before = last_words._signals('self', b'SigCgt')
assert last_words.start(box)
say(*(last_words._signals('self', b'SigCgt') - before))
"""
    taken = {int(number) for number in run(body, box, crashes).stdout.split()}
    number = last_words._word(box, layout.WORDS_OFFSET_STACKS_SIGNAL)
    assert {one for one in taken if one > signal.SIGRTMIN} == {number}


def test_where_all_real_time_signals_are_in_use_a_crash_leaves_its_native_stack(box, crashes):
    body = (
        "for number in range(signal.SIGRTMIN, signal.SIGRTMIN + 9):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
    )
    done = run(body + START + "crashes.crash_null()\n", box, crashes)
    assert done.returncode == -signal.SIGSEGV
    assert "no Python stacks: all real-time signals are in use" in done.stderr
    words = words_of(box)
    assert words.python == ""
    assert "crash_null" in words.native


def test_what_is_no_box_is_refused_and_nothing_is_installed(box, crashes):
    body = """
from taskd.native import library
before = open('/proc/self/status').read().partition('SigCgt')[2][:20]
fd = os.memfd_create('none')
for arguments in ((fd, 0), (-1, 0), (box.fd, 10)):
    try:
        library.load().last_words_start(*arguments)
    except Exception as error:
        say(type(error).__name__)
assert open('/proc/self/status').read().partition('SigCgt')[2][:20] == before
say(last_words.start(box))
"""
    assert run(body, box, crashes).stdout == "NativeLibraryError\n" * 3 + "True\n"
