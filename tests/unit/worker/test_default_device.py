"""`torch.set_default_device` of a script: tensors that taskd makes for itself name their device."""

import ast
from pathlib import Path

import pytest
import torch
from job import Average, Job
from torch import nn
from torch.utils._device import _device_constructors

import taskd
from taskd.core.commands import Move
from taskd.native.arenas import Arenas
from taskd.worker.state.randoms import RandomStates
from taskd.worker.train_state import TrainState

PACKAGE = Path(taskd.__file__).parent


def test_every_tensor_that_is_made_names_its_device() -> None:
    """Those that a script's default would place."""
    makers = {getattr(function, "__name__", "") for function in _device_constructors()}
    assert [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if _is_made_anywhere(node, makers)
    ] == []


def _is_made_anywhere(node, makers) -> bool:
    function = getattr(node, "func", None)
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and function.attr in makers
        and not any(keyword.arg == "device" for keyword in node.keywords)
    )


@pytest.fixture
def job():
    job = Job()
    job.life.job_id = "job"
    job.life.saving.arenas = Arenas.create()
    job.resume(None)
    yield job
    job.life.saving.arenas.close()
    job.close()


def train(folder, steps):
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        # read from a snapshot into memory that is laid out in another way
        model[0].weight.data = torch.zeros(3, 3).t()
        optimizer, average = torch.optim.Adam(model.parameters(), lr=0.1), Average(model)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        average=average,
        snapshot_every=1,
        checkpoint_dir=folder,
        checkpoint_every=1,
    )
    restored = state.restore().source
    while state.step < steps:
        with torch.device("cpu"):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            average.update(model)
        state.commit()
    taskd.worker.life.current().saving.periodic.wait()
    found = [*model.state_dict().values(), *average.tensors.values(), torch.rand(3, device="cpu")]
    return restored, [tensor.tolist() for tensor in found]


@pytest.mark.usefixtures("elsewhere")
def test_the_state_is_saved_and_put_back(job, tmp_path) -> None:
    before = job.enter(train, tmp_path, 3)[0][1]
    job.resume(3, {0: Move(0, snapshot=3)})
    assert job.enter(train, tmp_path, 3)[0] == ("snapshot", before)
    job.resume(None)
    assert job.enter(train, tmp_path, 3)[0] == ("checkpoint", before)


@pytest.mark.usefixtures("elsewhere")
def test_generators_are_found_and_the_order_of_samples_is_drawn() -> None:
    before = torch.get_rng_state()
    assert RandomStates()._torch_mark is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert len(taskd.ElasticSampler(23, 10).global_batch(1)) == 10
