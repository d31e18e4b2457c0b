"""What a checkpoint or a snapshot of this rank holds, by name.

Owns the names: tensors as `taskd.worker.state.flat` calls them, one tree of plain values per
TrainState, one per rank for what differs from rank to rank. Who writes what of it is
`taskd.checkpoint.pieces`.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskd.checkpoint.pieces import Held
from taskd.checkpoint.values import pack
from taskd.config import checkpoint_directory, working_directory
from taskd.errors import CheckpointError, StateError
from taskd.worker.objects.named import Named
from taskd.worker.objects.shards import is_distributed
from taskd.worker.state import buckets, flat
from taskd.worker.state.extras import decode_part, encode_part
from taskd.worker.state.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from taskd.worker.life import Life
    from taskd.worker.state.extras import Extras
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)


def begin_here(life: Life) -> None:
    """The first TrainState of this process: relative directories are those of its place, for good.

    The script may go to another one, and come back in the next entry, or not.
    """
    if not life.saving.base:  # empty if nothing tells it: a relative one is an error when needed
        life.saving.base = working_directory()


def directory_of(life: Life, states: Mapping[str, Holding]) -> Path:
    """Where the checkpoints of a program with these TrainStates are, as an absolute path."""
    given = next(
        (
            holding.settings.checkpoint_dir
            for holding in states.values()
            if holding.settings.checkpoint_dir is not None
        ),
        None,
    )
    return Path(life.saving.base, checkpoint_directory(given)).absolute()


def name_of_state(holding: Holding) -> str:
    """What the plain values of a TrainState are called in a checkpoint."""
    return f"taskd.state.{flat.label(holding)}"


def name_of_layouts(states: Iterable[Holding]) -> str:
    """What the layouts of DDP's buckets are called: other parts of the model may have others."""
    return "@".join(
        ["taskd.layouts", *sorted(flat.label(holding) for holding in states if holding.shard_id)]
    )


def name_of_rank(rank: int) -> str:
    """What a rank's own values are called in a checkpoint."""
    return f"taskd.rank.{rank}"


def shared(life: Life, states: Mapping[str, Holding], writers: Sequence[int]) -> dict[str, Any]:
    """What all ranks have, or some of them.

    Tensors (not copied) and plain values, as `Held` or as DTensors.

    Raises:
        StateError: an optimizer that cannot be taken apart, a part of the state that none of
            `writers` has, or parts without a `shard_id` that tells them apart.
    """
    for holding in states.values():
        _check_names(holding)
    flattened = {
        name: flat.flatten(holding, Named(holding.roles)) for name, holding in states.items()
    }
    found = {name: tensors_of for name, (tensors_of, _) in flattened.items()}
    plain = {name: plain_of for name, (_, plain_of) in flattened.items()}
    caches = {cache for plain_of in plain.values() for cache in plain_of["caches"]}
    return {
        **tensors(life, states, found, caches, writers),
        **values(life, states, plain, writers),
    }


def tensors(
    life: Life,
    states: Mapping[str, Holding],
    found: Mapping[str, Mapping[str, torch.Tensor]],
    caches: Collection[str],
    writers: Sequence[int],
) -> dict[str, Any]:
    """The tensors of `shared`.

    `found`: of each state, as `flat.flatten` gives them. `caches`: which of them, `flat.caches`.
    """
    named: dict[str, Any] = {}
    for state, holding in states.items():
        of_id, of_shard = map(tuple, _holders(life, holding, writers))
        divided = tuple(f"{flat.label(holding)}.{role}.state." for role in holding.zeros())
        for name, tensor in found[state].items():
            named[name] = (
                tensor
                if is_distributed(tensor)
                else Held(
                    tensor,
                    of_shard if name.startswith(divided) else of_id,
                    is_alike=name not in caches,
                )
            )
    return named


def values(
    life: Life,
    states: Mapping[str, Holding],
    plain: Mapping[str, dict[str, Any]],
    writers: Sequence[int],
) -> dict[str, Held]:
    """The plain values of `shared`. `plain`: of each state, as `flat.flatten` gives them."""
    named: dict[str, Held] = {}
    whole = list(range(life.world_size))
    for state, holding in states.items():
        of_id, _ = _holders(life, holding, writers)
        named[name_of_state(holding)] = Held(plain[state], tuple(of_id))
        whole = [rank for rank in whole if rank in of_id]
    layouts = buckets.recorded(life)
    if layouts:
        named[name_of_layouts(states.values())] = Held(layouts, tuple(whole))
    return named


def _check_names(holding: Holding) -> None:
    comparison = holding.comparison
    if comparison is not None and comparison.other_names is not None:
        first, second = comparison.other_names
        message = (
            f"TrainState({holding.name!r}) cannot be saved: rank {first} and rank {second} have "
            "tensors of other names than each other, so that no rank could read it again. Give "
            "the TrainState a shard_id that is the same on the ranks of one part alone, for "
            "example the number of the stage of a pipeline"
        )
        raise StateError(message)


def own(life: Life, version: int) -> dict[str, Any]:
    """What is this rank's alone: generators, positions, values, running statistics."""
    found = logbook_of(life).find(version)
    return {} if found is None else {name_of_rank(life.world_rank): readable(found)}


def _holders(life: Life, holding: Holding, writers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ranks with the same plain tensors, and those with the same optimizer memory as well."""
    if not holding.has_parts:
        return [*range(life.world_size)], [*range(life.world_size)]
    ids, shards = holding.peers.ids, holding.peers.shards
    if not ids and life.world_size > 1:
        message = (
            f"TrainState({holding.name!r}) cannot be saved: nobody knows which rank has which "
            "part. Call init_process_group() before restore()"
        )
        raise StateError(message)
    for rank, shard in enumerate(shards):
        if not any(shards[writer] == shard for writer in writers):
            message = (
                f"TrainState({holding.name!r}) cannot be saved: none of the ranks that write has "
                f"the shard {shard!r} of rank {rank}"
            )
            raise StateError(message)
    same_id = [rank for rank, other in enumerate(ids) if other == holding.shard_id] or [
        life.world_rank
    ]
    return same_id, [rank for rank, other in enumerate(shards) if other == holding.shard] or [
        life.world_rank
    ]


def readable(found: Extras, loads: Callable[[bytes], Any] = pickle.loads) -> dict[str, Any]:
    """The same as plain values, without what cannot be saved. `loads`: as `decode_part`."""
    parts = {name: decode_part(part, loads) for name, part in found.parts.items()}
    positions = {name: _savable(name, part.positions) for name, part in parts.items()}
    # else they may have changed since
    values = {
        name: _savable(name, part.values)
        for name, part in parts.items()
        if name not in found.pending
    }
    return {
        "random": found.random,
        "positions": positions,
        "values": values,
        "buffers": {name: part.buffers for name, part in parts.items()},
    }


def parts(own: Mapping[str, Any]) -> dict[str, bytes]:
    """Opposite of `readable`, without the generators: the per-rank parts, by TrainState."""
    return {
        name: encode_part(values, own["positions"].get(name, {}), own["buffers"].get(name, {}))
        for name, values in own["values"].items()
    }


def _savable(state: str, values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if _can_be_saved(f"{state}.{name}", value)
    }


def _can_be_saved(name: str, position: Any) -> bool:
    """What is one rank's alone must not cost the state of all."""
    try:
        pack(name, position)
    except CheckpointError as error:
        log.warning("not in the checkpoint: %s", error)
        return False
    return True
