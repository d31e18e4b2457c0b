"""Plain values that lie on a device, and are read by another process.

There is none here. What is written is shown by a tensor that says it lies on one; what is read, by
the device "meta", to which any tensor can be moved.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from taskd.checkpoint.values import pack, unpack
from taskd.worker.objects import devices
from taskd.worker.objects.named import Named
from taskd.worker.objects.roles import Roles, tensors_in
from taskd.worker.restore.manifest import describe
from taskd.worker.restore.restoration import _load_part
from taskd.worker.restore.targets import Targets
from taskd.worker.saving import unpickling
from taskd.worker.state import flat
from taskd.worker.state.extras import PROTOCOL, Extras, decode_part, encode_part
from taskd.worker.state.holding import Holding
from taskd.worker.state.logbook import logbook_of
from taskd.worker.state.own_extras import Told, settle, table_of
from taskd.worker.train_state import TrainState

if TYPE_CHECKING:
    from job import Job


class Far(torch.Tensor):
    """Says that it lies on the fourth GPU of this process."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: torch.device("cuda", 3))


def far(*items: float, **options: Any) -> torch.Tensor:
    return torch.tensor(items, **options).as_subclass(Far)


def from_device(*items: float) -> torch.Tensor:
    """As it is read in host memory, of a kind of device that there is."""
    return devices.arrived(torch.tensor(items), "meta")


class Rig:
    """Holds a tensor, as a sampler of the user's may."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("loads", [pickle.loads, unpickling.loads])
def test_what_lies_on_a_device_is_read_in_host_memory(loads: Any) -> None:
    data = devices.dumps({"a": [far(1.0, 2.0), 3], "b": torch.ones(1)}, PROTOCOL)
    assert b"cuda:" not in data  # the number of the device in this process
    found = loads(data)
    assert (type(found["a"][0]), found["a"][0].device.type) == (torch.Tensor, "cpu")
    assert torch.equal(found["a"][0], torch.tensor([1.0, 2.0]))
    assert (found["a"][1], found["b"]) == (3, torch.ones(1))


def test_objects_with_tensors_and_gradients_come_back_as_they_were() -> None:
    rig = pickle.loads(devices.dumps(Rig(far(1.0, requires_grad=True)), PROTOCOL))
    assert rig.tensor.device.type == "cpu"
    assert rig.tensor.requires_grad
    assert rig.tensor.is_leaf


def test_where_it_comes_from_is_not_forgotten_on_the_way() -> None:
    """Of a black box that is read, sent on, and read again."""
    value = from_device(1.0)
    for _ in range(2):
        value = pickle.loads(devices.dumps(value, PROTOCOL))
    assert devices.to_own_device(value, None, [torch.empty(1, device="meta")]).is_meta


def test_tensors_without_memory_stay_what_they_are() -> None:
    assert pickle.loads(devices.dumps(torch.empty(2, device="meta"), PROTOCOL)).is_meta


# ---------------------------------------------------------------- reading


META = torch.empty(3, device="meta")


@pytest.mark.parametrize(
    ("value", "own", "near", "kind"),
    [
        pytest.param(from_device(1.0), META, [], "meta", id="where this rank has its own"),
        pytest.param(from_device(1.0), None, [torch.ones(1), META], "meta", id="as the model"),
        pytest.param(from_device(1.0), torch.ones(1), [META], "meta", id="its own is elsewhere"),
        pytest.param(from_device(1.0), 0.0, [META], "meta", id="its own is a number"),
        pytest.param(from_device(1.0), None, [torch.ones(1)], "cpu", id="there is no such device"),
        pytest.param(torch.ones(1), META, [META], "cpu", id="it was in host memory"),
    ],
)
def test_on_which_device_it_is_put(value: Any, own: Any, near: Any, kind: str) -> None:
    assert devices.to_own_device(value, own, near).device.type == kind


def test_everything_within_is_put_there() -> None:
    value = {"a": (from_device(1.0), 2), "b": [from_device(3.0)], "c": "text"}
    found = devices.to_own_device(value, {"a": (META, 5), "b": "other"}, [META])
    assert found["a"][0].is_meta
    assert found["b"][0].is_meta
    assert (found["a"][1], found["c"]) == (2, "text")


def holding(**values: Any) -> Holding:
    """Its model has a buffer on the device."""
    model = nn.BatchNorm1d(1)
    model.register_buffer("far", torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Holding("train", Roles.sort("train", {"model": model, "opt": optimizer, **values}))


def kinds(found: Holding) -> dict[str, str]:
    return {name: value.device.type for name, value in found.roles.values.items()}


ALL = {"here": torch.ones(1), "there": from_device(1.0), "late": from_device(2.0)}
WHERE = {"here": "cpu", "there": "meta", "late": "meta"}


def test_values_of_another_rank() -> None:
    sender, receiver = holding(**ALL), holding(here=META, there=META, late=0.0)
    sender.roles.optimizers["opt"].param_groups[0]["scales"] = [from_device(1.0)]
    told = Told(now={("values", "there"): from_device(1.0)})
    manifest, _ = describe(sender, Named(sender.roles), 1, told)
    received = pickle.loads(devices.dumps(manifest, PROTOCOL))
    Targets(received, receiver, Named(receiver.roles)).finish()
    assert kinds(receiver) == WHERE
    assert receiver.roles.optimizers["opt"].param_groups[0]["scales"][0].is_meta


def extras(is_pending: bool = False, **values: Any) -> Extras:
    return Extras({}, {"train": encode_part(values, {}, {})}, is_pending)


def test_values_of_its_own_and_of_a_rank_that_has_gone_further() -> None:
    """It was stopped in the second step, the other one was not."""
    other = Told(
        table_of(extras(**ALL | {"there": from_device(5.0)}), "train"),
        table_of(extras(**ALL), "train"),
        frozenset({("values", "there")}),
    )
    received = pickle.loads(devices.dumps(other, PROTOCOL))
    part, _ = settle("rank 1", "train", extras(is_pending=True, **ALL), extras(**ALL), received)
    assert part.values["there"] == 5
    target = holding(here=torch.zeros(1), there=META, late=0.0)
    target.load_part(part, Named(target.roles))
    assert kinds(target) == WHERE


def test_values_from_a_snapshot() -> None:
    source, target = holding(**ALL), holding(here=META, there=META, late=0.0)
    named = Named(source.roles)
    plain = flat.plain(source, named, flat.memories(source, named), {})
    kept = pickle.loads(devices.dumps(plain, PROTOCOL))
    flat.load(target, Named(target.roles), kept, {})
    assert kinds(target) == WHERE


# ---------------------------------------------------------------- memory of optimizers


class Histories(torch.optim.SGD):
    """Keeps tensors in a list, as LBFGS does, and one of another shape than the parameter."""

    def keep(self, **more: Any) -> None:
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter] = {"count": 1, "step": torch.tensor(1.0), **more}


def with_histories(device: str, **memory: Any) -> Holding:
    model = nn.Linear(2, 2, bias=False, device=device)
    optimizer = Histories(model.parameters(), lr=0.1)
    if memory:
        optimizer.keep(**memory)
    return Holding("train", Roles.sort("train", {"model": model, "opt": optimizer}))


def taken(source: Holding) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    tensors, plain = flat.flatten(source, Named(source.roles))
    return tensors, plain, {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}


def memory_of(found: Holding) -> dict[str, Any]:
    return next(iter(found.roles.optimizers["opt"].state.values()))


def test_memory_from_a_checkpoint_lies_beside_its_parameter() -> None:
    """But for the number of steps, which torch keeps in host memory."""
    deep = {"dirs": [torch.ones(4), (torch.ones(1), 3)], "more": OrderedDict(a=torch.ones(()))}
    _, plain, shapes = taken(with_histories("cpu", flat=torch.ones(4), **deep))
    target, plain = with_histories("meta"), unpack(pack("x", plain))
    named = Named(target.roles)
    rooms = flat.targets(target, named, plain, shapes)
    flat.place_memories(named, plain)
    flat.load(target, named, plain, rooms)
    found = memory_of(target)
    assert found["flat"].is_meta
    assert found["dirs"][0].is_meta
    assert found["dirs"][1][0].is_meta
    assert found["more"]["a"].is_meta
    assert (found["step"].device.type, found["count"], found["dirs"][1][1]) == ("cpu", 1, 3)
    assert type(found["more"]) is OrderedDict


def test_memory_from_a_snapshot_lies_where_it_was() -> None:
    source = with_histories("cpu", dirs=[from_device(1.0), torch.ones(1)])
    _, plain, shapes = taken(source)
    target, plain = with_histories("meta"), pickle.loads(devices.dumps(plain, PROTOCOL))
    named = Named(target.roles)
    flat.load(target, named, plain, flat.targets(target, named, plain, shapes))
    assert [one.device.type for one in memory_of(target)["dirs"]] == ["meta", "cpu"]


def test_lbfgs_from_a_checkpoint(job: Job, tmp_path: Any) -> None:
    """All of its memory is where the parameters are, in the first step as in the last."""
    job.life.job_id = "job"
    job.resume(None)
    seen: list[Any] = []

    def entry(device: str) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, device=device)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        state = TrainState(model=model, optimizer=optimizer, checkpoint_dir=tmp_path)
        if state.restore().source == "nothing":

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            state.commit()
            state.save()
        memory = next(iter(optimizer.state.values()))
        seen.append({one.device.type for one in tensors_in(memory) if one.dim()})
        seen.append({one.device.type for one in tensors_in([memory["old_dirs"], memory["ro"]])})

    job.enter(entry, "cpu")
    job.resume(None)
    job.enter(entry, "meta")
    assert seen == [{"cpu"}] * 2 + [{"meta"}] * 2


def test_values_from_a_black_box_in_a_checkpoint() -> None:
    """As the process that writes for a dead rank has them: it is on another device."""
    values = decode_part(encode_part({"loss": far(1.0)}, {}, {})).values
    assert unpack(pack("values", values)) == {"loss": torch.ones(1)}


def test_values_from_a_checkpoint_are_put_where_the_script_has_them(job: Job, tmp_path) -> None:
    job.life.job_id = "job"
    job.resume(None)

    def entry(device: str) -> list[str]:
        state = TrainState(
            model=nn.Linear(1, 1),
            losses=[torch.zeros(1, device=device)],
            count=torch.zeros(1),
            late=0,
            checkpoint_dir=tmp_path,
        )
        source = state.restore().source
        if source == "nothing":
            state.late = torch.ones(1)
            state.commit()
            state.save()
        return [source, *(value.device.type for value in (*state.losses, state.count, state.late))]

    job.enter(entry, "cpu")
    job.resume(None)
    assert job.enter(entry, "meta")[0] == ["checkpoint", "meta", "cpu", "cpu"]


def test_own_values_from_a_checkpoint_are_put_beside_those_of_another_rank(job: Job) -> None:
    """As a rank has them that is stopped between two restore() of a start from a checkpoint."""
    job.resume(None)

    def entry() -> str:
        state = TrainState(model=nn.Linear(1, 1), loss=torch.zeros(1, device="meta"))
        state.restore()
        held = state._holding
        part = encode_part({"loss": torch.ones(1)}, {}, {})
        logbook_of(job.life).write_committed(3, {held.name: part})
        _load_part(job.life, held, Named(held.roles), 3, SimpleNamespace())  # type: ignore[arg-type]
        return state.loss.device.type

    assert job.enter(entry)[0] == "meta"
