"""Sending one TrainState to a rank that lost it, over the job's default process group.

Owns the protocol between the two ranks of a move; nobody else takes part:

    source                                   receiver
      | -- length, manifest (pickled) -->      |    shapes, dtypes, all that is not a tensor
      | <-- length, verdict (text, "" = fits)  |    both raise StateError if it does not fit
      | -- tensors, 32 MiB at a time -->       |    two in flight

Small tensors are packed together, large ones go from and to their own memory. Of a DTensor its
local tensor travels, to a rank with the same shard. Knows neither plan nor parking. Pickle stays
within the job's own process group, whose members run the same script.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.errors import StateError
from taskd.worker.objects import devices
from taskd.worker.restore.chunks import receive_bytes, receive_tensors, send_bytes, send_tensors
from taskd.worker.restore.manifest import Manifest, describe
from taskd.worker.restore.targets import Targets, misfit
from taskd.worker.state.own_extras import Told
from taskd.worker.state.vote import wire_device

if TYPE_CHECKING:
    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding


def send(
    holding: Holding,
    named: Named,
    receiver: int,
    version: int,
    told: Told | None = None,
    *,
    is_present: bool,
    held: tuple[str, ...] = (),
) -> None:
    """Send this rank's copy to `receiver`.

    `told`: of the extras that it goes with. `is_present` False: this rank has none either (the
    state is new). `held`: the names of all TrainStates that this rank has of `version`.

    Raises:
        StateError: it does not fit what the receiver built.
    """
    manifest = Manifest(version, is_present)
    tensors: list[torch.Tensor] = []
    if is_present:
        manifest, tensors = describe(holding, named, version, told or Told())
    if manifest.problem:
        problem = f"rank {dist.get_rank()} cannot send it: {manifest.problem}"
        manifest = Manifest(version, is_present, problem=problem)
    manifest.held = held
    try:
        data = devices.dumps(manifest, 5)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        manifest = Manifest(
            version,
            is_present,
            problem=f"rank {dist.get_rank()} cannot send it: {error}; give objects whose "
            "state_dict can be pickled",
        )
        data = pickle.dumps(manifest, 5)
    device = wire_device(holding.name)
    send_bytes(data, receiver, device)
    verdict = receive_bytes(receiver, device).decode()
    if verdict:
        raise StateError(verdict)
    send_tensors(tensors, receiver, device)


def receive(holding: Holding, named: Named, source: int) -> Manifest:
    """Receive the copy of rank `source` into the holding's objects.

    Returns what it is, or that the source has none either.

    Raises:
        StateError: it does not fit what this rank built.
    """
    device = wire_device(holding.name)
    manifest: Manifest = pickle.loads(receive_bytes(source, device))  # noqa: S301
    problem = manifest.problem or (
        _misfit(manifest, holding, named, source) if manifest.is_present else ""
    )
    verdict = problem and (
        f"TrainState({holding.name!r}) of rank {source} cannot be received by rank "
        f"{dist.get_rank()}: {problem}"
    )
    send_bytes(verdict.encode(), source, device)
    if verdict:
        raise StateError(verdict)
    if not manifest.is_present:
        return manifest
    named.unfold()
    targets = Targets(manifest, holding, named)
    receive_tensors(manifest.metas, targets.tensors, source, device)
    targets.finish()
    return manifest


def _misfit(manifest: Manifest, holding: Holding, named: Named, source: int) -> str:
    """Why it does not fit, or "": then buffers that are one tensor are the same as there."""
    problem = misfit(manifest, holding, named, source)
    if problem:
        return problem
    same = named.align({name: slot.index for name, slot in manifest.named.items()})
    return same and f"{same} on rank {dist.get_rank()}, and two on rank {source}"
