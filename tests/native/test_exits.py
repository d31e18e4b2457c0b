"""Last words of exits with an error: told if libtaskd is preloaded, and never changed."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

from taskd.native import last_words, library
from taskd.native.last_words import Kind
from tests.native.crashing import START, run, words_of

pytestmark = pytest.mark.skipif(
    library.load() is None or shutil.which("gcc") is None, reason="libtaskd or gcc is not there"
)


@pytest.mark.parametrize(
    "how",
    [
        "crashes.exit_here(0, 3)",
        "crashes.exit_here(1, 3)",
        "crashes.exit_here(2, 3)",
        "crashes.exit_here(3, 3)",
        "os._exit(3)",
        "ctypes.pythonapi.Py_Exit(3)",
    ],
)
def test_an_exit_tells_who_called_it_if_we_are_preloaded(box, crashes, how):
    body = START + (
        f"import atexit\natexit.register(say, 'atexit')\ndef innermost():\n    {how}\ninnermost()\n"
    )
    without = run(body, box, crashes)
    assert (without.returncode, without.stderr) == (3, "")
    assert last_words.read(box) is None
    done = run(body, box, crashes, preload=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, without.stdout, without.stderr)
    words = words_of(box)
    assert (words.kind, words.number) == (Kind.EXIT, 3)
    assert words.summary() == "exit 3 called in the main thread"
    assert (
        "exit_here" if "exit_here" in how else "libpython"
    ) in words.native or "python" in words.native
    if "Py_Exit" not in how:
        assert "in innermost" in words.python


def test_an_exit_that_asks_the_dynamic_linker_nothing_still_asks_it_nothing(box, crashes, tmp_path):
    """Another thread has its lock, and keeps it: a library's constructor that waits for ever."""
    source, made, sign = (
        tmp_path / "slow.c",
        tmp_path / "libslow.so",
        tmp_path / "in the constructor",
    )
    source.write_text(f"""
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void wait_for_ever(void) {{ close(open("{sign}",
    O_CREAT | O_WRONLY, 0600)); for (;;) pause(); }}
""")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(made)], check=True)
    body = f"""
exit_here = crashes.exit_here      # looked up before
crashes.open_in_thread({str(made)!r}.encode())
while not os.path.exists({str(sign)!r}):
    time.sleep(0.001)
exit_here(3, 3)
"""
    # what is freed: the thread must not need the path by then
    overwritten = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}
    assert run(body, box, crashes, **overwritten).returncode == 3
    sign.unlink()
    assert run(START + body, box, crashes, preload=True, **overwritten).returncode == 3
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
