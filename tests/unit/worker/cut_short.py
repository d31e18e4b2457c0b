"""What the ranks of a `World` do to FSDP1.

Stop its passes anywhere, look at what is left, and go on.
"""

import sys
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from job import Job, Stop
from sharded import build, contents, step
from torch.distributed.fsdp import FullyShardedDataParallel

from taskd.native.arenas import Arenas
from taskd.worker.objects import units
from taskd.worker.objects.roles import Roles
from taskd.worker.train_state import TrainState


@contextmanager
def calls(seen):
    """Has `seen(name)` called at each call of a function of FSDP1; it may raise."""

    def profile(frame, event, _):
        if event == "call" and "/distributed/fsdp/" in frame.f_code.co_filename:
            seen(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class StopAt:
    """Raises Stop at call `number` of the functions `names`. An interrupt comes anywhere."""

    def __init__(self, names, number):
        self.names, self.left = names, number

    def __call__(self, name):
        self.left -= name in self.names
        if self.left < 0:
            raise Stop


def cut_everywhere(member, kind, stride):
    """Two steps. The second is cut short at each `stride`-th call until it comes to its end.

    All ranks are stopped at the same place, for a group does not tell here that a rank is gone:
    counted are functions that all call as often. Returns the state in the end, the number of stops,
    and how often this rank had the state of version 1 in an entry.
    """
    job, kept, counts, cuts, same = Job(member.rank, member.size), [], [], 0, 0

    def entry(number):
        nonlocal cuts, same
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        if not state.step:
            names = []
            with calls(names.append):
                step(model, optimizer, data, 0)
            counts[:] = [None] * member.size
            dist.all_gather_object(counts, Counter(names))
            state.commit()
            kept.append(contents(state._holding.roles))
        same += contents(state._holding.roles) == kept[0]
        try:
            with calls(
                StopAt(
                    {
                        name
                        for name, count in counts[0].items()
                        if all(other[name] == count for other in counts)
                    },
                    number,
                )
            ):
                step(model, optimizer, data, 1)
        except Stop:
            cuts += 1
            raise
        state.commit()
        return contents(state._holding.roles)

    result, number = None, 0
    job.resume(None)
    try:
        while result is None:
            result, report = job.enter(entry, number)
            if result is None:
                assert (report.version, report.clean) == (1, True), report
                member.connect()
                job.resume(report.version)
                number += stride
        return result, cuts, same
    finally:
        job.close()


def two_steps(_member, kind):
    """The same without stops."""
    model, optimizer, data = build(kind)
    for number in range(2):
        step(model, optimizer, data, number)
    return contents(Roles.sort("train", {"model": model, "optimizer": optimizer}))


def interrupt(member, kind, place):
    """Stop a step after the first at `place`.

    What parking leaves behind, and where the memory is after the move.
    """
    job = Job(member.rank, member.size)
    job.resume(None)
    parked = {}

    def entry(place):
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        if place is None:
            return _facts(model, optimizer)
        step(model, optimizer, data, 0)
        state.commit()
        parked.update(
            _facts(model, optimizer),
            model=model,
            names=[name for name, _ in model.named_parameters()],
        )
        if place == "summoned":
            # the interrupt comes before it has put anything back
            parked["manager"] = FullyShardedDataParallel.summon_full_params(model)
            parked["manager"].__enter__()
            raise Stop
        return step(model, optimizer, data, 1, place)

    try:
        _, report = job.enter(entry, place)
        model = parked.pop("model")
        flat = [unit._handle.flat_param for unit in units._units_of(model)]
        whole = [
            getattr(parameter, name).untyped_storage().nbytes()
            for parameter in flat
            for name in units._WHOLE
            if hasattr(parameter, name)
        ]
        left = {
            "bytes": sum(whole),
            "memories": len(whole),
            "gradients": sum(p.grad is not None for p in (*flat, *model.parameters())),
            "names": [name for name, _ in model.named_parameters()] == parked.pop("names"),
            "hooks": sum(
                name.startswith("_post_backward_hook")
                for parameter in flat
                for name in vars(parameter)
            ),
            "graphs": sum(
                getattr(tensor, "grad_fn", None) is not None
                for part in model.modules()
                for tensor in vars(part).values()
            )
            + sum(tensor is not None for parameter in flat for tensor in parameter._tensors or ()),
        }
        member.connect()
        job.resume(report.version)
        moved, _ = job.enter(entry, None)
        return report, left, {key: parked[key] for key in moved}, moved
    finally:
        job.close()


def _facts(model, optimizer):
    return {
        "moments": [entries["exp_avg"].data_ptr() for entries in optimizer.state.values()],
        "bytes": [parameter.numpy(force=True).tobytes() for parameter in model.parameters()],
    }


def leave_a_gather(member, kind):
    """A rank is called out when it has begun an all-gather and does not wait for it yet.

    The other one takes part when it has parked its state.

    Returns what parking said, and whether the gathered memory has what it should.
    """
    job, original, store, begun = (
        Job(member.rank, member.size),
        dist.all_gather,
        dist.distributed_c10d._get_default_store(),
        [],
    )
    job.resume(None)

    def begin(tensors, tensor, group=None):
        if member.rank == 1:
            store.wait(["parked"])
        begun.append(
            (original(tensors, tensor, group=group, async_op=True), tensors, tensor.clone())
        )
        raise Stop

    def entry():
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        step(model, optimizer, data, 0)
        state.commit()
        dist.all_gather = begin
        step(model, optimizer, data, 1)

    try:
        _, report = job.enter(entry)
        store.set("parked", "")
        ((work, gathered, own),) = begun
        work.wait()
        return report, torch.equal(gathered[member.rank], own)
    finally:
        dist.all_gather = original
        job.close()


def write_outside(member, kind):
    """Why the state is inconsistent if something but the optimizer writes to a parameter."""
    job = Job(member.rank, member.size)
    job.resume(None)

    def entry():
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        step(model, optimizer, data, 0)
        state.commit()
        with torch.no_grad():
            next(iter(model.parameters())).add_(1)
        raise Stop

    try:
        return job.enter(entry)[1]
    finally:
        job.close()


def evaluate_between(member, kind):
    """Train with snapshots, and return the versions kept, and the state.

    Before each commit there is a pass of evaluation, and a look at the whole parameters.
    """
    job = Job(member.rank, member.size)
    job.life.saving.arenas = Arenas.create()
    job.resume(None)

    def entry():
        model, optimizer, data = build(kind)
        state = TrainState(model=model, optimizer=optimizer, snapshot_every=1)
        state.restore()
        for number in range(4):
            step(model, optimizer, data, number)
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 8))  # leaves whole parameters in the root
            with FullyShardedDataParallel.summon_full_params(model):
                pass
            model.train()
            state.commit()
        return contents(state._holding.roles)

    try:
        result, _ = job.enter(entry)
        return list(job.life.saving.arenas.versions()), result
    finally:
        job.life.saving.arenas.close()
        job.close()


def train(_member, kind):
    """The same without all that."""
    model, optimizer, data = build(kind)
    for number in range(4):
        step(model, optimizer, data, number)
        with torch.no_grad():
            model(torch.ones(1, 8))  # it counts its passes
    return contents(Roles.sort("train", {"model": model, "optimizer": optimizer}))
