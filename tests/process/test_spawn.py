"""A forked worker looks like `python -u script.py`.

Every program runs both ways, and what can be seen must be the same.

Seen are the exit status, both output streams as files, and what the program itself finds out and
prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testbed.patience import Patience
from testbed.proc import descendants

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, os, random, signal, stat, sys, threading
main = sys.modules["__main__"]
def descriptor(number):
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        return None
    return [stat.S_IFMT(mode), os.get_inheritable(number)]
print(json.dumps({
    "main": sorted((name, str(value)) for name, value in vars(main).items()
                   if name.startswith("__") and "loader" not in name),
    "loader": type(main.__loader__).__name__ if main.__loader__ else None,
    "is main": main.__dict__ is globals(), "builtins": __builtins__ is sys.modules["builtins"],
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path,
    "cwd": os.getcwd(), "environ": dict(os.environ),
    "signals": {int(number): str(signal.getsignal(number)).split(" at ")[0]
                for number in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "descriptors": [descriptor(number) for number in range(64)],
    "leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through,
                 s.isatty(), type(s.buffer).__name__]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "own": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__],
    "python threads": [t.name for t in threading.enumerate()],
    "kernel threads": len(os.listdir("/proc/self/task")), "comm": open("/proc/self/comm").read(),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "gc": __import__("gc").isenabled(), "recursion": sys.getrecursionlimit(),
    "umask": os.umask(0o22),
    "faulthandler": __import__("faulthandler").is_enabled(),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace()],
    "executable": sys.executable, "prefix": sys.prefix,
    "dont_write_bytecode": sys.dont_write_bytecode,
    "root handlers": len(__import__("logging").getLogger().handlers),
    "children": __import__("multiprocessing").active_children(),
    **of_torch(),
}, sort_keys=True))
"""
# Where the script lies is nothing to torch, whose import takes a second of processor time and more.
PLACE_PROBE = "def of_torch(): return {}\n" + PROBE
PROBE = (
    """
import numpy, torch
def of_torch():
    return {
        "state": torch.get_rng_state().numel(), "default dtype": str(torch.get_default_dtype()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
    }
"""
    + PROBE
)
POOL = """
import multiprocessing, sys
class Local:
    def __init__(self, value): self.value = value
def work(item): return Local(item.value * 2)
if __name__ == "__main__":
    with multiprocessing.get_context("{context}").Pool(2) as pool:
        print([item.value for item in pool.map(work, [Local(1), Local(2)])])
"""
POOLS = """
import numpy, torch
from taskd.agent.spawning import libraries
paths = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
print(torch.get_num_threads(), [libraries._blas_call(path, "get") for path in sorted(paths)])
"""
# The threads of its queues unlink semaphores, and say so to the tracker: an interpreter that ends
# between the two warns of a leak.
LOADER = """
import threading, torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index * index)
if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="{context}")
    print([batch.tolist() for batch in loader])
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
"""


@dataclass(frozen=True)
class Program:
    """Files, and how to start them."""

    files: dict[str, str]
    argv: tuple[str, ...] = ("-u", "main.py")
    env: dict[str, str] = field(default_factory=dict)
    warm: bool = True


def script(source: str, *arguments: str, **env: str) -> Program:
    return Program({"main.py": source}, ("-u", "main.py", *arguments), env)


PACKAGE = {
    "pack/__init__.py": "print('pack', __name__)\n",
    "pack/other.py": "VALUE = 7\n",
    "pack/tool.py": "import sys\nfrom .other import VALUE\nprint(VALUE, sys.argv[1:], __name__, "
    "__package__, __spec__.name)\n",
    "pack/bad.py": "from .other import VALUE\nraise ValueError(VALUE)\n",
    "pack/__main__.py": "from pack.other import VALUE\nprint('main', VALUE, __file__)\n",
}
PROGRAMS = {
    "probe": script(PROBE, "a", "b c", OMP_NUM_THREADS="1", EXTRA="x"),
    "probe two threads": script(PROBE, OMP_NUM_THREADS="2"),
    "pools": script(POOLS),
    "pools of two threads": script(POOLS, OMP_NUM_THREADS="2"),
    "probe by absolute path": Program({"main.py": PLACE_PROBE}, ("-u", "@/main.py")),
    "probe by dotted path": Program({"main.py": PLACE_PROBE}, ("-u", "./main.py")),
    "probe in a folder": Program({"sub/main.py": PLACE_PROBE}, ("-u", "sub/main.py")),
    "probe as module": Program({"probe.py": PLACE_PROBE}, ("-u", "-m", "probe", "x")),
    "exit none": script("import sys; sys.exit()"),
    "exit 0": script("import sys; sys.exit(0)"),
    "exit 3": script("import sys; sys.exit(3)"),
    "exit -1": script("import sys; sys.exit(-1)"),
    "exit text": script("import sys; sys.exit('enough')"),
    "exit object": script("import sys; sys.exit(['enough'])"),
    "exception": script("def f(x):\n    return 1 / x\nf(0)\n"),
    "chained exception": script(
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('b') from e\n"
    ),
    "syntax error": script("print(1)\nx = = 2\n"),
    "system exit with cause": script("try:\n    1/0\nfinally:\n    raise SystemExit(4)\n"),
    "own excepthook": script(
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, "
        "a[1])\nraise ValueError(1)\n"
    ),
    "broken excepthook": script(
        "import sys\ndef hook(*a):\n    1/0\nsys.excepthook = hook\nraise ValueError(1)\n"
    ),
    "os._exit": script("import os; print('x'); os._exit(5)"),
    "killed": script("import os; os.kill(os.getpid(), 9)"),
    "segv": script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    "abort": script("import os; os.abort()"),
    "term": script("import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
    "ctrl-c": script(
        "import os, signal, atexit\natexit.register(print, "
        "'bye')\nos.kill(os.getpid(), signal.SIGINT)\n"
        "import time; time.sleep(9)\n"
    ),
    "interrupted": script(
        "import os, signal\nfor number in (signal.SIGINT, signal.SIGQUIT, "
        "signal.SIGHUP):\n"
        "    if signal.getsignal(number) == signal.SIG_IGN:\n        "
        "os.kill(os.getpid(), number)\nprint('went on')\n"
    ),
    "broken pipe": script("import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')\n"),
    "atexit order": script(
        "import atexit\natexit.register(print, 1)\natexit.register(print, 2)\nprint(0)\n"
    ),
    "atexit raises": script(
        "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 2)\n"
    ),
    "daemon thread": script(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), "
        "daemon=True).start()\nprint('end')\n"
    ),
    "thread": script(
        "import threading, atexit\natexit.register(print, 'atexit')\ngo = "
        "threading.Event()\n"
        "def work():\n    go.wait()\n    "
        "print('thread')\nthreading.Thread(target=work).start()\nprint('end')\ngo.set()\n"
    ),
    "thread raises": script(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, "
        "name='t')\nt.start()\nt.join()\n"
    ),
    "unflushed file": script("f = open('out.txt', 'w')\nf.write('kept')\n"),
    "global finalizer": script("class A:\n    def __del__(self): print('gone')\na = A()\n"),
    "C streams": script("import ctypes\nctypes.CDLL(None).printf(b'from C')\n"),
    "order of streams": script(
        "import sys, os\nfor i in range(3):\n    print('out', i)\n    "
        "os.write(1, b'raw')\n"
        "    print('err', file=sys.stderr)\nsys.stdout.write('no "
        "newline')\n"
    ),
    "logging": script("import logging\nlogging.basicConfig()\nlogging.warning('w')\n"),
    "sibling": Program(
        {
            "main.py": "import helper\nprint(helper.VALUE, helper.__file__)\n",
            "helper.py": "VALUE = 1\n",
        }
    ),
    "module": Program(PACKAGE, ("-u", "-m", "pack.tool", "x")),
    "module raises": Program(PACKAGE, ("-u", "-m", "pack.bad")),
    "package": Program(PACKAGE, ("-u", "-m", "pack")),
    "no such module": Program(PACKAGE, ("-u", "-m", "nowhere")),
    "guard": script("if __name__ == '__main__':\n    print(__file__, __spec__, __name__)\n"),
    "pickle": script(
        "import pickle\nclass A: "
        "pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A, "
        "pickle.dumps(A))\n"
    ),
    "coding": Program({"main.py": "# -*- coding: utf-8 -*-\nprint('\u00e4', ascii('\u00e4'))\n"}),
    "annotations": script("x: int = 1\nprint(__annotations__)\n"),
    "pool by fork": script(POOL.format(context="fork")),
    "pool by spawn": script(POOL.format(context="spawn")),
    "pool by forkserver": script(POOL.format(context="forkserver")),
    "loader by fork": script(LOADER.format(context="fork")),
    "loader by spawn": script(LOADER.format(context="spawn")),
    # What a fork cannot imitate is started as a fresh interpreter.
    "no such script": Program({}, warm=False),
    "folder": Program(
        {"app/__main__.py": "print(__file__, __package__)\n"}, ("-u", "app"), warm=False
    ),
    "own module of a loaded name": Program(
        {"main.py": "import queue\nprint(queue.MINE)\n", "queue.py": "MINE = 1\n"}, warm=False
    ),
    "hash seed": Program(
        {"main.py": "print(hash('a'))\n"}, env={"PYTHONHASHSEED": "7"}, warm=False
    ),
    "other option": Program(
        {"main.py": "import sys\nprint(sys.flags.optimize)\n"}, ("-O", "main.py"), warm=False
    ),
    "command": Program({}, ("-c", "print(1)"), warm=False),
}


@dataclass(frozen=True)
class Outcome:
    """What could be seen of one run."""

    status: int
    stdout: str
    stderr: str
    files: dict[str, str]
    note: str | None = None


def _prepare(program: Program, folder: Path) -> dict[str, Any]:
    for name, content in program.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    folder.mkdir(exist_ok=True)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "COV", "OMP_"))
    }
    return {
        "argv": [argument.replace("@", str(folder)) for argument in program.argv],
        "cwd": str(folder),
        "env": {
            **env,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **program.env,
        },
        "stdout": str(folder / "stdout"),
        "stderr": str(folder / "stderr"),
    }


def _collect(folder: Path, status: int, note: str | None = None) -> Outcome:
    texts = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    outcome = Outcome(status, texts.pop("stdout"), texts.pop("stderr"), texts, note)
    (folder / "stdout").unlink()
    (folder / "stderr").unlink()
    for name in ("out.txt",):
        (folder / name).unlink(missing_ok=True)
    return outcome


def _run_plainly(job: dict[str, Any], prefix: tuple[str, ...] = ()) -> int:
    with open(job["stdout"], "ab") as stdout, open(job["stderr"], "ab") as stderr:
        process = subprocess.Popen(
            [*prefix, sys.executable, *job["argv"]],
            env=job["env"],
            cwd=job["cwd"],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    patience = Patience(60, lambda: descendants(process.pid) | {process.pid})
    try:
        while left_s := patience.left_s():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(left_s)
        raise TimeoutError(f"{job['argv']} in {job['cwd']}: {patience}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Of the programs that are asked for; many import torch."""
    base = tmp_path_factory.mktemp("programs").resolve()
    asked = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and "ours" in item.fixturenames
    }
    return {name: base / re.sub(r"\W", "_", name) for name in PROGRAMS if name in asked}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, Outcome]:
    return {
        name: _collect(folder, _run_plainly(_prepare(PROGRAMS[name], folder)))
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module", params=["fork", "exec", "preloaded"])
def ours(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    plain: dict[str, Outcome],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outcome]:
    assert plain
    return _run_ours(request.param, folders, tmp_path_factory.mktemp(request.param))


def _run_ours(
    mode: str, folders: dict[str, Path], scratch: Path, prefix: tuple[str, ...] = ()
) -> dict[str, Outcome]:
    """The programs of these names, in their folders, as workers of a forkserver."""
    jobs = [_prepare(PROGRAMS[name], folder) for name, folder in folders.items()]
    paths = [scratch / name for name in ("jobs.json", "results.json")]
    paths[0].write_text(json.dumps(jobs), encoding="utf-8")
    own = PROGRAMS[next(iter(folders))].env
    # as torchrun is usually started: it sets OMP_NUM_THREADS only for its workers
    left_out = {*own, "OMP_NUM_THREADS"}
    env = {name: value for name, value in jobs[0]["env"].items() if name not in left_out}
    command = [
        *prefix,
        sys.executable,
        "-u",
        str(Path(__file__).with_name("spawn_driver.py")),
        mode,
        *map(str, paths),
    ]
    done = subprocess.run(
        command, env=env, cwd=ROOT, timeout=300, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(paths[1].read_text(encoding="utf-8"))
    return {
        name: _collect(folders[name], result["status"], result["note"])
        for name, result in zip(folders, results, strict=True)
    }


def _comparable(name: str, text: str) -> Any:
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    return json.loads(text) if name.startswith("probe") and text.startswith("{") else text


@pytest.mark.parametrize("variable", ["MKL", "OPENBLAS", "GOTO"])
def test_libraries_have_the_number_of_threads_that_is_meant_for_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Torchrun sets OMP_NUM_THREADS to 1 for its workers, which these variables precede."""
    monkeypatch.setenv(f"{variable}_NUM_THREADS", "2")
    names = ("probe", "pools", "pools of two threads")
    folders = {name: tmp_path.resolve() / name.replace(" ", "_") for name in names}
    plain = {
        name: _collect(folders[name], _run_plainly(_prepare(PROGRAMS[name], folders[name])))
        for name in names
    }
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ours = _run_ours("exec", folders, scratch)
    for name in names[1:]:
        assert ours[name].note is None, name  # it was forked warm
        assert ours[name].stdout == plain[name].stdout, name


@pytest.mark.parametrize("mode", ["fork", "exec"])
def test_signals_that_are_ignored_from_outside_are_ignored_by_workers(
    tmp_path: Path, mode: str
) -> None:
    """Under nohup, in the background of a script, under cron and in many a CI."""
    prefix = ("sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh")
    base = tmp_path.resolve()
    folders = {
        name: base / re.sub(r"\W", "_", name) for name in ("probe", "interrupted", "command")
    }
    expected = {
        name: _collect(folder, _run_plainly(_prepare(PROGRAMS[name], folder), prefix))
        for name, folder in folders.items()
    }
    found = _run_ours(mode, folders, base, prefix)
    signals = json.loads(expected["probe"].stdout)["signals"]
    assert [
        signals[str(int(number))] for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    ] == [str(signal.SIG_IGN)] * 3
    assert expected["interrupted"].stdout == "went on\n"
    for name, outcome in expected.items():
        assert (found[name].status, found[name].stderr, found[name].note is None) == (
            outcome.status,
            outcome.stderr,
            PROGRAMS[name].warm,
        )
        pair = [_comparable(name, run.stdout) for run in (found[name], outcome)]
        for seen in pair if name == "probe" else ():
            seen.pop("environ")  # the shell adds to it
        assert pair[0] == pair[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_looks_like_a_fresh_interpreter(
    name: str, plain: dict[str, Outcome], ours: dict[str, Outcome]
) -> None:
    expected, found = plain[name], ours[name]
    assert found.status == expected.status
    assert _comparable(name, found.stdout) == _comparable(name, expected.stdout)
    assert _comparable(name, found.stderr) == _comparable(name, expected.stderr)
    assert found.files == expected.files
    assert (found.note is None) == PROGRAMS[name].warm, found.note
