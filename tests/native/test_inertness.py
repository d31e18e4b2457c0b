"""libtaskd preloaded into a process that does not call it: no thread, no file, no output.

And it exports only its ABI.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.native import library
from taskd.native._ctypes_binding import LIBRARY_PATH

pytestmark = pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here")

ROOT = Path(__file__).resolve().parents[2]

# What the process has besides its code: threads, descriptors, writable shared memory, signal
# handlers
# and mask. Not SigQ, which counts the queued signals of all processes of this user.
LOOK = """
import os
print(len(os.listdir('/proc/self/task')))
print(sorted(os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in '012'))
print(len(os.listdir('/proc/self/fd')))
shared = [line for line in open('/proc/self/maps') if ' rw-s' in line or 'memfd' in line]
print(sorted({line.split()[-1] for line in shared}))
names = ('SigP', 'SigB', 'SigI', 'SigC', 'Shd', 'Threads')
print([line for line in open('/proc/self/status') if line.startswith(names)])
"""


def run(command, cwd, **environment):
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    return done.stdout, done.stderr


def test_preloaded_into_a_program_it_does_nothing(tmp_path):
    assert run(["/bin/true"], tmp_path, LD_PRELOAD=str(LIBRARY_PATH)) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_preloaded_into_python_it_changes_nothing_that_can_be_seen(tmp_path):
    assert run([sys.executable, "-c", ""], tmp_path, LD_PRELOAD=str(LIBRARY_PATH)) == ("", "")
    with_it = run([sys.executable, "-c", LOOK], tmp_path, LD_PRELOAD=str(LIBRARY_PATH))
    without = run([sys.executable, "-c", LOOK], tmp_path)
    assert with_it == without
    assert list(tmp_path.iterdir()) == []


def test_it_really_was_preloaded(tmp_path):
    code = "print('libtaskd.so' in open('/proc/self/maps').read())"
    assert run([sys.executable, "-c", code], tmp_path, LD_PRELOAD=str(LIBRARY_PATH))[0] == "True\n"


def test_a_preloaded_library_and_the_binding_are_one(tmp_path):
    code = (
        "from taskd.native import library; library.load();"
        "mapped = {line.split()[-1] for line in open('/proc/self/maps')};"
        "print(len({path for path in mapped if path.endswith('libtaskd.so')}))"
    )
    environment = {"LD_PRELOAD": str(LIBRARY_PATH), "PYTHONPATH": str(ROOT)}
    assert run([sys.executable, "-c", code], tmp_path, **environment)[0] == "1\n"


def test_it_exports_its_abi_the_hooks_and_nothing_else():
    header = (ROOT / "csrc/include/taskd.h").read_text()
    declared = set(re.findall(r"^TASKD_API .*?(taskd_\w+)\(", header, re.MULTILINE))
    hooks = set(
        re.findall(
            r"^HOOK_\w+\(\w+, (?:[A-Z]+, )?(\w+),",
            (ROOT / "csrc/collectives/hooks.def").read_text(),
            re.MULTILINE,
        )
    )
    script = set(
        re.findall(r"^\s+(taskd_\w+);", (ROOT / "csrc/libtaskd.map").read_text(), re.MULTILINE)
    )
    mirrored = set(re.findall(r"(taskd_\w+)\(", (ROOT / "taskd/native/_libtaskd.pxd").read_text()))
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY_PATH)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert declared == script == mirrored
    assert hooks
    # Without a version behind its name (dlsym@...): callers ask for dlsym of the C library's.
    exits = {"exit", "_exit", "_Exit", "quick_exit"}
    assert exported == declared | hooks | exits | (
        {"dlsym"} if platform.machine() in {"x86_64", "aarch64"} else set()
    )


def test_it_needs_the_c_library_only():
    listing = subprocess.run(
        ["readelf", "-d", str(LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
    assert {name.split(".")[0] for name in needed} <= {
        "libc",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
        "libpthread",
        "libdl",
    }
