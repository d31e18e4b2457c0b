"""What the ranks of a `World` do.

Train a small model that is sharded in one of many ways, stop, go on in a new group.
"""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from job import Average, Job, Stop
from sharded_models import Block, Counting, build, shard_blocks, shard_id_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Partial, Shard

from taskd.core.commands import Move
from taskd.errors import StateError
from taskd.worker.life import Life
from taskd.worker.objects import shards
from taskd.worker.objects.identity import identity_of
from taskd.worker.objects.roles import Roles
from taskd.worker.restore.parking import park_all
from taskd.worker.state import buckets
from taskd.worker.train_state import TrainState

STEPS = 6


def step(model, optimizer, data, number, stop=""):
    """One training step; `stop` names the place in it at which Stop is raised."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * number + data))
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    # after the first block or before it: the other one is whole then
    blocks[stop != "backward"].stop = stop
    optimizer.zero_grad()
    with _stop_within_unshard() if stop == "unshard" else nullcontext():
        model(x).square().mean().backward()
    if stop:
        raise Stop
    optimizer.step()


@contextmanager
def _stop_within_unshard():
    """An interrupt comes anywhere.

    Here when FSDP2 has put the first two whole parameters of a group in place, and has not noted it
    yet.
    """
    original, calls = FSDPParam.to_unsharded, []

    def to_unsharded(self):
        if len(calls) == 2:
            raise Stop
        calls.append(self)
        original(self)

    FSDPParam.to_unsharded = to_unsharded
    try:
        yield
    finally:
        FSDPParam.to_unsharded = original


def run(member, kind, stops=(), victims=(), torn=(), steps=STEPS):
    """Train.

    At each (version, place) in `stops` all ranks stop, and the `victims` among them lose everything
    but their black box.
    """
    rig = Rig(member, kind, dict(stops), steps)
    rig.job.resume(None)
    buckets.install()
    try:
        while True:
            result, report = rig.job.enter(rig.entry)
            if result is not None:
                return result
            rig.recover(report, victims, torn)
    finally:
        buckets.uninstall()
        rig.job.close()


class Rig:
    """One rank's training: entered, stopped, entered again."""

    def __init__(self, member, kind, stops, steps):
        self.member, self.kind, self.stops, self.steps = member, kind, stops, steps
        self.job = Job(member.rank, member.size)
        self.restored, self.dead_meshes, self.stopped = [], [], []

    def entry(self):
        model, optimizer, data = build(self.kind)
        average = Average(model) if self.kind == "hsdp" else None
        if self.kind == "warm":
            # leaves whole parameters in the root, with the values that they had before the restore
            model(torch.ones(1, 8))
        state = TrainState(
            model=model,
            optimizer=optimizer,
            shard_id=shard_id_of(self.kind),
            **({} if average is None else {"average": average}),
        )
        self.holding = state._holding
        self.restored.append(str(state.restore()))
        self.check_meshes()
        while state.step < self.steps:
            stop = self.stops.pop(state.step, "")
            self.stopped += [stop] if stop else []
            step(model, optimizer, data, state.step, stop)
            if average is not None:
                average.update(model)
            state.commit()
        roles = self.holding.roles
        return {
            "bytes": contents(roles),
            "restored": self.restored,
            "stopped": self.stopped,
            "shard": self.holding.shard,
            "random": torch.rand(1).item(),
        }

    def check_meshes(self):
        """No DTensor of the new objects lies on a mesh of an earlier generation."""
        for tensor in tensors_of(self.holding.roles):
            if isinstance(tensor, DTensor):
                assert not any(tensor.device_mesh is mesh for mesh in self.dead_meshes)

    def recover(self, report, victims, torn):
        assert report.clean, report
        rank = self.member.rank
        self.dead_meshes += [
            tensor.device_mesh
            for tensor in tensors_of(self.holding.roles)
            if isinstance(tensor, DTensor)
        ]
        mine = (None if rank in {*victims, *torn} else self.holding.shard, self.holding.shard)
        if rank in torn:
            with torch.no_grad():
                for tensor in tensors_of(self.holding.roles):
                    shards.local(tensor).fill_(9)
        self.holding = None
        if rank in victims:
            self.job.replace()
        self.member.connect()
        held = [None] * self.member.size
        dist.all_gather_object(held, mine)
        sources = [
            None if has is not None else [other for other, _ in held].index(shard)
            for has, shard in held
        ]
        self.job.resume(
            report.version, {number: Move(number, source) for number, source in enumerate(sources)}
        )


def tensors_of(roles):
    """Parameters, buffers and optimizer memory of this rank."""
    memory = [
        entries
        for optimizer in roles.optimizers.values()
        for entries in shards.memory_of(optimizer).values()
    ]
    averages = [
        tensor for average in roles.replicas.values() for tensor in average.tensors.values()
    ]
    return [
        *roles.named_tensors().values(),
        *(entry for entries in memory for entry in entries.values()),
        *averages,
    ]


def contents(roles):
    """The same, as bytes."""
    return b"".join(
        shards.local(tensor).detach().contiguous().numpy().tobytes() for tensor in tensors_of(roles)
    )


# ---------------------------------------------------------------- identity


def identify(_member, kind, shard_id="", mesh_name="dp"):
    """The identity before and after the optimizer's first step, and what the rank holds then."""
    model, optimizer, data = build(kind, mesh_name)
    roles = Roles.sort("train", {"model": model, "optimizer": optimizer})
    before = identity_of(roles, shard_id).shard
    step(model, optimizer, data, 0)
    model(torch.ones(1, 8))  # leaves whole parameters in the root of FSDP2
    return before, identity_of(roles, shard_id).shard, contents(roles)


def locate(_member, kind):
    """`spans` of each parameter, and whether the elements there are those of the local tensor."""
    model, _, _ = build(kind)
    found = {}
    for name, tensor in model.named_parameters():
        shape, offsets = shards.spans(tensor)
        own = shards.local(tensor)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        part = whole[
            tuple(
                slice(start, start + size) for start, size in zip(offsets, own.shape, strict=True)
            )
        ]
        found[name] = (tuple(shape), tuple(own.shape), offsets, torch.equal(part, own))
    return found


# ---------------------------------------------------------------- mistakes


def say(function, *args):
    """The text of the StateError that `function` raises, or ""."""
    try:
        function(*args)
    except StateError as error:
        return str(error)
    return ""


def refuse_units(_member, mistake):
    """What is said to FSDP1 around a part of the model."""
    options = {
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
        "backward": {"use_orig_params": True},
        "buffers": {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)},
    }.get(mistake, {})
    part = Counting(2, 2)
    if mistake == "backward":
        _apply_optimizer_in_backward(torch.optim.SGD, part.parameters(), {"lr": 0.1})
    unit = FullyShardedDataParallel(part, device_id=torch.device("cpu"), **options)
    objects = {"model": nn.Sequential(nn.Linear(2, 2), unit)}
    if mistake == "within":
        objects = {"model": unit.module}
    elif mistake == "alone":
        objects = {"optimizer": torch.optim.SGD(unit.parameters(), lr=0.1)}
    elif mistake == "tensors":
        objects["other"] = fully_shard(
            nn.Linear(2, 2), mesh=init_device_mesh("cpu", (dist.get_world_size(),))
        )
    return say(lambda: Roles.sort("train", objects))


def refuse_optimizer(_member):
    optimizer = ZeroRedundancyOptimizer(
        nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    return say(lambda: Roles.sort("train", {"optimizer": optimizer}))


def refuse_partial(_member):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(2, 2)
    model.register_buffer("sum", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    texts = [
        say(lambda: Roles.sort("train", {"model": model})),
        say(identity_of, Roles(modules={"model": model})),
    ]
    total = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return [*texts, say(lambda: Roles.sort("train", {"total": total}))]


def misfit(member, change):
    """The text of the error when another model is built in the second entry than was kept."""
    return _enter_twice(
        member, build("fsdp")[:2], lambda: build_other(change), lambda job: job.resume(0)
    )


def misfit_of_ranks(member, kind):
    """The same when rank 1 lost its part and is sent that of rank 0."""

    def resume(job):
        if member.rank:
            job.replace()
        job.resume(0, {0: Move(0), 1: Move(1, 0)})

    return _enter_twice(member, build(kind)[:2], lambda: build(kind)[:2], resume)


def keep_outside(member, kind):
    """The same when the objects were built outside the function.

    Their process groups are those of before.
    """
    objects = build(kind)[:2]
    return _enter_twice(member, objects, lambda: objects, lambda job: job.resume(0))


def _enter_twice(member, objects, build_again, resume):
    job = Job(member.rank, member.size)
    job.resume(None)
    job.enter(_land, *objects)
    member.connect()
    resume(job)
    try:
        return say(lambda: job.enter(_land, *build_again()))
    finally:
        job.close()


def _land(model, optimizer, **more):
    TrainState(model=model, optimizer=optimizer, **more).restore()


def build_other(change):
    if change == "plain":
        return build("ddp")[:2]
    if change == "flat":
        return build("flat")[:2]
    if change == "mesh":
        return build("hsdp")[:2]
    if change == "shape":
        model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 5))
        shard_blocks(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.Adam(model.parameters())
    raise AssertionError(change)


# ---------------------------------------------------------------- memory


def interrupt(member, place, *, changes_outside=False):
    """Stop one step after the first at `place`.

    What parking leaves behind, and where the memory is after the move.
    """
    job = Job(member.rank, member.size)
    job.resume(None)
    parked = {}

    def entry(stop):
        model, optimizer, data = build("kept")
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        if stop is None:
            return _facts(model, optimizer)
        step(model, optimizer, data, 0)
        state.commit()
        parked.update(_facts(model, optimizer), model=model)
        if changes_outside:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)
        return step(model, optimizer, data, 1, stop)

    try:
        _, report = job.enter(entry, place)
        model = parked.pop("model")
        groups = [
            group
            for part in model.modules()
            if isinstance(part, FSDPModule)
            for group in part._get_fsdp_state()._fsdp_param_groups
        ]
        whole = [parameter for group in groups for parameter in group.fsdp_params]
        left = {
            "bytes": sum(
                tensor.untyped_storage().nbytes()
                for parameter in whole
                for tensor in parameter.all_gather_outputs
            ),
            "gradients": sum(parameter._unsharded_param.grad is not None for parameter in whole),
            "shards": sum(parameter.grad is not None for parameter in model.parameters()),
            "registered": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
            "count": len(whole),
        }
        if not report.clean:
            return report, left
        member.connect()
        job.resume(report.version)
        moved, _ = job.enter(entry, None)
        return report, left, parked, moved
    finally:
        job.close()


def _facts(model, optimizer):
    """Addresses of optimizer memory.

    Whether FSDP2 reads its shards from the memory of the parameters.
    """
    groups = [
        group
        for part in model.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    return {
        "moments": [
            shards.local(entries["exp_avg"]).data_ptr() for entries in optimizer.state.values()
        ],
        "bytes": [
            shards.local(parameter).numpy(force=True).tobytes() for parameter in model.parameters()
        ],
        "one memory": all(
            parameter._sharded_param_data.untyped_storage().data_ptr()
            == shards.local(parameter.sharded_param).untyped_storage().data_ptr()
            for group in groups
            for parameter in group.fsdp_params
        ),
    }


def compute_twice(member):
    """A DTensor operation in two generations, on meshes that compare equal.

    On which mesh does each result lie?
    """
    found = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (member.size,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        found.append((tensor + 1).device_mesh is mesh)
        member.connect()
        park_all(Life(member.rank, member.size, 0))
    return found
