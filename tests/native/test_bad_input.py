"""What is wrong around the library: boxes, limits, other versions, odd programs.

Each gives a clear line or silence, and things go on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from taskd.errors import NativeLibraryError
from taskd.native import box_layout, death_alarm, library
from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import DeathAlarm
from tests.native import fuzz_black_box
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
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: becomes another user")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
NOBODY = 65534
LOG = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
"""


def run(command, **env):
    """Of a program in an environment of its own: exit status and both streams."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def run_python(code, **env):
    return run([sys.executable, "-c", "import os, sys\n" + code], **(environment() | env))


@pytest.fixture
def box():
    box = BlackBox.create()
    yield box
    box.close()


# ---------------------------------------------------------------- boxes


def test_a_box_that_is_damaged_at_random_harms_no_reader_and_rings_no_alarm():
    assert fuzz_black_box.main(seconds=3, seed=20240607) == 0


def test_the_guard_refuses_a_box_that_was_cut_with_one_line(caplog):
    fd = os.memfd_create("cut")
    os.ftruncate(fd, box_layout.BOX_BYTES // 2)
    with pytest.raises(NativeLibraryError, match="is no black box of layout"):
        BlackBox.attach(fd)
    binding = library.load()
    for call in (
        lambda: binding.guard_start(fd, -1),
        lambda: binding.watch(fd, 1, fd),
        lambda: binding.unwatch(fd),
    ):
        with pytest.raises(NativeLibraryError, match="Invalid argument"):
            call()
    os.close(fd)


def test_a_box_of_another_version_gets_neither_a_guard_nor_a_watch(box, caplog):
    os.pwrite(box.fd, b"\x63", box_layout.OFFSET_LAYOUT_VERSION)
    alarm = DeathAlarm()
    assert not alarm.watch(7, box)
    assert not death_alarm.guard(box, None)
    assert "no death alarm for worker 7" in caplog.text
    assert "no death alarm in this process" in caplog.text
    alarm.close()


@needs_root
def test_a_worker_that_has_become_another_user_keeps_its_box_and_its_alarm(box):
    alarm = DeathAlarm()
    worker = start(
        f"from taskd.native import library\nlibrary.load()\nos.setuid({NOBODY})\n" + GUARD + READ,
        box.fd,
    )
    with ending(worker):
        expect(worker, "guarded True")
        assert alarm.watch(1, box)
        assert box.pid == worker.pid
        worker.kill()
        assert is_readable(alarm.fd)
        assert [token for token, _ in alarm.read()] == [1]
    alarm.close()


@needs_root
def test_another_user_cannot_open_a_box(box):
    done = subprocess.run(
        ["cat", f"/proc/{os.getpid()}/fd/{box.fd}"],
        user=NOBODY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Permission denied" in done.stderr


# ---------------------------------------------------------------- limits


def test_nothing_is_locked_into_memory(box):
    worker = start(
        "import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n" + GUARD + READ,
        box.fd,
    )
    with ending(worker):
        expect(worker, "guarded True")


def test_without_descriptors_a_guard_is_one_line_and_the_worker_goes_on(box):
    body = (
        LOG
        + """
import resource
from taskd.native import library
library.load()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
try:
    while True: os.dup(0)
except OSError: pass
"""
    )
    life_read, life_write = os.pipe()
    worker = start(body + GUARD + READ, box.fd, life_read)
    with ending(worker):
        line = read_line(worker)
        assert line == (
            "WARNING no death alarm in this process: taskd_guard_start failed: Too "
            "many "
            "open files (errno 24)"
        )
        expect(worker, "guarded False")
    os.close(life_read)
    os.close(life_write)


CREATE = """
import resource
from taskd.native.black_box import BlackBox
{limit}
before = len(os.listdir('/proc/self/fd')) if {counts} else 0
try:
    BlackBox.create()
except OSError as error:
    print(error)
    print((len(os.listdir('/proc/self/fd')) if {counts} else 0) - before)
"""


@pytest.mark.parametrize(
    ("limit", "counts", "reason"),
    [
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", False, "Too many open files"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))", True, "File too large"),
        ("resource.setrlimit(resource.RLIMIT_AS, (1, 1))", True, "Cannot allocate memory"),
    ],
)
def test_a_box_that_cannot_be_made_says_why_and_leaves_nothing_open(limit, counts, reason):
    status, out, _ = run_python(CREATE.format(limit=limit, counts=counts))
    assert status == 0
    message, leaked = out.splitlines()
    assert f"no black box, a file of 16 MiB in memory: {reason}" in message
    assert leaked == "0"


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_a_full_dev_shm_does_not_matter():
    program = (
        "from taskd.native.black_box import BlackBox\nfrom taskd.native.death_alarm import guard\n"
        "full = os.statvfs('/dev/shm').f_bavail\nbox = BlackBox.create()\n"
        "print(full, box.write_extras(1, bytes(1 << 20)), guard(box, None))"
    )
    script = (
        "mount -t tmpfs -o size=64k none /dev/shm || exit 99; cat /dev/zero >/dev/shm/full "
        '2>/dev/null; exec "$0" -c "$1"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, "import os\n" + program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode in {1, 99} and not done.stdout:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.stdout == "0 True True\n", done.stderr


# ---------------------------------------------------------------- another library than expected


@needs_compiler
@pytest.mark.parametrize("exports", ["all", "version"])
def test_a_preloaded_library_of_another_version_is_one_line_or_not_used(tmp_path, exports):
    names = re.findall(
        r"^TASKD_API "
        r".*?(taskd_\w+)\(",
        (ROOT / "csrc/include/taskd.h").read_text(),
        re.MULTILINE,
    )
    source = tmp_path / "other.c"
    source.write_text(
        "\n".join(
            f"int {name}(void) {{ return 99; }}"
            for name in names
            if exports == "all" or "version" in name
        )
    )
    other = tmp_path / "libtaskd.so"
    # Every libtaskd has these: without a symbol version the loader itself would end the program
    # that asks for one.
    script = tmp_path / "other.map"
    script.write_text("TASKD_1 { global: taskd_*; };\n")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libtaskd.so", f"-Wl,--version-script={script}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(other)], check=True)
    code = (
        "import logging; logging.basicConfig(stream=sys.stdout, format='%(levelname)s "
        "%(message)s')\n"
        "from taskd.native import death_alarm, library; library.tell_absence()\n"
        "print('goes on', death_alarm.DeathAlarm().available)"
    )
    status, out, _ = run_python(code, LD_PRELOAD=str(other))
    assert status == 0
    *lines, last = out.splitlines()
    assert last.startswith("goes on")
    if exports == "all":
        assert last == "goes on False"
        assert "libtaskd could not be loaded (its ABI version is 99, " in lines[0]
    else:
        assert last == "goes on True", (
            "too little in it for the compiled binding; the other one "
            "opens the right file by its path"
        )
    assert len(lines) <= 1


# ---------------------------------------------------------------- odd programs


@needs_compiler
def test_a_static_program_is_not_disturbed(tmp_path):
    source, program = tmp_path / "static.c", tmp_path / "static"
    source.write_text('#include <stdio.h>\nint main(void) { puts("static"); return 7; }\n')
    if (
        subprocess.run(
            ["cc", "-static", str(source), "-o", str(program)], capture_output=True, check=False
        ).returncode
        != 0
    ):
        pytest.skip("no static C library here")
    assert run([str(program)], LD_PRELOAD=str(LIBRARY_PATH)) == (7, "static\n", "")


def test_an_empty_environment_is_not_disturbed():
    code = "from taskd.native.library import load; print(load() is not None)"
    command = [
        "env",
        "-i",
        f"LD_PRELOAD={LIBRARY_PATH}",
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}",
    ]
    assert run(command, PATH=os.environ["PATH"]) == (0, "True\n", "")
    command = [
        "env",
        "-i",
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}",
    ]
    assert run(command, PATH=os.environ["PATH"], LD_PRELOAD=str(LIBRARY_PATH)) == (0, "True\n", "")


@needs_root
def test_a_setuid_program_runs_without_it_and_in_silence(tmp_path):
    program = tmp_path / "setuid"
    shutil.copy(shutil.which("cat"), program)
    program.chmod(0o4755)
    # one more where several processes run the tests
    for directory in [tmp_path, *tmp_path.parents][:4]:
        directory.chmod(directory.stat().st_mode | 0o111)
    done = subprocess.run(
        [str(program), "/proc/self/maps"],
        env={"LD_PRELOAD": str(LIBRARY_PATH)},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "libc" in done.stdout
    assert "libtaskd" not in done.stdout, (
        "ld.so ignores a path in LD_PRELOAD where privileges are gained"
    )


def test_a_missing_second_library_is_a_line_of_the_loader_and_nothing_more():
    command = [sys.executable, "-c", "print('libtaskd.so' in open('/proc/self/maps').read())"]
    status, out, err = run(command, LD_PRELOAD=f"libmspti.so:{LIBRARY_PATH}")
    assert (status, out) == (0, "True\n")
    assert len(err.splitlines()) == 1
    assert "libmspti.so" in err
    assert "ignored" in err


def test_a_preloaded_library_that_is_missing_itself_is_a_line_of_the_loader_too(tmp_path):
    status, _, err = run(["/bin/true"], LD_PRELOAD=str(tmp_path / "libtaskd.so"))
    assert status == 0
    assert "ignored" in err
