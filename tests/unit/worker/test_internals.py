"""What the worker uses of torch beyond what torch documents is taken away, one thing at a time.

Training goes on, and one warning says what is lost.
"""

import logging
import pathlib
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
from job import Job, Stop, digest
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader, dataloader

from taskd.errors import StateError
from taskd.worker import internals
from taskd.worker.objects import rollback, shards, units
from taskd.worker.process import flight
from taskd.worker.process import groups as groups_module
from taskd.worker.process.modes import Modes
from taskd.worker.state import buckets, data_order, phases, randoms
from taskd.worker.train_state import TrainState

WORKER = pathlib.Path(internals.__file__).parent


@pytest.fixture(autouse=True)
def said(monkeypatch, caplog):
    """What was said to be lost, each once."""
    monkeypatch.setattr(internals, "_said", set())
    caplog.set_level(logging.WARNING)

    def lost() -> list[str]:
        found = []
        for record in caplog.records:
            match = re.match(r"torch \S+ does not let taskd see (.*?) \(.*\): (.*)", record.message)
            if match:
                assert internals.LOST[match[1]] == match[2]
                found.append(match[1])
        return found

    return lost


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_of_them_is_used_and_taken_away_here() -> None:
    texts = [path.read_text() for path in WORKER.rglob("*.py") if path.name != "internals.py"]
    here = pathlib.Path(__file__).read_text()
    for what in internals.LOST:
        assert any(f'"{what}"' in text for text in texts), what
        assert f'"{what}"' in here, what


# ---------------------------------------------------------------- training goes on


def train(stops=(), *, wrap=lambda model: model):
    """Digest after 4 steps with batch norm, interrupted before the commits of `stops`."""
    job, stops = Job(), list(stops)

    def entry():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        ddp = wrap(model)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < 4:
            optimizer.zero_grad()
            loss = ddp(torch.randn(3, 4)).square().mean()
            if stops and state.step == stops[0]:
                stops.pop(0)
                raise Stop
            loss.backward()
            optimizer.step()
            state.commit()
        return digest(model)

    try:
        job.resume(None)
        while True:
            result, report = job.enter(entry)
            if result:
                return result
            assert report.clean, report.reason
            job.resume(report.version)
    finally:
        job.close()


def test_without_the_buckets_of_ddp(monkeypatch, said, group) -> None:
    def wrap(model):
        return nn.parallel.DistributedDataParallel(model)

    buckets.install()
    try:
        whole = train(wrap=wrap)
        monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_get_ddp_logging_data")
        assert train([2, 3], wrap=wrap) == whole, "one rank: nothing is summed in another order"
    finally:
        buckets.uninstall()
    assert said() == ["the buckets of DDP"]


def test_without_the_limits_of_buckets(monkeypatch, said) -> None:
    def limits(_ddp):
        raise AttributeError("bucket_bytes_cap")

    monkeypatch.setattr(buckets, "_limits_of", limits)
    first = types.SimpleNamespace(_remove=lambda: None, _life=None)
    buckets._FirstBackward._finish(first, None)
    assert said() == ["the buckets of DDP"]


@pytest.mark.parametrize("name", ["generator", "foreach", "batch norm"])
def test_without_what_makes_a_commit_fast_or_safe(monkeypatch, said, name) -> None:
    whole = train()
    what = {
        "generator": ["the memory of torch's generator"],
        "foreach": ["the copies of several tensors at once"],
        "batch norm": ["the buffers of batch norm"],
    }[name]
    if name == "generator":
        monkeypatch.setattr(randoms, "_find_torch_mark", lambda: None)
    elif name == "foreach":
        real = torch._foreach_copy_
        monkeypatch.setattr(
            rollback.internals,
            "has",
            lambda use, *places: internals.lose(use, "gone") if real in _found(places) else True,
        )
    else:
        monkeypatch.delattr(nn.modules.batchnorm, "_NormBase")
    assert train([1, 3]) == whole
    assert said() == what


def _found(places):
    return [getattr(owner, name, None) for owner, name in places]


# ---------------------------------------------------------------- process groups


def test_without_the_creation_of_process_groups(monkeypatch, said) -> None:
    monkeypatch.delattr(c10d, "_new_process_group_helper")
    groups = groups_module.Groups(0, 0)
    groups.install(lambda call: call())
    try:
        assert hasattr(c10d.rendezvous, "__wrapped__"), "stores are prefixed all the same"
        assert not hasattr(c10d, "_new_process_group_helper")
    finally:
        groups.uninstall()
    assert said() == ["the creation of process groups"]


def test_without_the_connection_to_the_store(monkeypatch, said) -> None:
    module = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.delattr(module, "_create_c10d_store")
    groups = groups_module.Groups(0, 0)
    groups.install(lambda call: call())
    try:
        assert not hasattr(module, "_create_c10d_store")
    finally:
        groups.uninstall()
    assert said() == ["the connection to the store"]


def test_without_the_backends_of_process_groups(said) -> None:
    assert groups_module._backends([object(), object()]) == []
    assert said() == ["the backends of process groups"]


def test_without_the_numbers_of_process_groups(monkeypatch, said) -> None:
    monkeypatch.setattr(c10d, "_world", types.SimpleNamespace(default_pg=None))
    groups_module.Groups(0, 0).retire()
    assert said() == ["the numbers of process groups"]


def test_without_the_flight_recorder(monkeypatch, said) -> None:
    for name in ("_dump_fr_trace_json", "_dump_fr_trace"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert flight.counters() == {}
    assert flight.calls() == []
    assert said() == ["the flight recorder"]


# ---------------------------------------------------------------- sharded state


def test_without_the_parameter_groups_of_fsdp2(said, group) -> None:
    from torch.distributed.fsdp import fully_shard

    job = Job()

    def entry():
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        state = TrainState(model=model)
        state.restore()
        state.commit()
        for state_group in shards._groups_in(model):
            del state_group._partial_reduce_output
        raise Stop

    try:
        job.resume(None)
        _, report = job.enter(entry)
    finally:
        job.close()
    assert not report.clean
    assert "does not let taskd see the parameter groups of FSDP2" in report.reason
    assert said() == ["the parameter groups of FSDP2"]


def test_without_the_units_of_fsdp1(said, group) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    job = Job()
    job.life.interrupts.in_recoverable = True
    try:
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        assert units.problem_of(wrapped) == ""
        del wrapped._handle.flat_param._param_infos
        with pytest.raises(StateError, match="taskd does not know in this torch"):
            TrainState(model=wrapped)
    finally:
        job.close()
    assert said() == ["the units of FSDP1"]


def test_without_what_is_known_of_dtensors(monkeypatch, said, group) -> None:
    from torch.distributed.tensor import DTensor, Shard, _redistribute, _utils

    mesh = dist.init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    monkeypatch.delattr(_utils, "compute_local_shape_and_global_offset")
    with pytest.raises(StateError, match="cannot be said on this torch"):
        shards.spans(tensor)
    monkeypatch.delattr(_redistribute, "_gen_transform_infos")
    shards.forget_meshes()
    assert said() == ["the place of a local tensor", "the caches of DTensor"]
    monkeypatch.setattr(internals, "has", lambda what, *_: internals.lose(what, "gone"))
    assert torch.equal(shards.local(tensor), torch.ones(3))
    assert said()[2:] == ["the local tensor of a DTensor"]


# ---------------------------------------------------------------- the rest


def test_without_the_iterators_of_a_data_loader(monkeypatch, said) -> None:
    monkeypatch.delattr(dataloader, "_BaseDataLoaderIter")
    phases.install()
    data_order.install()
    assert len(list(DataLoader(list(range(4)), 2))) == 2
    assert said() == ["the iterators of a DataLoader"]


def test_without_knowing_whether_an_optimizer_is_complete(monkeypatch, said) -> None:
    from taskd.worker.objects import roles

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with monkeypatch.context() as inside:
        inside.delattr(optimizer, "_optimizer_step_pre_hooks")
        with pytest.raises(StateError, match="no complete torch optimizer"):
            roles._checked_optimizer("state", "optimizer", optimizer)
        inside.setattr(torch.optim, "SGD", lambda _parameters: object())
        assert roles._checked_optimizer("state", "optimizer", optimizer) is optimizer
    assert said() == ["whether an optimizer is complete"]


def test_without_the_modes_of_a_thread(monkeypatch, said) -> None:
    modes = Modes()
    monkeypatch.setattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None, raising=False
    )
    monkeypatch.delattr(torch._C, "_is_multithreading_enabled")
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda: None)  # takes other arguments
    modes.begin()
    assert said() == ["the modes of a thread"]
    with torch.device("meta"):
        torch.set_grad_enabled(False)
        modes.begin()
        assert torch.is_grad_enabled()
    assert said() == ["the modes of a thread"]


def test_without_the_hooks_of_saved_tensors(monkeypatch, said) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    modes = Modes()
    modes.begin()
    torch.set_grad_enabled(False)
    modes.begin()
    assert torch.is_grad_enabled()
    assert said() == ["the hooks of saved tensors"]
