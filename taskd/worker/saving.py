"""What a rank puts into a checkpoint, and the dying gasp as this rank carries it out.

Owns the names in a checkpoint: tensors as `taskd.worker.flat` calls them, one tree of plain values per TrainState, one per rank for what
differs from rank to rank. Files are `taskd.checkpoint`'s business, who writes is the manager's.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from taskd import config
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Held
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.checkpoint.values import pack
from taskd.core import commands
from taskd.core.dying import FAILED, PUBLISHED, WITHDRAWN, WRITTEN
from taskd.errors import CheckpointError, NativeLibraryError, StateError, TaskdError
from taskd.native.black_box import BlackBox
from taskd.worker import buckets, extras, flat
from taskd.worker.extras import decode_part
from taskd.worker.logbook import logbook_of
from taskd.worker.shards import is_distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from taskd.worker.extras import Extras
    from taskd.worker.holding import Holding
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

def directory_of(states: Mapping[str, Holding]) -> Path:
    """Where the checkpoints of a program with these TrainStates are."""
    given = next((holding.checkpoint_dir for holding in states.values() if holding.checkpoint_dir is not None), None)
    return config.checkpoint_directory(given)


def name_of_state(holding: Holding) -> str:
    """What the plain values of a TrainState are called in a checkpoint."""
    return f"taskd.state.{flat.label(holding)}"


def name_of_layouts(states: Iterable[Holding]) -> str:
    """What the layouts of DDP's buckets are called: other parts of the model may have others."""
    return "@".join(["taskd.layouts", *sorted(flat.label(holding) for holding in states if holding.shard_id)])


def name_of_rank(rank: int) -> str:
    """What a rank's own values are called in a checkpoint."""
    return f"taskd.rank.{rank}"


def contents(life: Life, states: Mapping[str, Holding], version: int, writers: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks have or some of them (`Held`), and what is this rank's alone. Tensors are not copied.

    Raises:
        StateError: an optimizer that cannot be taken apart, or a part of the state that none of `writers` has.
    """
    state: dict[str, Any] = {}
    whole = list(range(life.world_size))
    for holding in states.values():
        of_id, of_shard = _holders(life, holding, writers) if holding.has_parts else (whole, whole)
        tensors, plain = flat.flatten(holding)
        divided = tuple(f"{flat.label(holding)}.{role}.state." for role in holding.zeros())
        for name, tensor in tensors.items():
            state[name] = tensor if is_distributed(tensor) else Held(tensor, tuple(of_shard if name.startswith(divided) else of_id))
        state[name_of_state(holding)] = Held(plain, tuple(of_id))
        whole = [rank for rank in whole if rank in of_id]
    layouts = buckets.recorded(life)
    if layouts:
        state[name_of_layouts(states.values())] = Held(layouts, tuple(whole))
    found = logbook_of(life).find(version)
    return state, {} if found is None else {name_of_rank(life.rank): _own(found)}


def _holders(life: Life, holding: Holding, writers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ranks that have the same plain tensors as this one, and those that have the same optimizer memory as well."""
    ids, shards = holding.peers.ids, holding.peers.shards
    if not ids and life.world_size > 1:
        message = (f"TrainState({holding.name!r}) cannot be saved: nobody knows which rank has which part. Call init_process_group() before "
                   "restore()")
        raise StateError(message)
    for rank, shard in enumerate(shards):
        if not any(shards[writer] == shard for writer in writers):
            message = f"TrainState({holding.name!r}) cannot be saved: none of the ranks that write has the shard {shard!r} of rank {rank}"
            raise StateError(message)
    same_id = [rank for rank, other in enumerate(ids) if other == holding.shard_id] or [life.rank]
    return same_id, [rank for rank, other in enumerate(shards) if other == holding.shard] or [life.rank]


def _own(found: Extras) -> dict[str, Any]:
    parts = {name: decode_part(part) for name, part in found.parts.items()}
    positions = {name: _savable(name, part.positions) for name, part in parts.items()}
    values = {} if found.is_pending else {name: _savable(name, part.values) for name, part in parts.items()}    # else they may have changed since
    return {"random": found.random, "positions": positions, "values": values, "buffers": {name: part.buffers for name, part in parts.items()}}


def _savable(state: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _can_be_saved(f"{state}.{name}", value)}


def _can_be_saved(name: str, position: Any) -> bool:
    """What is one rank's alone must not cost the state of all."""
    try:
        pack(name, position)
    except CheckpointError as error:
        log.warning("not in the checkpoint: %s", error)
        return False
    return True


def _legacy(rank: int, path: str, version: int) -> dict[str, Any]:
    """What a dead rank of this node left in its black box, as its replacement would find it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            box = BlackBox.attach(fd)
        except BaseException:
            os.close(fd)
            raise
        data = box.read_extras().get(version)
        box.close()
    except (OSError, NativeLibraryError) as error:
        log.warning("the black box of rank %d cannot be read (%s): its generators and samplers are not saved", rank, error)
        return {}
    if data is None:
        log.warning("the black box of rank %d holds nothing of version %d: its generators and samplers are not saved", rank, version)
        return {}
    return {name_of_rank(rank): _own(extras.decode(data))}


class Dumping:
    """Carries out the manager's orders, in the main thread, at the gate."""

    def __init__(self, life: Life, job_id: str) -> None:
        self._life = life
        self._job_id = job_id
        self._draft: Draft | None = None

    def obey(self, order: commands.Dump | commands.Publish) -> tuple[str, str]:
        """What to tell the manager: a stage of `taskd.core.dying` and its detail; ("", "") if this rank is not meant."""
        try:
            return self._publish(order) if isinstance(order, commands.Publish) else self._write(order)
        except (TaskdError, OSError) as error:
            return FAILED, str(error)
        except Exception as error:  # whatever a user's state_dict() raises: the manager waits for an answer
            log.exception("rank %d: the state could not be saved", self._life.rank)
            return FAILED, f"{type(error).__name__}: {error}"

    def _write(self, order: commands.Dump) -> tuple[str, str]:
        life = self._life
        self._draft = None
        if life.rank not in order.writers:
            return "", ""
        if life.version != order.version or not life.parked:
            return FAILED, f"it holds version {life.version}, not {order.version}"
        draft = Draft(
            directory_of(life.parked).absolute(), self._job_id, Kind.DUMP, order.version, order.attempt, order.writers, order.generation,
            order.world_size, order.reason, tuple(sorted(life.parked)),
        )  # fmt: skip
        state, own = contents(life, life.parked, order.version, order.writers)
        for rank, path in order.legacies:
            own.update(_legacy(rank, path, order.version))
        write(draft, life.rank, state, own)
        self._draft = draft
        return WRITTEN, ""

    def _publish(self, order: commands.Publish) -> tuple[str, str]:
        draft, self._draft = self._draft, None
        if order.rank != self._life.rank or draft is None:
            return "", ""
        if order.withdraw:
            draft.withdraw()
            return WITHDRAWN, ""
        return PUBLISHED, str(publish(draft))
