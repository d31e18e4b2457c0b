"""examples/tensorflow/resnet.py: however it ends, the next start goes on from its last checkpoint.

To the weights and the optimizer of a run without a fault, to the last bit.
"""

from __future__ import annotations

import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sysconfig
from typing import TYPE_CHECKING

import pytest

from testbed.processes import ROOT, free_port
from tests.tensorflow.training import (
    EVERY,
    GRACE_S,
    KEPT,
    LIMIT_S,
    STEPS,
    Run,
    Training,
    digest,
    kill,
    said,
    steps,
)

if TYPE_CHECKING:
    import pathlib

SEED, KILLS = 13, 4
PLACE = 17  # of one fault: not where a checkpoint is written anyway
SAVED = 2  # the example's status when it is to be started again
FRESH = "starting afresh"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S)]


def going_on(step: int) -> str:
    """What a start says."""
    return f"going on from step {step} (ckpt-{step})"


def test_kill_at_seeded_steps_and_within_a_save(training: Training, expected: str) -> None:
    """Each new process does the steps after the last checkpoint again, and no others."""
    random_steps = random.Random(SEED).sample(range(2, STEPS - 1), KILLS)
    save = 3 * EVERY
    places = sorted({*random_steps, save})
    assert len(places) == KILLS + 1
    named = [f"save-{save}" if place == save else place for place in places]
    run = training.start(*named, max_restarts=len(places))
    for place in named:
        kill(run.halted(place))
    finished = run.end()
    assert finished.returncode == 0, finished.output[-6000:]
    begins = [0, *(EVERY * ((place - 1) // EVERY) for place in places)]
    assert [done[0] - 1 for done in steps(finished.output)] == begins
    assert [done[-1] for done in steps(finished.output)] == [*places, STEPS]
    assert said(finished.output) == [
        FRESH,
        *(
            line
            for number, begin in enumerate(begins[1:], 1)
            for line in (
                f"taskd: the command ended with SIGKILL: restart {number} of {len(places)}",
                going_on(begin) if begin else FRESH,
            )
        ),
    ]
    assert digest(finished.output) == expected


def saved_and_gone_on(training: Training, run: Run, step: int, expected: str) -> None:
    """The run has ended with a checkpoint of this step; the same command goes on behind it."""
    finished = run.end()
    assert finished.returncode == SAVED, finished.output[-6000:]
    assert said(finished.output) == [
        FRESH,
        f"taskd: SIGTERM is handed on to pid, which has {GRACE_S} s",
        f"SIGTERM: saved as ckpt-{step}",
        "taskd: the command ended with exit 2 after SIGTERM: not started again",
    ]
    assert steps(finished.output) == [list(range(1, step + 1))]
    again = training.start().end()
    assert again.returncode == 0, again.output[-6000:]
    assert said(again.output) == [going_on(step)]
    assert steps(again.output) == [list(range(step + 1, STEPS + 1))]
    assert digest(again.output) == expected


@pytest.mark.parametrize(
    ("place", "step", "also_to_the_training"),
    [(PLACE, PLACE, False), (PLACE, PLACE, True), (f"save-{EVERY}", EVERY + 1, False)],
    ids=["first process", "all processes", "within a save"],
)
def test_sigterm_saves_and_the_next_start_goes_on(
    training: Training, expected: str, place: int | str, step: int, also_to_the_training: bool
) -> None:
    """To the first process of a pod, or to all of them at once: no step is done twice."""
    run = training.start(place)
    pid = run.halted(place)
    if also_to_the_training:
        os.kill(pid, signal.SIGTERM)
    os.kill(run.pid, signal.SIGTERM)
    run.wait_text("SIGTERM is handed on")
    os.kill(pid, signal.SIGCONT)
    saved_and_gone_on(training, run, step, expected)


def test_sigterm_to_the_training_alone_is_saved_and_started_again(
    training: Training, expected: str
) -> None:
    run = training.start(PLACE)
    pid = run.halted(PLACE)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    finished = run.end()
    assert finished.returncode == 0, finished.output[-6000:]
    assert said(finished.output) == [
        FRESH,
        f"SIGTERM: saved as ckpt-{PLACE}",
        "taskd: the command ended with exit 2: restart 1 of 3",
        going_on(PLACE),
    ]
    assert steps(finished.output) == [
        list(range(1, PLACE + 1)),
        list(range(PLACE + 1, STEPS + 1)),
    ]
    assert digest(finished.output) == expected


def test_the_training_dies_with_its_parent_and_the_next_start_goes_on(
    training: Training, expected: str
) -> None:
    run = training.start(PLACE)
    pid = run.halted(PLACE)
    handle = os.pidfd_open(pid)
    try:
        kill(run.pid)
        assert select.select([handle], [], [], LIMIT_S)[0]
    finally:
        os.close(handle)
    again = training.start().end()
    assert again.returncode == 0, again.output[-6000:]
    assert said(again.output) == [going_on(EVERY)]
    assert digest(again.output) == expected


def damage(path: pathlib.Path) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_damaged_checkpoint_is_passed_over(
    training: Training, undisturbed: Training, expected: str
) -> None:
    """A bit in the values of the newest one, and half of the index of the one before."""
    shutil.copytree(undisturbed.checkpoints, training.checkpoints)
    older, newest = STEPS - EVERY, STEPS
    assert {f"ckpt-{step}.index" for step in (older, newest)} < set(contents(training.checkpoints))
    damage(training.checkpoints / f"ckpt-{newest}.data-00000-of-00001")
    index = training.checkpoints / f"ckpt-{older}.index"
    index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])
    finished = training.start().end()
    assert finished.returncode == 0, finished.output[-6000:]
    lines = said(finished.output)
    assert [line.partition(" cannot be read: ")[0] for line in lines] == [
        f"ckpt-{newest}", f"ckpt-{older}", going_on(STEPS - 2 * EVERY),
    ]  # fmt: skip
    assert digest(finished.output) == expected


def test_where_no_checkpoint_can_be_read_none_is_deleted(
    training: Training, undisturbed: Training
) -> None:
    """A training from the beginning would overwrite them."""
    shutil.copytree(undisturbed.checkpoints, training.checkpoints)
    files = sorted(training.checkpoints.glob("ckpt-*.data-*"))
    assert len(files) == KEPT
    for path in files:
        damage(path)
    before = contents(training.checkpoints)
    finished = training.start(max_restarts=0).end()
    assert finished.returncode == 1
    assert "no checkpoint can be read: give another --restore-path" in finished.output
    assert steps(finished.output) == []
    assert contents(training.checkpoints) == before


@pytest.fixture
def torch_python() -> str:
    """An interpreter of this version that has torch, and can import what this one has."""
    path = os.environ.get("TASKD_TEST_TORCH_PYTHON", "")
    if not path:
        pytest.skip("no environment with torch: make install, and make test-tensorflow again")
    code = "import platform, torch; print(platform.python_version_tuple()[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() != str(platform.python_version_tuple()[:2]):
        pytest.skip(f"{path} is Python {done.stdout.strip()}, and cannot import this TensorFlow")
    return path


def test_under_torchrun_where_torch_is_there_as_well(
    training: Training, expected: str, torch_python: str
) -> None:
    """`python -m taskd.run`: one rank, an unmodified script."""
    options = ["--rdzv-backend=taskd", "--nproc-per-node=1"]
    later = 2 * PLACE
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "TASKD_PORT": str(free_port()),
        "TASKD_FAULT_TIMEOUT": str(GRACE_S),  # so long it may take to save, on a busy machine
        "TASKD_HANG_DETECTION": "off",  # a process that has stopped is to be found by us alone
    }
    command = [torch_python, "-m", "taskd.run", *options]
    run = training.execute([*command, *training.script(PLACE, later)], **variables)
    kill(run.halted(PLACE))
    pid = run.halted(later)
    os.kill(run.pid, signal.SIGTERM)
    run.wait_text("SIGTERM")
    os.kill(pid, signal.SIGCONT)
    finished = run.end()
    assert finished.returncode != 0, finished.output[-6000:]
    assert "killed (SIGKILL)" in finished.output
    assert f"going on from step {EVERY}" in finished.output
    assert f"SIGTERM: saved as {training.checkpoints}/ckpt-{later}" in finished.output
    again = training.execute([*command, *training.script()], **variables).end()
    assert again.returncode == 0, again.output[-6000:]
    assert f"going on from step {later}" in again.output
    assert digest(again.output) == expected
