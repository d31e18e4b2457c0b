"""What the ranks of a `World` do with checkpoints of the sharded training in `sharded`.

Write them, die, read them in another world.
"""

import os

import torch
import torch.distributed as dist
from job import Average, Job
from sharded import build, contents, say, shard_id_of, step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from taskd.core import commands
from taskd.core.commands import Move
from taskd.errors import CheckpointError, StateError
from taskd.native.arenas import Arenas
from taskd.worker.objects.named import Named
from taskd.worker.restore.parking import park_all
from taskd.worker.saving.contents import shared
from taskd.worker.saving.dumping import Dumping
from taskd.worker.state import buckets, flat
from taskd.worker.train_state import TrainState


def train_and_save(member, kind, folder, every=2, steps=4):
    """Train with periodic checkpoints.

    The state at the end, and the part of it that this rank has by name in the checkpoint of that
    version.
    """
    return _in_job(member, _train, kind, folder, steps, every)


def resume(member, kind, folder, steps=4):
    """Begin with the newest checkpoint, and train up to `steps`.

    As `train_and_save`, and what restore() said.
    """
    return _in_job(member, _train, kind, folder, steps, 0)


def dump_from_memory(member, kind, folder, orphaned, steps, replicated=()):
    """Train to `steps` and save version 2 as in an emergency checkpoint.

    The ranks of `orphaned` are dead: rank -> who sees to its part.

    `replicated`: dead ones whose part somebody else has.
    """

    def dump(life):
        _train(life, kind, folder, steps, 0, snapshot_every=2)
        park_all(life)
        paths = [None] * member.size
        dist.all_gather_object(
            paths,
            [
                f"/proc/{os.getpid()}/fd/{owner.fd}"
                for owner in (life.saving.arenas.find(2), life.box)
            ],
        )
        writers = tuple(
            rank for rank in range(member.size) if rank not in orphaned and rank not in replicated
        )
        gone = replicated if member.rank == writers[0] else ()
        dumping, said = Dumping(life, "job"), []
        order = commands.Dump(
            "",
            1,
            2,
            writers,
            member.size,
            "a test",
            "attempt",
            orphaned=tuple(orphaned.items()),
            # As the agent puts them in.
            arenas=tuple(
                (rank, paths[rank][0])
                for rank in (*orphaned, *gone)
                if orphaned.get(rank, member.rank) == member.rank
            ),
            legacies=tuple((rank, paths[rank][1]) for rank in gone),
        )
        said.append(dumping.obey(order))
        dist.barrier()
        said.append(dumping.obey(commands.Publish("", 1, 0, writers[0], 0)))
        dist.barrier()  # the memory of the dead stays until it has been read
        return said

    return _in_job(member, dump)


def load_the_shards_of_others(member):
    """What restore() says of a snapshot when the mesh is another one than when it was made."""

    def train(ranks, steps):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        fully_shard(model, mesh=DeviceMesh("cpu", ranks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, snapshot_every=1)
        try:
            state.restore()
        except StateError as error:
            return str(error)
        while state.step < steps:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        return ""

    job = Job(member.rank, member.size)
    job.life.saving.arenas = Arenas.create()
    try:
        said = []
        for version, order in ((None, 1), (2, 1), (2, -1)):
            job.resume(version, {member.rank: Move(member.rank, snapshot=version)})
            said.append(job.enter(train, [*range(member.size)][::order], 2)[0])
        return said
    finally:
        job.life.saving.arenas.close()
        job.close()


def load_own(member, kind):
    """The bits after 4 steps: of a run without a stop, and from the snapshot of version 2."""

    def train(steps):
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer, snapshot_every=2)
        state.restore()
        while state.step < steps:
            step(model, optimizer, data, state.step)
            state.commit()
        return contents(state._holding.roles)

    job = Job(member.rank, member.size)
    job.life.saving.arenas = Arenas.create()
    try:
        found = []
        for version, steps in ((None, 4), (None, 2), (2, 4)):
            job.resume(version, {member.rank: Move(member.rank, snapshot=version)})
            found.append(job.enter(train, steps)[0])
        return found[0], found[2]
    finally:
        job.life.saving.arenas.close()
        job.close()


def _in_job(member, function, *args):
    job = Job(member.rank, member.size)
    job.life.saving.arenas = Arenas.create()
    job.life.job_id = "job"
    job.resume(None)
    buckets.install()
    try:
        result, _ = job.enter(function, job.life, *args)
        return result
    finally:
        buckets.uninstall()
        job.life.saving.arenas.close()
        job.close()


def _train(life, kind, folder, steps, every, snapshot_every=0):
    model, optimizer, data = build(kind)
    average = Average(model) if kind == "hsdp" else None
    state = TrainState(
        model=model,
        optimizer=optimizer,
        shard_id=shard_id_of(kind),
        checkpoint_dir=folder,
        checkpoint_every=every,
        seen=0,
        snapshot_every=snapshot_every,
        **({} if average is None else {"average": average}),
    )
    restored = str(state.restore())
    while state.step < steps:
        step(model, optimizer, data, state.step)
        if average is not None:
            average.update(model)
        state.seen += 1 + dist.get_rank()
        state.commit()
    if life.saving.periodic is not None:
        life.saving.periodic.wait()
    tensors, _ = flat.flatten(state._holding, Named(state._holding.roles))
    named = {
        name: tensor.full_tensor().numpy().tobytes()
        if isinstance(tensor, DTensor)
        else tensor.numpy().tobytes()
        for name, tensor in tensors.items()
    }
    return {
        "bytes": contents(state._holding.roles),
        "named": named,
        "seen": state.seen,
        "restored": restored,
        "random": torch.rand(1).item(),
    }


def save_without(member, kind, folder, writers):
    """The error of saving when only `writers` write, or ""."""

    def save(life):
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer, checkpoint_dir=folder)
        state.restore()
        step(model, optimizer, data, 0)
        state.commit()
        return say(lambda: shared(life, life.records.states, writers))

    return _in_job(member, save)


def save_hurt(member, victim, folder):
    """Two periodic checkpoints, of which `victim` cannot give its part of the first.

    The problem of each, and what is in the folder in the end.
    """

    def save(life):
        model, optimizer, data = build("ddp")
        average = Average(nn.Linear(100, 100))
        state = TrainState(
            model=model,
            optimizer=optimizer,
            average=average,
            checkpoint_dir=folder,
            checkpoint_every=2,
        )
        state.restore()
        problems = []
        for hurt in (True, False):
            if hurt and member.rank == victim:
                average.state_dict = lambda: _fail(f"not on rank {victim}")
            for _ in range(2):
                step(model, optimizer, data, state.step)
                state.commit()
            vars(average).pop("state_dict", None)
            life.saving.periodic.wait()
            problems.append(life.saving.periodic._saver.problem)
        dist.barrier()
        return problems, sorted(os.listdir(folder))

    return _in_job(member, save)


def save_at_once(member, victim, folder):
    """What save() says twice, the first time on a job in which `victim` cannot give its part."""

    def save(_life):
        model, optimizer, data = build("ddp")
        average = Average(nn.Linear(100, 100))
        state = TrainState(model=model, optimizer=optimizer, average=average, checkpoint_dir=folder)
        state.restore()
        step(model, optimizer, data, 0)
        state.commit()
        if member.rank == victim:
            average.state_dict = lambda: _fail(f"not on rank {victim}", StateError)
        said = []
        for _ in range(2):
            try:
                said.append(str(state.save()))
            except CheckpointError as error:
                said.append(str(error))
            vars(average).pop("state_dict", None)
        return said

    return _in_job(member, save)


def _fail(text, kind=ValueError):
    raise kind(text)


def resume_as(member, kind, shard_id, folder):
    """The error of restore() under another shard_id."""

    def restore(_life):
        model, optimizer, _ = build(kind)
        return say(
            TrainState(
                model=model, optimizer=optimizer, shard_id=shard_id, checkpoint_dir=folder, seen=0
            ).restore
        )

    return _in_job(member, restore)
