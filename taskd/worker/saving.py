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
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.checkpoint.values import pack
from taskd.core import commands
from taskd.core.dying import FAILED, PUBLISHED, WITHDRAWN, WRITTEN
from taskd.errors import CheckpointError, NativeLibraryError, TaskdError
from taskd.native.black_box import BlackBox
from taskd.worker import buckets, extras, flat
from taskd.worker.extras import decode_part
from taskd.worker.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from taskd.worker.extras import Extras
    from taskd.worker.holding import Holding
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

NAME_OF_LAYOUTS = "taskd.layouts"      # of DDP's buckets


def directory_of(states: Mapping[str, Holding]) -> Path:
    """Where the checkpoints of a program with these TrainStates are."""
    given = next((holding.checkpoint_dir for holding in states.values() if holding.checkpoint_dir is not None), None)
    return config.checkpoint_directory(given)


def name_of_state(state: str) -> str:
    """What the plain values of a TrainState are called in a checkpoint."""
    return f"taskd.state.{state}"


def name_of_rank(rank: int) -> str:
    """What a rank's own values are called in a checkpoint."""
    return f"taskd.rank.{rank}"


def contents(life: Life, states: Mapping[str, Holding], version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks have, and what is this rank's alone. Tensors are not copied.

    Raises:
        StateError: an optimizer that cannot be taken apart.
    """
    state: dict[str, Any] = {}
    for name, holding in states.items():
        tensors, plain = flat.flatten(holding)
        state.update(tensors)
        state[name_of_state(name)] = plain
    layouts = buckets.recorded(life)
    if layouts:
        state[NAME_OF_LAYOUTS] = layouts
    found = logbook_of(life).find(version)
    return state, {} if found is None else {name_of_rank(life.rank): _own(found)}


def _own(found: Extras) -> dict[str, Any]:
    parts = {name: decode_part(part) for name, part in found.parts.items()}
    positions = {name: {role: position for role, position in part.positions.items() if _can_be_saved(f"{name}.{role}", position)}
                 for name, part in parts.items()}
    return {"random": found.random, "positions": positions, "buffers": {name: part.buffers for name, part in parts.items()}}


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
        state, own = contents(life, life.parked, order.version)
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
