"""Last words: real faults in real processes. Each ends as it would have ended without us, and leaves its story in the box."""

from __future__ import annotations

import contextlib
import os
import re
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
from taskd.native.black_box import BlackBox, Phase
from taskd.native.last_words import Kind
from tests.native import programs

pytestmark = pytest.mark.skipif(library.load() is None or shutil.which("gcc") is None, reason="libtaskd or gcc is not there")

HERE = Path(__file__).resolve().parent

# argv: box fd, path of the library with the faults, whatever the test adds. `armed` is what start() said, None if it was not called.
PRELUDE = """
import ctypes, faulthandler, os, resource, signal, sys, threading, time
from taskd.native import last_words
from taskd.native.black_box import BlackBox
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
crashes = ctypes.CDLL(sys.argv[2])
held = ctypes.PyDLL(sys.argv[2])       # keeps the interpreter lock
crashes.compute.restype = ctypes.c_double
box = BlackBox.attach(int(sys.argv[1]))
box.begin(os.getpid(), 1)
def say(*words):
    print(*words, flush=True)
"""
START = "assert last_words.start(box)\n"


@pytest.fixture(scope="session")
def crashes(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("crashes") / "libcrashes.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-fno-optimize-sibling-calls", "-w", "-pthread", str(HERE / "crashes.c"),
                    "-o", str(path)], check=True)
    return str(path)


@pytest.fixture(scope="session")
def throws(tmp_path_factory) -> str:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    path = tmp_path_factory.mktemp("throws") / "libthrows.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", str(HERE / "crashes.cpp"), "-o", str(path)], check=True)
    return str(path)


@pytest.fixture
def box():
    with contextlib.closing(BlackBox.create()) as made:
        yield made


def command(body: str, box: BlackBox, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + body, str(box.fd), *arguments]


def run(body: str, box: BlackBox, *arguments: str, preload: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    env = programs.environment() | environment | ({"LD_PRELOAD": str(library.LIBRARY_PATH)} if preload else {})
    return subprocess.run(command(body, box, *arguments), env=env, pass_fds=[box.fd], capture_output=True, text=True,
                          timeout=programs.DEADLINE_S, check=False)


@contextlib.contextmanager
def running(body: str, box: BlackBox, *arguments: str):
    process = subprocess.Popen(command(body, box, *arguments), env=programs.environment(), pass_fds=[box.fd], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with programs.ending(process):
        yield process


def words_of(box: BlackBox) -> last_words.LastWords:
    words = last_words.read_of_end(box)
    assert words is not None, "nothing was written"
    assert words.complete
    return words


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


@pytest.mark.parametrize(("fault", "number", "summary", "function"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_crash_leaves_its_signal_and_both_stacks(box, crashes, fault, number, summary, function):
    if fault in X86_ONLY and os.uname().machine != "x86_64":
        pytest.skip("a division by zero is no fault here")
    body = f"def innermost():\n    {fault}\n"
    without = run(body + "innermost()\n", box, crashes)
    assert without.returncode == -number
    assert last_words.read(box) is None
    done = run(START + body + "innermost()\n", box, crashes)
    assert (done.returncode, done.stdout, done.stderr) == (without.returncode, without.stdout, without.stderr)
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.SIGNAL, number)
    assert summary in words.summary()
    assert words.is_main
    assert "Current thread" in words.python
    assert "in innermost" in words.python
    assert function in words.native, words.native
    assert "in innermost" in words.text()
    assert function in words.text()


@pytest.mark.parametrize(("function", "name"), [("crash_throw", "std::runtime_error"), ("crash_throw_own", "faults::Worst")])
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
    assert 'File "<string>"' in words.python      # the main thread's, which waits


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


# ---------------------------------------------------------------------- those who were there, and those who came later


@pytest.mark.parametrize("install", ["handle", "handle_once"])
@pytest.mark.parametrize("fault", ["crash_null()", "crash_divide()", "crash_abort()", "crash_raise(11)"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_of_the_program_is_called_as_without_us(box, crashes, install, fault, order):
    number = {"crash_null()": 11, "crash_divide()": 8, "crash_abort()": 6, "crash_raise(11)": 11}[fault]
    installed, crash = f"crashes.{install}({number})\n", f"crashes.{fault}\n"
    # raise() comes back to a handler that restored the default; the second one ends the process.
    again = "crashes.crash_raise(11)\n" if fault == "crash_raise(11)" else ""
    without = run(installed + crash + again, box, crashes)
    assert without.returncode == -number
    assert "earlier handler" in without.stdout
    with_us = run(installed + START + crash + again if order == "before" else START + installed + crash + again, box, crashes)
    assert (with_us.returncode, with_us.stderr) == (without.returncode, without.stderr)
    assert without_addresses(with_us.stdout) == without_addresses(without.stdout)
    if order == "before":       # one that comes later and restores the default, not what it found, keeps us out of it
        assert words_of(box).number == number


@pytest.mark.parametrize("fault", ["crash_null()", "crash_abort()", "crash_overflow(0)", "crash_in_thread(crashes.crash_null)"])
@pytest.mark.parametrize("order", ["before", "after", "not warned"])
def test_faulthandler_writes_too(box, crashes, fault, order):
    enable = "faulthandler.enable()\n"
    start = {"before": enable + START, "after": START + enable,
             # As if its alternate stack, a small one, had come later than ours.
             "not warned": "last_words._reserve_stack_of_faulthandler = lambda: None\n" + START + enable}[order]
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
    body = "signal.signal(signal.SIGABRT, lambda *_: (say('python handler'), os._exit(7)))\n{}os.kill(os.getpid(), 6)\ntime.sleep(20)\n"
    assert run(body.format(""), box, crashes).returncode == 7
    done = run(body.format(START), box, crashes)
    assert (done.returncode, done.stdout) == (7, "python handler\n")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_that_mends_its_faults_goes_on(box, crashes, order):
    install = "crashes.handle_and_mend()\n"
    done = run((install + START if order == "before" else START + install) + "say(crashes.mend(), crashes.mend())\n", box, crashes)
    assert (done.returncode, done.stdout) == (0, "2 2\n")
    # The record of a fault that was no end does not stay true: training went on behind it.
    if order == "before":
        assert last_words.read(box) is not None
        box.mark_phase(Phase.STEP)
        words = last_words.read(box)
        struct.pack_into("=q", box._map, layout.WORDS_OFFSET_MONOTONIC_NS, int((words.written_at - 60) * 1e9))
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
    done = run("crashes.handle_by_exit(11)\n" + START + "crashes.crash_null()\n", box, crashes, preload=True)
    assert done.returncode == 139
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.SIGNAL, signal.SIGSEGV)


# ---------------------------------------------------------------------- what may go wrong while writing


@pytest.mark.parametrize("hurt", ["for (;;) {}", "*(volatile int *)0 = 1;", "__builtin_trap();", "abort();"])
def test_a_stage_that_hangs_or_crashes_does_not_change_the_end(box, crashes, tmp_path, hurt):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text(f"#include <stdlib.h>\nvoid *__cxa_current_exception_type(void) {{ {hurt} return 0; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"ctypes.CDLL({str(made)!r}, mode=ctypes.RTLD_GLOBAL)\n{START}crashes.crash_abort()\n"
    began = time.monotonic()
    assert run(body, box, crashes).returncode == -signal.SIGABRT
    assert time.monotonic() - began < programs.DEADLINE_S / 2
    words = words_of(box)
    assert "crash_abort" in words.native
    assert words.detail == ""


@pytest.mark.parametrize("hurt", ["for (;;) {}", "*(volatile int *)0 = 1;"])
def test_an_interpreter_that_cannot_be_looked_at_does_not_keep_the_native_stack_away(box, crashes, tmp_path, hurt):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    # Preloaded, so that it is found before the interpreter's own; it does harm only when the handler asks.
    source.write_text(f"int is_armed; int Py_IsInitialized(void) {{ if (is_armed) {{ {hurt} }} return 1; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = START + "ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed').value = 1\ncrashes.crash_null()\n"
    assert run(body, box, crashes, LD_PRELOAD=str(made)).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert words.python == ""
    assert "crash_null" in words.native


def test_a_crash_in_a_stage_of_an_exit_that_all_signals_are_blocked_for_does_not_change_the_status(box, crashes, tmp_path):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text("int is_armed; int Py_IsInitialized(void) { if (is_armed) *(volatile int *)0 = 1; return 1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = START + """
ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed').value = 1
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
crashes.exit_here(1, 3)
"""
    assert run(body, box, crashes, LD_PRELOAD=f"{made}:{library.LIBRARY_PATH}").returncode == 3
    words = words_of(box)
    assert (words.kind, words.number, words.python) == (Kind.EXIT, 3, "")
    assert "exit_here" in words.native


@pytest.mark.parametrize("how", ["crashes.crash_abort()", "crashes.crash_null()"])
def test_where_no_timer_can_end_a_stage_no_lock_of_the_allocator_is_taken(box, crashes, tmp_path, how):
    source, made = tmp_path / "hurt.c", tmp_path / "libhurt.so"
    source.write_text("""
#include <stddef.h>
int is_armed;
void *__libc_malloc(size_t);
void *malloc(size_t size) { while (is_armed) { } return __libc_malloc(size); }   /* as if this thread had its lock */
""")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"""
from taskd.native import library
library.load().last_words_start(box.fd, 0)
crash = {how.removesuffix('()')}
armed = ctypes.c_int.in_dll(ctypes.CDLL(None), 'is_armed')
ctypes.PyDLL(sys.argv[2]).set_and_call(ctypes.byref(armed), crash)
"""
    assert run(body, box, crashes, LD_PRELOAD=str(made)).returncode == {"n": -signal.SIGSEGV, "a": -signal.SIGABRT}[how[14]]
    assert "crash_" in words_of(box).native


def test_a_program_that_closes_all_descriptors_still_leaves_signal_and_frames(box, crashes, tmp_path):
    (tmp_path / "other").write_bytes(b"")
    body = START + f"""
os.closerange(3, 1000)
for _ in range(20):     # numbers are used again, for something that is not ours
    other = os.open({str(tmp_path / "other")!r}, os.O_RDWR)
crashes.crash_null()
"""
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert words.summary() == "SIGSEGV at address 0x0 (SEGV_MAPERR) in the main thread"
    assert (words.python, words.native) == ("", "")
    assert len(words.frames) > 3
    assert f"[{words.frames[0]:#x}]" in words.text()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_limit_on_the_size_of_files_does_not_change_the_end(box, crashes):
    body = START + """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
crashes.crash_null()
"""
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    words = words_of(box)
    assert (words.python, words.native) == ("", "")
    assert len(words.frames) > 3


def test_a_thread_with_a_small_stack_can_tell_too(box, crashes):
    body = START + "threading.stack_size(64 * 1024)\nt = threading.Thread(target=crashes.crash_null)\nt.start()\nt.join()\n"
    assert run(body, box, crashes).returncode == -signal.SIGSEGV
    assert "crash_null" in words_of(box).native


# ---------------------------------------------------------------------- children and successors


@pytest.mark.parametrize("how", ["crashes.crash_null()", "os.abort()", "os._exit(9)", "crashes.exit_here(0, 9)",
                                 "os.kill(os.getpid(), box_signal)"])
def test_what_a_forked_child_does_is_not_in_the_box(box, crashes, how):
    body = START + f"""
box_signal = int.from_bytes(box.read({layout.WORDS_OFFSET_STACKS_SIGNAL}, 8), 'little')
pid = os.fork()
if pid == 0:
    {how}
    os._exit(5)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run(body, box, crashes, preload=True)
    expected = {"crashes.crash_null()": "-11", "os.abort()": "-6", "os.kill(os.getpid(), box_signal)": "5"}.get(how, "9")
    assert (done.returncode, done.stdout) == (0, f"{expected}\n")
    assert last_words.read(box) is None


def test_a_child_of_vfork_does_not_write_for_its_parent(box, crashes):
    body = START + "pid = held.vfork_exit(9)\nsay(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
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


# ---------------------------------------------------------------------- exits


@pytest.mark.parametrize("how", ["crashes.exit_here(0, 3)", "crashes.exit_here(1, 3)", "crashes.exit_here(2, 3)",
                                 "crashes.exit_here(3, 3)", "os._exit(3)", "ctypes.pythonapi.Py_Exit(3)"])
def test_an_exit_tells_who_called_it_if_we_are_preloaded(box, crashes, how):
    body = START + f"import atexit\natexit.register(say, 'atexit')\ndef innermost():\n    {how}\ninnermost()\n"
    without = run(body, box, crashes)
    assert without.returncode == 3
    assert last_words.read(box) is None
    done = run(body, box, crashes, preload=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, without.stdout, without.stderr)
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.EXIT, 3)
    assert words.summary() == "exit 3 called in the main thread"
    assert ("exit_here" if "exit_here" in how else "libpython") in words.native or "python" in words.native
    if "Py_Exit" not in how:
        assert "in innermost" in words.python


def test_an_exit_that_asks_the_dynamic_linker_nothing_still_asks_it_nothing(box, crashes, tmp_path):
    """Another thread has its lock, and keeps it: a library's constructor that waits for ever."""
    source, made, sign = tmp_path / "slow.c", tmp_path / "libslow.so", tmp_path / "in the constructor"
    source.write_text(f"""
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void wait_for_ever(void) {{ close(open("{sign}", O_CREAT | O_WRONLY, 0600)); for (;;) pause(); }}
""")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"""
exit_here = crashes.exit_here      # looked up before
crashes.open_in_thread({str(made)!r}.encode())
while not os.path.exists({str(sign)!r}):
    time.sleep(0.001)
exit_here(3, 3)
"""
    assert run(body, box, crashes).returncode == 3
    sign.unlink()
    assert run(START + body, box, crashes, preload=True).returncode == 3
    assert (words_of(box).kind, words_of(box).number) == (Kind.EXIT, 3)


def test_an_exit_with_zero_and_a_normal_end_leave_nothing(box, crashes):
    for body in ("os._exit(0)\n", "crashes.exit_here(0, 0)\n", ""):
        assert run(START + body, box, crashes, preload=True).returncode == 0
        assert last_words.read(box) is None


def test_exits_of_a_process_that_is_not_armed_are_as_ever(box, crashes):
    for how in range(4):
        assert run(f"crashes.exit_here({how}, 5)\n", box, crashes, preload=True).returncode == 5
    assert last_words.read(box) is None


def test_a_crash_on_the_way_out_counts_more_than_the_exit(box, crashes):
    body = START + "crashes.crash_at_exit()\ncrashes.exit_here(0, 4)\n"
    assert run(body, box, crashes, preload=True).returncode == -signal.SIGSEGV
    assert words_of(box).number == signal.SIGSEGV


# ---------------------------------------------------------------------- stacks on demand


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
    "a sleep": ("time.sleep(600)", "nanosleep"),
    "a lock": ("(lock := threading.Lock()).acquire() and lock.acquire()", "PyThread_acquire_lock"),
    "a Python loop": ("\n    while True: pass", ""),
    "a read": ("sys.stdin.read()", "read"),
}


@pytest.mark.parametrize("where", WHEREABOUTS)
def test_stacks_are_taken_wherever_the_main_thread_is(box, crashes, where):
    call, function = WHEREABOUTS[where]
    body = START + "def other(): time.sleep(600)\nthreading.Thread(target=other, daemon=True).start()\n"
    body += f"def innermost():\n    say('ready')\n    {call}\ninnermost()\n"
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        for _ in range(3):
            words = take(process, box)
            assert "in innermost" in words.python
            assert "in other" in words.python
        programs.wait_until(lambda: function in take(process, box).native, f"{function} in the native stack")
        assert process.poll() is None


def test_a_stopped_process_answers_when_it_goes_on(box, crashes):
    with running(START + "say('ready')\nheld.loop_for_ever()\n", box, crashes) as process:
        programs.expect(process, "ready")
        programs.wait_until(lambda: "loop_for_ever" in take(process, box).native, "in the loop")
        process.send_signal(signal.SIGSTOP)
        programs.wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T", "stopped")
        count = last_words.request(process.pid, box)
        assert count is not None
        assert last_words.wait(box, count, time.monotonic() + 0.2) is None
        process.send_signal(signal.SIGCONT)
        words = last_words.wait(box, count, time.monotonic() + programs.DEADLINE_S)
        assert words is not None
        assert "loop_for_ever" in words.native


def test_stacks_are_of_the_main_thread_whoever_gets_the_signal(box, crashes):
    # The main thread lets others have it first.
    body = START + f"""
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
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        count = last_words.request(process.pid, box)
        process.stdin.write("\n")
        process.stdin.flush()
        assert last_words.wait(box, count, time.monotonic() + programs.DEADLINE_S) is not None
        programs.wait_until(lambda: "in innermost" in take(process, box).python, "the main thread")


def test_a_thousand_requests_change_no_result(box, crashes):
    body = START + f"""
say(crashes.compute(1000000))
say('ready')
results = set()
while int.from_bytes(box.read({layout.WORDS_OFFSET_REQUESTED}, 8), 'little') < 1000:
    results.add(crashes.compute(1000000))
    assert sum(range(1000)) == 499500
say(*results)
sys.stdin.readline()
"""
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
    with running(START + "say('ready')\nsys.stdin.readline()\ncrashes.crash_null()\n", box, crashes) as process:
        programs.expect(process, "ready")
        take(process, box)
        assert last_words.read_of_end(box) is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(programs.DEADLINE_S) == -signal.SIGSEGV
    assert words_of(box).number == signal.SIGSEGV


def test_a_program_that_has_given_the_signal_up_or_another_program_is_not_ended_by_a_request(box, crashes):
    for body in ("signal.signal(int.from_bytes(box.read(%d, 8), 'little'), signal.SIG_DFL)\nsay('ready')\ntime.sleep(600)\n",
                 "# %d\nos.execv('/bin/sh', ['sh', '-c', 'echo ready; exec sleep 600'])\n"):
        with running(START + body.replace("%d", str(layout.WORDS_OFFSET_STACKS_SIGNAL)), box, crashes) as process:
            programs.expect(process, "ready")
            assert last_words.request(process.pid, box) is None
            assert process.poll() is None


def test_a_crash_while_stacks_are_written_is_told(box, crashes):
    # The main thread writes its stacks again and again; the other one crashes somewhere within.
    body = START + """
number = int.from_bytes(box.read({0}, 8), 'little')
def other():
    say('ready')
    sys.stdin.readline()
    crashes.crash_null()
threading.Thread(target=other, daemon=True).start()
while True:
    os.kill(os.getpid(), number)
""".replace("{0}", str(layout.WORDS_OFFSET_STACKS_SIGNAL))
    with running(body, box, crashes) as process:
        programs.expect(process, "ready")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(programs.DEADLINE_S) == -signal.SIGSEGV
    assert "crash_null" in words_of(box).native


def test_a_process_that_is_gone_or_not_armed_gives_no_stacks(box, crashes):
    assert last_words.request(os.getpid(), box) is None
    done = subprocess.Popen(command(START, box, crashes), env=programs.environment(), pass_fds=[box.fd])
    assert done.wait(programs.DEADLINE_S) == 0
    assert last_words.request(done.pid, box) is None


# ---------------------------------------------------------------------- reading


@settings(max_examples=300, deadline=None)
@given(head=st.binary(max_size=layout.LAST_WORDS_BYTES), text=st.binary(max_size=2000), data=st.data())
def test_no_bytes_in_the_box_can_harm_the_reader(head, text, data):
    box = BlackBox.create()
    try:
        box._map[layout.WORDS_OFFSET_STATE : layout.WORDS_OFFSET_STATE + len(head)] = head
        box._map[layout.TEXT_OFFSET : layout.TEXT_OFFSET + len(text)] = text
        if data.draw(st.booleans()):      # mostly plausible
            for offset, most in ((layout.WORDS_OFFSET_STATE, 3), (layout.WORDS_OFFSET_KIND, 4), (layout.WORDS_OFFSET_NUMBER, 70),
                                 (layout.WORDS_OFFSET_CODE, 140), (layout.WORDS_OFFSET_TEXT_BYTES, 3000)):
                struct.pack_into("=q", box._map, offset, data.draw(st.integers(-most, most)))
            for offset in (layout.WORDS_OFFSET_DETAIL, layout.WORDS_OFFSET_THREAD):
                box._map[offset : offset + 3] = data.draw(st.sampled_from([b"a\nb", b"\t\r\x1b", b"\xff\xe2\x80", b"\x00\x00\x00"]))
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
    text = ("[python]\n" + "\n".join(threads) + "\n[native]\n" + "lib.so(f+0x1)[0x1]\n" * 400).encode()
    struct.pack_into("=q", box._map, layout.WORDS_OFFSET_TEXT_BYTES, len(text))
    box._map[layout.TEXT_OFFSET : layout.TEXT_OFFSET + len(text)] = text
    words = last_words.read(box)
    shown = words.text()
    assert len(shown.encode()) <= last_words.MAX_TEXT_BYTES
    assert shown.startswith("Current thread 17")
    assert "Native stack" in shown
    assert shown.count("(cut)") >= 2


@pytest.mark.parametrize(("mangled", "name"), [
    ("St13runtime_error", "std::runtime_error"), ("N3c105ErrorE", "c10::Error"), ("7MyError", "MyError"), ("i", "i"),
    ("St6vectorIiSaIiEE", "St6vectorIiSaIiEE"), ("", ""), ("999x", "999x"), ("N", "N"), ("St", "std"), ("0", "0"),
])
def test_plain_names_of_cpp_are_made_readable(mangled, name):
    assert last_words.demangle(mangled) == name


# ---------------------------------------------------------------------- preloading


def test_the_line_that_preloads_us_can_be_evaluated_by_a_shell():
    script = f'eval "$({sys.executable} -m taskd.native)" && echo "$LD_PRELOAD" && cat /proc/self/maps'
    done = subprocess.run(["sh", "-c", script], env=programs.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(library.LIBRARY_PATH)
    assert done.stdout.count("libtaskd.so") > 1
    with_other = programs.environment() | {"LD_PRELOAD": "libm.so.6"}
    done = subprocess.run(["sh", "-c", script], env=with_other, capture_output=True, text=True, check=True)
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
print([require_preloaded('profiling of communication') for _ in range(3)], require_preloaded('another'))
"""
    done = subprocess.run([sys.executable, "-c", code], env=programs.environment(), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[False, False, False] False"
    assert len(lines) == 3
    assert lines[0].startswith("ERROR the libtaskd.so has not been loaded: profiling of communication does not work. Run `export")
    env = programs.environment() | {"LD_PRELOAD": str(library.LIBRARY_PATH)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True, True] True\n"
