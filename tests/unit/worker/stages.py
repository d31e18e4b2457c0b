"""What the ranks of a `World` do with the stages of a pipeline.

Each stage is sharded over the ranks of one row of a mesh; nobody says which stage it is.
"""

import logging
from collections import OrderedDict

import torch
import torch.distributed as dist
from job import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.errors import StateError, TaskdError
from taskd.worker.objects.named import Named
from taskd.worker.saving import contents
from taskd.worker.state import flat
from taskd.worker.train_state import TrainState


def build(kind):
    """A stage and its number.

    "stages": two of the same form. "seeded alike": equal until the first step. "names": with the
    number in their names. "replicas": a tensor-parallel model instead, twice.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    stage = 0 if kind == "replicas" else mesh.get_local_rank("outer")
    torch.manual_seed(0 if kind == "seeded alike" else stage)
    name = str(stage) if kind == "names" else "0"
    model = nn.Sequential(OrderedDict({name: nn.Linear(8, 8)}))
    if kind == "replicas":
        parallelize_module(model, mesh["inner"], {name: ColwiseParallel()})
    else:
        fully_shard(model, mesh=mesh["inner"])
    return model, stage


class Records(list):
    """The warnings of a logger."""

    def __enter__(self):
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.append(record.getMessage())
        logging.getLogger("taskd").addHandler(self.handler)
        return self

    def __exit__(self, *_):
        logging.getLogger("taskd").removeHandler(self.handler)


def train(member, kind, folder, *, has_id=False, steps=5, learning_rates=(0.1,)):
    """The step that was reached, what was said, and the error of save()."""
    job = Job(member.rank, member.size)
    job.life.job_id = "job"
    job.resume(None)
    try:
        with Records() as warnings:
            (reached, error, saved), _ = job.enter(
                _train, kind, folder, has_id, steps, learning_rates
            )
        return reached, error, saved, list(warnings)
    finally:
        job.close()


def _train(kind, folder, has_id, steps, learning_rates):
    model, stage = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(
        model=model, optimizer=optimizer, shard_id=stage if has_id else None, checkpoint_dir=folder
    )
    state.restore()
    try:
        while state.step < steps:
            optimizer.param_groups[0]["lr"] = learning_rates[
                min(state.step, len(learning_rates) - 1)
            ]
            optimizer.zero_grad()
            model(torch.full((4, 8), 1.0 + stage)).square().mean().backward()
            optimizer.step()
            state.commit()
    except StateError as error:
        return state.step, str(error), None
    try:
        saved = state.save().name
    except TaskdError as error:
        saved = str(error)
    return state.step, "", saved


def publish_undetected(member, kind, folder):
    """A checkpoint of stages that have made no step, so that nothing has compared them."""
    job = Job(member.rank, member.size)
    job.resume(None)

    def entry():
        model, _ = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        return _publish(job.life, state._holding, folder)

    try:
        return job.enter(entry)[0]
    finally:
        job.close()


def _publish(life, holding, folder):
    found, _ = flat.flatten(holding, Named(holding.roles))
    everybody = tuple(range(life.world_size))
    shared = contents.tensors(life, {"train": holding}, {"train": found}, set(), everybody)
    draft = Draft(folder, "job", Kind.SAVED, 1, "attempt", everybody, 1, life.world_size)
    write(draft, life.world_rank, shared)
    dist.barrier()
    if life.world_rank:
        return "", []
    with Records() as warnings:
        return publish(draft).name, list(warnings)
