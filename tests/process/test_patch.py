"""The patch in a real torchrun, without a manager.

Installed by sed or by `python -m taskd.run`, inert, never in the way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests.process import harness

pytestmark = pytest.mark.slow
TIMEOUT_S = 120.0
# Says who made this process, and joins the others in one collective.
WORKER = """
import os, sys, torch, torch.distributed as dist
parent = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[0]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} of {int(total)} parent {parent} argv {sys.argv[1:]} "
                 f"agent store {os.environ['TORCHELASTIC_USE_AGENT_STORE']} "
                 f"max {os.environ['TORCHELASTIC_MAX_RESTARTS']}\\n")
dist.destroy_process_group()
"""
FAILS_TWICE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if dist.get_rank() == 0:
    print("attempt", attempt)
dist.barrier()
if attempt < 2 and dist.get_rank() == 1:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""
SAYS_PARENT = (
    "import os\nprint('parent ' + open(f'/proc/{os.getppid()}/cmdline').read().split(chr(0))[0])\n"
)
WAITS = "import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(600)\n"


def start(command: list[str], folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    mark = uuid.uuid4().hex
    environment = harness.environment(
        TASKD_TEST_MARK=mark,
        TASKD_PORT=str(harness.free_port()),
        **({"TASKD_MANAGER": "off"} | extra),
    )
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert harness.marked(mark) == set(), "something of the job lives on"
    return done


def taskd_run(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return start([sys.executable, "-m", "taskd.run", *arguments], folder, **extra)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WORKER, encoding="utf-8")
    return path


@pytest.fixture
def patched_run(tmp_path: Path) -> Path:
    """A private copy of torch/distributed/run.py, patched by the documented command."""
    assert torchrun.__file__ is not None
    copy = tmp_path / "torch" / "distributed" / "run.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(Path(torchrun.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(
        ["sed", "-i", "/import os/i import taskd.python.adaptor.patch", str(copy)], check=True
    )
    assert "\nimport taskd.python.adaptor.patch\nimport os\n" in copy.read_text(encoding="utf-8")
    return copy


@pytest.mark.parametrize("rendezvous", ["none", "standalone", "static", "c10d"])
@pytest.mark.parametrize("forkserver", ["auto", "exec"])
def test_workers_come_from_the_forkserver(script: Path, rendezvous: str, forkserver: str) -> None:
    port = harness.free_port()
    arguments = {
        "none": [],
        "standalone": ["--standalone"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
    }[rendezvous]
    done = taskd_run(
        script.parent,
        *arguments,
        "--nproc-per-node",
        "2",
        "train.py",
        "x",
        TASKD_FORKSERVER=forkserver,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 2 parent taskd-forkserver argv ['x'] agent store True max 32767"
        for rank in range(2)
    ]


def test_agents_host_the_store_in_any_case(script: Path) -> None:
    done = taskd_run(
        script.parent,
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agent store True") == 2


def test_sed_installs_it(script: Path, patched_run: Path) -> None:
    done = start(
        [sys.executable, str(patched_run), "--standalone", "--nproc-per-node", "2", str(script)],
        script.parent,
        TASKD_PROCESS_ENABLE="on",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parent taskd-forkserver") == 2


@pytest.mark.parametrize(
    "extra", [{}, {"TASKD_PROCESS_ENABLE": "off"}, {"TASKD_PROCESS_ENABLE": ""}]
)
def test_inert_unless_enabled(script: Path, patched_run: Path, extra: dict[str, str]) -> None:
    done = start(
        [sys.executable, str(patched_run), "--standalone", "--nproc-per-node", "2", str(script)],
        script.parent,
        **extra,
    )
    assert done.returncode == 0, done.stderr
    assert "taskd-forkserver" not in done.stdout
    assert done.stdout.count("max 0") == 2


def test_inert_import_loads_nothing() -> None:
    code = (
        "import sys\nimport taskd.python.adaptor.patch\n"
        "print([name for name in ('torch', 'zmq', 'msgpack', 'taskd.torchrun', 'taskd.agent') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=harness.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "[]\n"


# What another torch may look like, and what is said about it.
OTHER_TORCHES = {
    "parameter": (
        "old = api.PContext.start\ndef start(self, soon=1): old(self)\napi.PContext.start = start",
        "PContext.start takes (self, soon), known is (self)",
    ),
    "source": (
        "old = api.PContext.start\ndef start(self): old(self)\napi.PContext.start = start",
        "the source of torch.distributed.elastic.multiprocessing.api.PContext.start has changed",
    ),
}


@pytest.mark.parametrize("other", OTHER_TORCHES)
def test_unknown_torch_is_said_and_left_alone(script: Path, other: str) -> None:
    change, said = OTHER_TORCHES[other]
    program = script.parent / "other.py"  # a file: a function without source has none to compare
    program.write_text(
        f"import sys\nfrom torch.distributed.elastic.multiprocessing import api\n{change}\n"
        "import taskd.python.adaptor.patch\nfrom torch.distributed import run\n"
        "run.main(sys.argv[1:])"
    )
    done = start(
        [sys.executable, str(program), "--standalone", "--nproc-per-node", "2", str(script)],
        script.parent,
        TASKD_PROCESS_ENABLE="on",
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert "taskd works with torch 2.7.1, " in done.stderr
    assert done.stdout.count("of 2 parent") == 2
    assert "taskd-forkserver" not in done.stdout


def test_a_torch_that_is_not_tested_and_looks_like_one_that_is_works(script: Path) -> None:
    code = (
        "import torch, sys\nreal, torch.__version__ = torch.__version__, '3.0.0'\n"
        "import taskd.python.adaptor.patch\ntorch.__version__ = real\n"
        "from torch.distributed import run\nrun.main(sys.argv[1:])"
    )
    done = start(
        [sys.executable, "-c", code, "--standalone", "--nproc-per-node", "2", str(script)],
        script.parent,
        TASKD_PROCESS_ENABLE="on",
        TASKD_FORKSERVER="fork",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch 3.0.0 is not one that taskd is tested with") == 1
    assert done.stdout.count("parent taskd-forkserver") == 2


@pytest.mark.parametrize("way", ["no python", "other python", "function"])
def test_other_entrypoints_are_left_to_torch(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text("#!" + sys.executable + "\n" + SAYS_PARENT, encoding="utf-8")
    (tmp_path / "train.py").chmod(0o755)
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    arguments = {
        "no python": ["--no-python", "./train.py"],
        "other python": ["train.py"],
        "function": ["--run-path", "train.py"],
    }[way]
    extra = {"PYTHON_EXEC": str(other)} if way == "other python" else {}
    done = taskd_run(tmp_path, "--standalone", "--nproc-per-node", "2", *arguments, **extra)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parent ") == 2
    assert "taskd-forkserver" not in done.stdout
    assert "taskd leaves this job to torchrun" in done.stderr


def test_what_cannot_be_forked_is_executed(tmp_path: Path) -> None:
    """A folder with __main__.py; its parent is still the forkserver, which watches it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(SAYS_PARENT, encoding="utf-8")
    done = taskd_run(tmp_path, "--standalone", "--nproc-per-node", "2", "app")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parent taskd-forkserver") == 2


def test_redirects_and_tee(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], "
        "file=sys.stderr)\n",
        encoding="utf-8",
    )
    done = taskd_run(
        tmp_path,
        "--standalone",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        "--redirects",
        "3",
        "--tee",
        "0:1",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[default0]:out 0\n"
    for rank in "01":
        for stream in ("out", "err"):
            files = list(tmp_path.glob(f"logs/*/attempt_0/{rank}/std{stream}.log"))
            assert [file.read_text(encoding="utf-8") for file in files] == [f"{stream} {rank}\n"]


@pytest.mark.parametrize("rendezvous", ["standalone", "static", "c10d"])
def test_restart_without_a_manager(tmp_path: Path, rendezvous: str) -> None:
    """The whole group, warm, under a fresh store prefix.

    Plain torchrun >= 2.6 fails its second attempt here.
    """
    (tmp_path / "train.py").write_text(FAILS_TWICE, encoding="utf-8")
    port = harness.free_port()
    arguments = {
        "standalone": ["--standalone"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
    }[rendezvous]
    done = taskd_run(
        tmp_path,
        *arguments,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "train.py",
        TASKD_FAULT_TIMEOUT="3",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"attempt {attempt}" for attempt in range(3)]


def test_spent_budget_without_a_manager(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_TWICE, encoding="utf-8")
    done = taskd_run(
        tmp_path,
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "train.py",
        TASKD_FAULT_TIMEOUT="3",
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["attempt 0", "attempt 1"]
    assert "exitcode  : 3" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_orphans_when_torchrun_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(WAITS, encoding="utf-8")
    mark = uuid.uuid4().hex
    environment = harness.environment(
        TASKD_TEST_MARK=mark, TASKD_PORT=str(harness.free_port()), TASKD_MANAGER="off"
    )
    command = [
        sys.executable,
        "-m",
        "taskd.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        seen = b""
        while seen.count(b"up") < 2:  # unbuffered workers write a line in pieces, and share it
            assert select.select([process.stdout], [], [], TIMEOUT_S)[0]
            seen += os.read(process.stdout.fileno(), 100)
            assert seen
        os.kill(process.pid, number)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    deadline = time.monotonic() + TIMEOUT_S
    for pid in harness.marked(mark):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], (
            f"{pid} lives on"
        )
        os.close(descriptor)
