"""Torch loads taskd's entry point in every torchrun: taskd is there when asked for, else inert."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.installation import entry_points, install
from tests.process.test_patch import patched_run, script, start

if TYPE_CHECKING:
    import pathlib

__all__ = ["patched_run", "script"]
pytestmark = pytest.mark.slow

TWO = ("--nproc-per-node", "2")
# Torchrun, and what of taskd it has loaded in the end.
LISTS_MODULES = """
import sys
from torch.distributed import run
run.main(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.startswith("taskd")))
"""
ALL_AT_ONCE = """
import runpy, sys
import taskd.run
import taskd.python.adaptor.patch
taskd.python.adaptor.patch.install()
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNKNOWN_TORCH = """
import sys
from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
original = LocalElasticAgent._monitor_workers
LocalElasticAgent._monitor_workers = lambda self, renamed: original(self, renamed)
run.main(sys.argv[1:])
"""


def test_it_names_what_there_is() -> None:
    points = entry_points()
    assert list(points) == ["taskd"]
    assert callable(EntryPoint("taskd", points["taskd"], "torchrun.handlers").load()())


def test_a_torchrun_that_does_not_ask_for_it_is_left_alone(script: pathlib.Path) -> None:
    path = install(script.parent / "installed")
    done = start(
        [sys.executable, "-c", LISTS_MODULES, *TWO, str(script)], script.parent, PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr
    assert "taskd-forkserver" not in done.stdout
    assert done.stdout.count("max 0") == 2
    loaded = "taskd taskd.python taskd.python.adaptor taskd.python.adaptor.handler"
    assert done.stdout.splitlines()[-1] == loaded


@pytest.mark.parametrize("way", ["switch", "backend", "both", "all and the patch"])
def test_it_is_there_once_however_it_is_asked_for(
    script: pathlib.Path, patched_run: pathlib.Path, way: str
) -> None:
    command = {
        "all and the patch": ["-c", ALL_AT_ONCE, str(patched_run)],
    }.get(way, ["-m", "torch.distributed.run"])
    backend = [] if way == "switch" else ["--rdzv-backend=taskd"]
    extra = {} if way == "backend" else {"TASKD_PROCESS_ENABLE": "on"}
    done = start(
        [sys.executable, *command, *backend, *TWO, str(script)],
        script.parent,
        PYTHONPATH=install(script.parent / "installed"),
        **extra,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parent taskd-forkserver") == 2
    assert done.stdout.count("max 32767") == 2
    assert done.stderr.count("taskd 0.1.0 from") == 1
    assert done.stderr.count("forkserver started by fork: this process is torchrun alone") == 1


@pytest.mark.parametrize("why", ["switched off", "unknown torch"])
def test_the_backend_is_c10d_where_taskd_cannot_be(script: pathlib.Path, why: str) -> None:
    is_unknown = why == "unknown torch"
    command = ["-c", UNKNOWN_TORCH] if is_unknown else ["-m", "torch.distributed.run"]
    done = start(
        [sys.executable, *command, "--rdzv-backend=taskd", *TWO, str(script)],
        script.parent,
        PYTHONPATH=install(script.parent / "installed"),
        **({} if is_unknown else {"TASKD_PROCESS_ENABLE": "off"}),
    )
    assert done.returncode == 0, done.stderr
    assert "taskd-forkserver" not in done.stdout
    assert done.stdout.count("max 0") == 2
    assert "goes on as with --rdzv-backend=c10d" in done.stderr
    assert ("taskd is not installed into this torchrun" in done.stderr) == is_unknown


def test_one_that_cannot_be_imported_costs_a_line(script: pathlib.Path) -> None:
    path = install(script.parent / "installed", {"taskd": "taskd.no_such_module:get_handler"})
    done = start(
        [sys.executable, "-m", "torch.distributed.run", *TWO, str(script)],
        script.parent,
        PYTHONPATH=path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("max 0") == 2
    assert "Exception while registering out of tree plugin taskd" in done.stderr


def test_of_two_installations_the_log_says_which_one_is_used(script: pathlib.Path) -> None:
    second = script.parent / "second"
    ignored = shutil.ignore_patterns("__pycache__")  # written by others meanwhile
    shutil.copytree(harness.ROOT / "taskd", second / "taskd", ignore=ignored)
    path = install(second / "installed", root=second)
    done = start(
        [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=taskd", *TWO, str(script)],
        script.parent,
        PYTHONPATH=f"{path}:{install(script.parent / 'installed')}",
    )
    assert done.returncode == 0, done.stderr
    assert f"taskd 0.1.0 from {second}/taskd" in done.stderr


def test_a_wrong_setting_is_told_before_anything_runs(script: pathlib.Path) -> None:
    """Those that only a manager reads, too: it would not start, and nothing would be recovered."""
    for wrong in (
        "fault_timeout=soon", "hang_floor=soon", "manager=maybe", "after_dump=Restart",
        "bind_addr=8.8.8.8",
    ):  # fmt: skip
        done = start(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--rdzv-backend=taskd",
                f"--rdzv-conf={wrong}",
                str(script),
            ],
            script.parent,
            PYTHONPATH=install(script.parent / wrong),
            TASKD_MANAGER="auto",
        )
        assert done.returncode == 1
        key, _, value = wrong.partition("=")
        assert f"TASKD_{key.upper()}='{value}' is not accepted" in done.stderr
        assert "Traceback" not in done.stderr
        assert "rank" not in done.stdout
