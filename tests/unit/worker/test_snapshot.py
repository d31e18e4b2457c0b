"""Snapshots of a training state beside the training.

What is copied is what was committed, whatever the training does meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from taskd.errors import ArenaError, StateError
from taskd.native.arena import PIECE_BYTES, Arena
from taskd.worker.saving.copier import Snapshotter, load
from taskd.worker.saving.staging import Staging, mark

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0


def various() -> dict[str, torch.Tensor]:
    """Every dtype, shape and layout that a state may have."""
    torch.manual_seed(3)
    found = {
        str(dtype): torch.randn(7, 3).to(dtype)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.complex64,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.float8_e4m3fn,
        )
    }
    return found | {
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 9).t(),
        "strided": torch.randn(20)[::3],
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "long": torch.randn(PIECE_BYTES // 2 + 11),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [
        tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        for tensor in (left, right)
    ]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


@pytest.fixture
def made():
    """Arenas that a Snapshotter asked for, seen through descriptors of somebody else."""
    arenas: list[Arena] = []
    yield arenas
    for arena in arenas:
        arena.close()


@pytest.fixture
def snapshotter(made):
    def make(shard_bytes: int) -> Arena:
        arena = Arena.create(shard_bytes)
        made.append(Arena.attach(os.dup(arena.fd)))
        return arena

    snapshotter = Snapshotter(make, every=1)
    yield snapshotter
    snapshotter.close()
    if snapshotter.arena is not None:
        snapshotter.arena.close()


def test_everything_comes_back_bit_by_bit_also_elsewhere(snapshotter, made):
    tensors = various()
    assert snapshotter.commit(4, 1, tensors, b"the rest")
    snapshotter.wait()
    assert snapshotter.problem == ""
    assert (snapshotter.newest.version, snapshotter.newest.generation) == (4, 1)
    targets = blank(tensors)
    targets["transposed"] = torch.zeros(5, 9).t()  # any layout on this side as well
    assert load(made[0], 4, targets) == b"the rest"
    assert all(same(targets[name], tensors[name]) for name in tensors)


@pytest.mark.usefixtures("elsewhere")
def test_the_default_device_of_the_script_is_not_ours(snapshotter, made):
    with torch.device("cpu"):
        tensors = various()
        targets = {name: tensor.clone().zero_() for name, tensor in blank(tensors).items()}
        targets["transposed"] = torch.zeros(5, 9).t()
    assert snapshotter.commit(4, 1, tensors)
    snapshotter.wait()
    load(made[0], 4, targets)
    assert all(same(targets[name], tensors[name]) for name in tensors)


def test_a_snapshot_is_the_state_of_its_commit_while_training_goes_on_in_place(snapshotter, made):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256)
    )
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: snapshotter.wait())
    kept = {}
    for version in range(1, 31):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        tensors = dict(model.state_dict())
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{key}": value for key, value in state.items()}
        kept[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        changing = [name for name, _ in model.named_buffers()]
        assert snapshotter.commit(version, 0, tensors, changing=changing)
        model(torch.randn(8, 256))  # running statistics change at once
    snapshotter.wait()
    assert [held.version for held in made[0].versions()] == [30, 29]
    for version in (29, 30):
        targets = blank(kept[version])
        load(made[0], version, targets)
        assert all(same(targets[name], tensor) for name, tensor in kept[version].items())
    assert len(made) == 1


def test_a_replaced_storage_is_copied_as_it_was_at_the_commit(made):
    gate = threading.Event()
    parameter = torch.nn.Parameter(torch.ones(1000))

    def make(shard_bytes):
        assert gate.wait(DEADLINE_S)
        made.append(Arena.create(shard_bytes))
        return made[-1]

    snapshotter = Snapshotter(make, every=1)
    assert snapshotter.commit(1, 0, {"p": parameter.detach()})
    parameter.data = torch.zeros(1000)
    gate.set()
    snapshotter.wait()
    targets = {"p": torch.zeros(1000)}
    load(made[0], 1, targets)
    assert targets["p"].sum() == 1000
    snapshotter.close()


def test_only_every_kth_version_is_due_and_none_while_a_copy_runs(made):
    gate, asked = threading.Event(), threading.Event()

    def make(shard_bytes):
        asked.set()
        assert gate.wait(DEADLINE_S)
        made.append(Arena.create(shard_bytes))
        return made[-1]

    snapshotter = Snapshotter(make, every=3)
    tensors = {"x": torch.arange(5)}
    assert [snapshotter.is_due(version) for version in (1, 2, 3)] == [False, False, True]
    assert snapshotter.commit(3, 0, tensors)
    assert asked.wait(DEADLINE_S)
    assert not snapshotter.is_due(6)
    assert not snapshotter.commit(6, 0, tensors)
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (snapshotter.wait(), waited.set()))
    waiter.start()
    assert not waited.is_set()
    gate.set()
    waiter.join(DEADLINE_S)
    assert waited.is_set()
    assert [held.version for held in made[0].versions()] == [3]
    assert snapshotter.commit(9, 0, tensors)
    snapshotter.close()


def test_a_state_that_grows_moves_to_a_larger_arena_and_the_old_one_is_there_until_then(made):
    small, large = (
        {"a": torch.ones(1000)},
        {"a": torch.ones(1000), "late": torch.full((500_000,), 2.0)},
    )
    seen = []

    def make(shard_bytes):
        seen.append([held.version for arena in made for held in arena.versions()])
        arena = Arena.create(shard_bytes)
        made.append(Arena.attach(os.dup(arena.fd)))
        return arena

    snapshotter = Snapshotter(make, every=1)
    snapshotter.prepare(4000)
    for version, tensors in ((1, small), (2, small), (3, large), (4, large), (5, small)):
        assert snapshotter.commit(version, 0, tensors)
        snapshotter.wait()
        assert snapshotter.problem == ""
    assert seen == [[], [2, 1]]
    assert [held.version for held in made[0].versions()] == [2, 1]
    assert [held.version for held in made[1].versions()] == [5, 4]
    targets = blank(small)
    load(made[0], 2, targets)
    assert same(targets["a"], small["a"])
    targets = blank(large)
    load(made[1], 4, targets)
    assert same(targets["late"], large["late"])
    snapshotter.close()


def test_no_memory_for_a_larger_arena_costs_the_snapshots_from_then_on_and_nothing_else(
    made, caplog
):
    def make(shard_bytes):
        if shard_bytes > 10**6:
            raise ArenaError("no node memory for snapshots: so much is wanted")
        made.append(Arena.create(shard_bytes))
        return made[-1]

    snapshotter = Snapshotter(make, every=1, rank=5)
    for version, size in ((1, 10), (2, 10**6), (3, 10**6), (4, 20)):
        assert snapshotter.commit(version, 0, {"x": torch.full((size,), float(version))})
        snapshotter.wait()
        assert bool(snapshotter.problem) == (size > 20)
        assert snapshotter.newest.version == {2: 1, 3: 1}.get(version, version)
    assert [held.version for held in made[0].versions()] == [4, 1]
    errors = [record.message for record in caplog.records]
    assert len(errors) == 1, "said once"
    for text in (
        "rank 5",
        "no snapshot of version 2",
        "so much is wanted",
        "newest snapshot is that of version 1",
    ):
        assert text in errors[0]
    snapshotter.close()


@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_without_memory_of_its_own_is_named_and_the_last_snapshot_stays(
    snapshotter, made, bad, caplog
):
    snapshotter.commit(1, 0, {"good": torch.ones(3)})
    snapshotter.wait()
    snapshotter.commit(2, 0, {"good": torch.ones(3), "bad.weight": bad})
    snapshotter.wait()
    assert "'bad.weight'" in snapshotter.problem
    assert "'bad.weight'" in caplog.text
    assert [held.version for held in made[0].versions()] == [1]


def test_not_enough_memory_at_the_start_is_an_error_of_the_start():
    snapshotter = Snapshotter(Arena.create, every=1)
    with pytest.raises(ArenaError, match=r"MemAvailable|cgroup"):
        snapshotter.prepare(10**13)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3", None])
def test_every_must_be_a_number_of_steps(every):
    with pytest.raises(StateError, match="snapshot_every="):
        Snapshotter(Arena.create, every)


def test_closing_gives_up_a_running_copy_and_can_be_done_twice(made):
    gate, asked = threading.Event(), threading.Event()

    def make(shard_bytes):
        made.append(Arena.create(shard_bytes))
        asked.set()
        assert gate.wait(DEADLINE_S)
        return made[-1]

    snapshotter = Snapshotter(make, every=1)
    snapshotter.commit(1, 0, {"x": torch.ones(10)})
    assert asked.wait(DEADLINE_S)
    closer = threading.Thread(target=snapshotter.close)
    closer.start()
    while snapshotter.is_due(1) or not snapshotter._is_closing:
        pass
    gate.set()
    closer.join(DEADLINE_S)
    snapshotter.close()
    snapshotter.wait()
    assert made[0].versions() == []
    assert not snapshotter.commit(2, 0, {"x": torch.ones(10)})


def test_a_forked_child_waits_for_nothing(made):
    gate, asked = threading.Event(), threading.Event()

    def make(shard_bytes):
        asked.set()
        assert gate.wait(DEADLINE_S)
        made.append(Arena.create(shard_bytes))
        return made[-1]

    snapshotter = Snapshotter(make, every=1)
    snapshotter.commit(1, 0, {"x": torch.ones(10)})
    assert asked.wait(DEADLINE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(DEADLINE_S))
        snapshotter.wait()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    gate.set()
    snapshotter.wait()
    snapshotter.close()


# ---------------------------------------------------------------- loading


def test_what_does_not_fit_is_named_and_nothing_is_changed(snapshotter, made):
    snapshotter.commit(1, 0, {"a": torch.ones(4), "layer.weight": torch.ones(2, 3)})
    snapshotter.wait()
    good = {"a": torch.zeros(4), "layer.weight": torch.zeros(2, 3)}
    for change, text in (
        (
            {"layer.weight": torch.zeros(3, 2)},
            (
                r"'layer.weight' is float32 \[2, 3\] there and "
                r"float32 \[3, 2\] here"
            ),
        ),
        ({"layer.weight": torch.zeros(2, 3, dtype=torch.float64)}, "float64"),
        ({"new": torch.zeros(1)}, "no tensor 'new'"),
    ):
        with pytest.raises(StateError, match=text):
            load(made[0], 1, good | change)
    with pytest.raises(StateError, match=r"has 'layer\.weight', which is not among"):
        load(made[0], 1, {"a": good["a"]})
    with pytest.raises(ArenaError, match="no snapshot of version 2"):
        load(made[0], 2, good)
    assert not any(tensor.any() for tensor in good.values())
    load(made[0], 1, good)
    assert all(tensor.all() for tensor in good.values())


def test_a_damaged_tensor_is_named_and_no_target_is_touched(snapshotter, made):
    snapshotter.commit(1, 0, {"a": torch.ones(4), "layer.weight": torch.full((1000,), 0.123)})
    snapshotter.wait()
    data = os.pread(made[0].fd, 1 << 20, 0)
    offset = data.index(torch.full((1,), 0.123).view(torch.uint8).numpy().tobytes() * 10)
    os.pwrite(made[0].fd, bytes([data[offset + 2000] ^ 1]), offset + 2000)
    targets = {"a": torch.zeros(4), "layer.weight": torch.zeros(1000)}
    with pytest.raises(ArenaError, match=r"layer\.weight"):
        load(made[0], 1, targets)
    assert not any(tensor.any() for tensor in targets.values())


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 1000, 1001])
def test_staged_pieces_are_the_tensor_in_order(count):
    """On the CPU, whose streams do nothing: the order of pieces and buffers is the same."""
    device = torch.device("cpu")
    staging, tensor = Staging(device, 400), torch.randn(count)
    staging.follow(mark(device))
    import ctypes

    found = b"".join(
        ctypes.string_at(address, length) for address, length in staging.pieces(tensor)
    )
    assert found == tensor.numpy().tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_state_on_a_device_is_copied_as_it_was_at_the_commit(snapshotter, made):
    tensors = {
        "a": torch.randn(PIECE_BYTES, device="cuda"),
        "b": torch.randn(5, 7, device="cuda").t(),
        "step": torch.tensor(3.0),
    }
    for version in range(1, 11):
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        assert snapshotter.commit(version, 0, tensors)
        snapshotter.wait()
        for tensor in tensors.values():
            tensor.mul_(1.25)
        targets = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
        load(made[0], version, targets)
        assert all(torch.equal(targets[name], kept[name]) for name in kept)


# ---------------------------------------------------------------- crashes

# argv: arena, pipe. Trains for ever; every state is a function of its version.
TRAINING = """
import os, sys, torch
from taskd.native.arena import Arena
from taskd.worker.saving.copier import Snapshotter
torch.set_num_threads(1)
arena, pipe = Arena.attach(int(sys.argv[1])), int(sys.argv[2])
snapshotter = Snapshotter(Arena.create, every=1)
snapshotter.arena = arena
version = max((held.version for held in arena.versions()), default=0)
tensors = {"a": torch.empty(1_500_000), "b": torch.empty(2, dtype=torch.int64),
           "c": torch.empty(1_000_000, dtype=torch.bfloat16)}
while True:
    snapshotter.wait()
    version += 1
    for tensor in tensors.values():
        tensor.fill_(version)
    assert snapshotter.commit(version, 0, tensors, b"%d" % version), snapshotter.problem
    os.write(pipe, b"+")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.extended("[2]"))])
def test_a_training_that_is_killed_leaves_whole_snapshots_only(kills):
    chance = random.Random(20240613)
    with contextlib.closing(Arena.create(9 << 20)) as arena:
        newest = 0
        for _ in range(kills):
            reader, writer = os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-c", TRAINING, str(arena.fd), str(writer)],
                pass_fds=[arena.fd, writer],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
            os.close(writer)
            for _ in range(chance.randrange(3, 20)):
                assert os.read(reader, 1) == b"+"
            for _ in range(chance.randrange(10_000)):
                pass
            child.send_signal(signal.SIGKILL)
            assert child.wait(DEADLINE_S) == -signal.SIGKILL
            os.close(reader)
            held = [found.version for found in arena.versions()]
            assert held
            assert held[0] > newest, (
                "two commits at least were made, so the first of them is complete"
            )
            newest = held[0]
            for version in held:
                targets = {
                    "a": torch.zeros(1_500_000),
                    "b": torch.zeros(2, dtype=torch.int64),
                    "c": torch.zeros(1_000_000, dtype=torch.bfloat16),
                }
                assert load(arena, version, targets) == b"%d" % version
                for tensor in targets.values():
                    assert same(tensor, torch.full_like(tensor, version))


def test_a_tensor_that_changes_while_it_is_copied_makes_no_snapshot(made, caplog):
    gate = threading.Event()

    def make(shard_bytes):
        assert gate.wait(DEADLINE_S)
        made.append(Arena.create(shard_bytes))
        return made[-1]

    snapshotter = Snapshotter(make, every=1)
    tensor = torch.zeros(1000)
    assert snapshotter.commit(1, 0, {"good": torch.ones(3), "swapped": tensor})
    tensor.add_(1)  # an average that is swapped in for a validation
    gate.set()
    snapshotter.wait()
    assert "swapped was changed while it was copied" in snapshotter.problem
    assert snapshotter.arena is None
    assert snapshotter.commit(2, 0, {"good": torch.ones(3), "swapped": tensor})
    snapshotter.wait()
    assert [held.version for held in snapshotter.arena.versions()] == [2]
    snapshotter.close()
