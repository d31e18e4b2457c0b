"""examples/digits.py against digits_plain.py.

A small difference, the same results, and no trace of a killed process.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.examples.test_examples import EXAMPLES, NOWHERE, run_and_kill, run_plainly
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

PLAIN, ADAPTED = EXAMPLES / "digits_plain.py", EXAMPLES / "digits.py"
# with two ranks 12 steps an epoch, and 3 forward passes to validate
OPTIONS = ("--epochs", "2", "--batch-size", "64")
ACCURACY = re.compile(r"Acc@1 (\d+\.\d{3})")
FILES = ("checkpoint.pth.tar", "model_best.pth.tar")

needs_scikit_learn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the images come with scikit-learn"
)


def code(path: pathlib.Path) -> list[str]:
    """Its lines without the docstring."""
    return path.read_text().partition('"""\n\n')[2].splitlines()


def test_the_difference_is_small() -> None:
    changes = [
        line
        for line in difflib.ndiff(code(PLAIN), code(ADAPTED))
        if line[0] in "+-" and line[1:].strip()
    ]
    assert len([line for line in changes if line[0] == "-"]) <= 6
    assert len([line for line in changes if line[0] == "+"]) <= 16
    assert "taskd" not in "\n".join(code(PLAIN))


def same(one: Any, other: Any) -> bool:
    """To the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def saved(directory: pathlib.Path) -> dict[str, Any]:
    assert sorted(os.listdir(directory)) == sorted(FILES)
    return {name: torch.load(directory / name) for name in FILES}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Output and files of the plain script with two ranks without taskd."""
    directory = tmp_path_factory.mktemp("plain")
    (directory / "saved").mkdir()
    output = run_plainly(directory, PLAIN, *OPTIONS, "--save-path", str(directory / "saved"))
    return output, saved(directory / "saved")


@needs_scikit_learn
@pytest.mark.slow
def test_both_train_to_the_same_in_one_process(tmp_path: pathlib.Path) -> None:
    running = []
    for script in (PLAIN, ADAPTED):
        directory = tmp_path / script.stem
        directory.mkdir()
        command = [sys.executable, str(script), "--epochs", "1", "--save-path", str(directory)]
        running.append(
            (
                directory,
                subprocess.Popen(
                    command, env=harness.environment(), stdout=subprocess.PIPE, text=True
                ),
            )
        )
    (plainly, expected), (with_taskd, found) = [
        (saved_in, process.communicate()[0]) for saved_in, process in running
    ]
    assert [process.returncode for _, process in running] == [0, 0]
    assert len(ACCURACY.findall(expected)) == 1
    assert found == expected
    assert same(saved(with_taskd), saved(plainly))


@needs_scikit_learn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "at"),
    [(0, NOWHERE), (0, ("optimizer", 6)), (1, ("forward", 14)), (0, ("forward", 16))],
    ids=["nobody", "in an epoch", "in a validation", "in the first step of an epoch"],
)
def test_a_killed_process_changes_nothing(
    tmp_path: pathlib.Path, plain: tuple[str, dict[str, Any]], rank: int, at: tuple[str, int]
) -> None:
    (tmp_path / "saved").mkdir()
    with harness.job(tmp_path) as job:
        output = run_and_kill(
            job, ADAPTED, *OPTIONS, "--save-path", str(tmp_path / "saved"), rank=rank, at=at
        )
        assert [(record["strategy"], record["steps_redone"]) for record in job.recoveries()] == [
            ("recover-in-place", 0)
        ] * (at != NOWHERE)
    expected, files = plain
    accuracies = ACCURACY.findall(expected)
    # rank 0 had told and saved it; no step was committed since, so it is done again
    if at == ("forward", 16):
        accuracies.insert(1, accuracies[0])
    assert ACCURACY.findall(output) == accuracies
    assert same(saved(tmp_path / "saved"), files)


@needs_scikit_learn
@pytest.mark.slow
def test_the_plain_script_goes_on_from_its_own_checkpoint(
    tmp_path: pathlib.Path, plain: tuple[str, dict[str, Any]]
) -> None:
    """Without a word of taskd all processes are started again; --resume does the rest."""
    directory = tmp_path / "saved"
    directory.mkdir()
    options = (*OPTIONS, "--save-path", str(directory), "--resume", str(directory / FILES[0]))
    with harness.job(tmp_path) as job:
        output = run_and_kill(job, PLAIN, *options, rank=1, at=("optimizer", 18))
        assert [record["strategy"] for record in job.recoveries()] == ["restart"]
    assert output.count(f"=> loaded {directory / FILES[0]} (epoch 1)") == 2
    assert same(saved(directory), plain[1])
