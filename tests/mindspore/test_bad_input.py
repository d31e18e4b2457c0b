"""What can be wrong with a script, a disk, a checkpoint, a MindSpore: said, and nothing is lost."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from typing import TYPE_CHECKING

import pytest

from taskd.errors import StateError

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make test-mindspore")

import numpy as np  # noqa: E402
from mindspore import nn  # noqa: E402

import taskd.mindspore  # noqa: E402
from taskd.checkpoint import flat, flat_memory, folder  # noqa: E402
from taskd.clock import MonotonicClock  # noqa: E402
from taskd.mindspore import internals, train_state  # noqa: E402
from taskd.mindspore.content import Content  # noqa: E402

if TYPE_CHECKING:
    from tests.mindspore.jobs import Job


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mindspore.set_device("CPU")


def network(width: int = 8) -> nn.Cell:
    return nn.SequentialCell(nn.Dense(4, width), nn.Dense(width, 2))


def test_what_is_copied_out_is_what_is_put_back() -> None:
    one, other = network(), network()
    buffer = np.empty(Content({"network": one}).size_bytes, np.uint8)
    held = Content({"network": one})
    held.copy_into(memoryview(buffer))
    Content({"network": other}).load(held.layout, memoryview(buffer))
    for mine, theirs in zip(one.get_parameters(), other.get_parameters(), strict=True):
        assert np.array_equal(mine.asnumpy(), theirs.asnumpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "bool_"])
def test_each_type_comes_back_to_the_last_bit(dtype: str) -> None:
    kind = getattr(mindspore, dtype)
    values = mindspore.Tensor(np.array([[1.0, 0.0], [0.5, 3.0]], np.float32)).astype(kind)
    cell = nn.Cell()
    cell.weight = mindspore.Parameter(values, name="weight")
    held = Content({"cell": cell})
    buffer = np.empty(held.size_bytes, np.uint8)
    held.copy_into(memoryview(buffer))
    cell.weight.set_data(mindspore.Tensor(np.zeros((2, 2), np.float32)).astype(kind))
    held.load(held.layout, memoryview(buffer))
    assert str(cell.weight.dtype) == str(values.dtype)
    assert cell.weight.asnumpy().tobytes() == buffer[: held.layout[0].end].tobytes()


def test_another_network_is_refused_by_its_names_and_shapes() -> None:
    held = Content({"network": network(8)})
    buffer = np.empty(held.size_bytes, np.uint8)
    held.copy_into(memoryview(buffer))
    with pytest.raises(StateError, match=r"0.weight is F32 \[8, 4\] in it and F32 \[9, 4\] here"):
        Content({"network": network(9)}).load(held.layout, memoryview(buffer))
    more = nn.SequentialCell(nn.Dense(4, 8), nn.Dense(8, 2), nn.Dense(2, 2))
    with pytest.raises(StateError, match=r"2 are not in it \(2.bias, 2.weight\)"):
        Content({"network": more}).load(held.layout, memoryview(buffer))


def test_what_is_no_cell_is_refused_by_its_role() -> None:
    with pytest.raises(StateError, match="optimizer='adam' is not accepted"):
        taskd.mindspore.TrainState(network(), "adam")


@pytest.mark.parametrize("name", ["checkpoint_every", "checkpoint_keep", "snapshot_every"])
@pytest.mark.parametrize("number", [0, -1, "2"])
def test_a_number_that_cannot_be_is_refused_by_its_name(name: str, number: object) -> None:
    with pytest.raises(StateError, match=f"{name}={number!r} is not accepted: expected 1 or more"):
        taskd.mindspore.TrainState(network(), **{name: number})


def test_a_commit_before_restore_says_what_to_do() -> None:
    with pytest.raises(StateError, match=r"call restore\(\) first"):
        taskd.mindspore.TrainState(network()).commit()


def divide(cell: nn.Cell) -> None:
    """What a graph that divides parameters does: each rank has half of the first one."""
    half = mindspore.Tensor(cell[0].weight.asnumpy()[:4])
    cell[0].weight.set_data(half, slice_shape=True)


@pytest.fixture
def alone(monkeypatch, tmp_path) -> None:
    """A process without a launcher, whose SIGTERM is left to pytest."""
    monkeypatch.setattr(train_state, "SaveAtTheEnd", lambda *_: None)
    monkeypatch.setenv("TASKD_CHECKPOINT_DIR", str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_a_graph_may_divide_parameters_until_restore() -> None:
    cell = network()
    state = taskd.mindspore.TrainState(cell)
    divide(cell)
    state.restore()
    state.commit()
    _, kept = flat_memory.open_snapshot(state._arenas, 1)
    assert {one.name: one.shape for one in kept.layout}["0.weight"] == (4, 4)


@pytest.mark.usefixtures("alone")
def test_parameters_that_change_behind_restore_are_named() -> None:
    cell = network()
    state = taskd.mindspore.TrainState(cell)
    state.restore()
    divide(cell)
    said = r"0.weight is \[4, 4\], and was \[8, 4\] in restore\(\).*call model.build\(...\) before"
    with pytest.raises(StateError, match=said):
        state.commit()


@pytest.mark.usefixtures("alone")
def test_a_data_set_that_cannot_begin_in_the_middle_is_said(monkeypatch, caplog) -> None:
    data = mindspore.dataset.NumpySlicesDataset({"x": np.zeros((8, 4), np.float32)}).batch(1)
    monkeypatch.delattr(mindspore.dataset.Dataset, "set_init_step")
    first = taskd.mindspore.TrainState(network(), dataset=data)
    assert "Dataset.set_init_step is missing: after a restart the data set begins" in caplog.text
    first.restore()
    first.commit(3)
    second = taskd.mindspore.TrainState(network(), dataset=data)
    second._arenas = first._arenas
    assert second.restore() == 3
    said = "the data set begins anew, and not behind step 3: BatchDataset has no set_init_step"
    assert said in caplog.text
    assert second.step_in_epoch == 3


@pytest.mark.usefixtures("alone")
def test_what_was_read_from_the_disk_is_saved_before_the_first_step(tmp_path) -> None:
    """Ranks that end in their first step have no other one in common."""
    first = taskd.mindspore.TrainState(network())
    first.restore()
    first.commit(3)
    saved = flat_memory.save({0: first._arenas}, "SIGTERM", MonotonicClock(), 1.0)
    assert saved is not None
    second = taskd.mindspore.TrainState(network())
    assert second.restore() == 3
    assert second._arenas.versions() == (3,)
    again = flat_memory.save({0: second._arenas}, "SIGTERM", MonotonicClock(), 1.0)
    assert again == saved
    second.commit()
    assert second._arenas.versions() == (3, 4)


def test_a_mindspore_of_another_version_is_told_of_what_it_lacks(monkeypatch, caplog) -> None:
    assert internals.differences() == []
    monkeypatch.delattr(mindspore.Tensor, "data_ptr", raising=False)
    monkeypatch.delattr(mindspore, "default_generator")
    monkeypatch.setattr(mindspore, "__version__", "2.7.1")
    with caplog.at_level(logging.WARNING):
        internals.say_differences()
    assert "MindSpore 2.7.1 differs from 2.10.0" in caplog.text
    assert "default_generator is another: random numbers after a restart are others" in caplog.text
    assert internals.generator() == {}


def test_without_data_ptr_a_snapshot_is_the_same(monkeypatch) -> None:
    one = network()
    fast, slow = Content({"network": one}), Content({"network": one})
    slow._is_live = False
    first, second = (np.empty(fast.size_bytes, np.uint8) for _ in range(2))
    fast.copy_into(memoryview(first))
    slow.copy_into(memoryview(second))
    assert first.tobytes() == second.tobytes()


@pytest.mark.timeout(1800)
def test_a_checkpoint_is_read_by_mindspore_itself(job: Job) -> None:
    assert job.start(2, CHECKPOINT_EVERY="20").end() == 0, job.output
    newest = folder.scan(job.checkpoints, "ms", is_full=True).valid[0]
    assert newest.manifest.version == 60
    path = newest.path / flat.file_name(0)
    held = mindspore.load_checkpoint(str(path), format="safetensors")
    state = flat.read(newest, 0)
    for one in state.layout:
        assert held[one.name].asnumpy().tobytes() == bytes(state.data[one.start : one.end])


@pytest.mark.timeout(1800)
def test_a_damaged_checkpoint_is_passed_over_by_all(job: Job) -> None:
    assert job.start(2, CHECKPOINT_EVERY="20").end() == 0, job.output
    (expected,) = job.digests(2)
    newest, second = folder.scan(job.checkpoints, "ms").valid[:2]
    path = newest.path / flat.file_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert job.start(2).end() == 0, job.output
    assert job.began_at(0) == job.began_at(1) == [second.manifest.version]
    assert job.digests(2) == {expected}


@pytest.mark.timeout(1800)
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(job: Job, small_disk) -> None:
    job.environment["TASKD_CHECKPOINT_DIR"] = str(small_disk)
    assert job.start(2, CHECKPOINT_EVERY="30", WIDTH="400000").end() == 0, job.output
    assert "could not be saved, the previous ones stay" in job.said(0) + job.said(1)
    assert not folder.scan(small_disk, "ms").valid
    assert [path.name for path in pathlib.Path(small_disk).glob(".step-*")] == []
    with contextlib.suppress(StopIteration):
        assert job.digests(2)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("without", ["1", "0,1"])
def test_ranks_without_node_memory_go_on_from_checkpoints(job: Job, without: str) -> None:
    assert job.start(2).end() == 0, job.output
    (expected,) = job.digests(2)
    environment = {"NO_MEMORY": without, "CHECKPOINT_EVERY": "20", "FAULTS": "1@50:begin"}
    assert job.start(2, **environment).end() == 0, job.output
    assert job.began_at(0) == job.began_at(1) == [0, 40]
    assert job.digests(2) == {expected}
    assert job.said(1).count("no snapshots from step") == 2
    newest = folder.scan(job.checkpoints, "ms", is_full=True).valid[0]
    assert newest.manifest.version == 60
