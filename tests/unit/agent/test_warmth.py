"""What keeps a worker from being a fork of the warm process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.agent.spawning.protocol import SpawnRequest
from taskd.agent.spawning.warmth import why_not_warm
from taskd.config.launcher import keep_collectives
from tests.descriptors import none_free

if TYPE_CHECKING:
    import pathlib


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0", "2.13.0"])
def test_what_we_set_for_torch_ourselves_costs_no_warm_start(
    tmp_path: pathlib.Path, version: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    environment: dict[str, str] = {}
    keep_collectives(version, environment)
    request = SpawnRequest(1, (str(script),), environment)
    assert why_not_warm(request, {}) is None


def test_what_torch_reads_when_it_is_imported_does(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    request = SpawnRequest(1, (str(script),), {"TORCH_LOGS": "all"})
    assert why_not_warm(request, {}) == (
        "TORCH_LOGS differs from what the warm process was started with"
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_directory_that_cannot_be_listed_is_for_a_fresh_interpreter(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It may be another user's, with mode 0711: plain torchrun starts the script there."""
    script = tmp_path / "train.py"
    script.touch()

    def refused(path: str) -> list[str]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "listdir", refused)
    reason = why_not_warm(SpawnRequest(1, (str(script),), {}), {})
    assert reason == f"[Errno {number}] {os.strerror(number)}: '{tmp_path}'"


def test_a_script_that_cannot_be_opened_is_too(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with none_free():
        reason = why_not_warm(SpawnRequest(1, (str(script),), {}), {})
    assert reason == f"[Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)}: '{script}'"


def test_a_locale_that_python_has_set_for_itself_does_not() -> None:
    """Nothing is set under `env -i`: a fresh interpreter would set the same."""
    program = (
        "import os\n"
        "from taskd.agent.spawning.warmth import initial_environment\n"
        "print(os.environ['LC_CTYPE'], initial_environment().get('LC_CTYPE'))"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    assert shown.stdout.split() == ["C.UTF-8", "C.UTF-8"]
