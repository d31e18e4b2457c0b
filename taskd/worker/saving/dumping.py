"""The emergency checkpoint (dump) as this rank carries it out.

Its part of the job's last checkpoint, from its memory or from that of its node.

What is in it is `taskd.worker.saving.contents`, files are `taskd.checkpoint`'s business, who writes
is the manager's.
"""

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Pieces
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.core import commands
from taskd.core.events import FAILED, PUBLISHED, WITHDRAWN, WRITTEN
from taskd.errors import ArenaError, NativeLibraryError, StateError, TaskdError
from taskd.native.arena import Arena
from taskd.native.black_box import BlackBox
from taskd.worker.life import Life
from taskd.worker.saving import contents
from taskd.worker.saving.grace import check_grace
from taskd.worker.saving.stored import StoredSnapshot
from taskd.worker.saving.stored import find as snapshot_of
from taskd.worker.state import extras, own_extras
from taskd.worker.state.extras import Extras, encode_part
from taskd.worker.state.holding import Holding
from taskd.worker.state.logbook import logbook_of

log = logging.getLogger(__name__)


def _left_by(
    life: Life, rank: int, box_path: str, arena_path: str | None, version: int
) -> dict[str, Any]:
    """What was a dead rank's alone. `life`: of the one that writes it.

    From its black box, as its replacement would find it, or, of an older version, with its
    snapshot.
    """
    problem = f"its black box holds nothing of version {version}, nor does the memory of its node"
    try:
        fd = os.open(box_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            box = BlackBox.attach(fd)
        except BaseException:
            os.close(fd)
            raise
        left = box.read_extras()
        box.close()
        if version in left:
            found = _completed(life, rank, version, left)
            return {contents.name_of_rank(rank): contents.readable(found)}
    except (OSError, NativeLibraryError) as error:
        problem = f"its black box cannot be read: {error}"
    if arena_path is not None:
        try:
            return _adopted(rank, arena_path, version).own(rank)
        except StateError as error:
            problem = str(error)
    log.warning(
        "generators and samplers of rank %d, which is dead, are not saved: %s", rank, problem
    )
    return {}


def _completed(life: Life, rank: int, version: int, left: Mapping[int, bytes]) -> Extras:
    """What it left at `version`, as it would be at a commit that it did not come to."""
    found, logbook = extras.decode(left[version]), logbook_of(life)
    before = extras.decode(left[version - 1]) if version - 1 in left else None
    parts, random = {}, found.random
    for state in sorted(found.pending):
        told, parked = logbook.tell(version, state), life.records.parked.get(state)
        if told.now is None or parked is None:
            continue
        part, random = own_extras.settle(
            f"rank {rank}", state, found, before, told, parked.positions.walkers
        )
        parts[state] = encode_part(part.values, part.positions, part.buffers, part.world)
    return Extras(random, {**found.parts, **parts}, found.pending - parts.keys())


def _call_all(functions: list[Callable[[Path], object]], folder: Path) -> None:
    for function in functions:
        function(folder)


def _adopted(rank: int, path: str | None, version: int) -> StoredSnapshot:
    """The snapshot of a dead rank, in the memory of this node.

    Its own, or the mirror of one of another node.
    """
    if path is None:
        message = f"the snapshot of rank {rank}, which is dead, is gone"
        raise StateError(message)
    try:
        arena = Arena.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return StoredSnapshot(arena, version, is_own=False)
    except (OSError, ArenaError, StateError) as error:
        message = f"the snapshot of rank {rank}, which is dead, cannot be read: {error}"
        raise StateError(message) from error


def _add_what_others_left(
    order: commands.Dump, life: Life, state: dict[str, Any], own: dict[str, Any]
) -> list[StoredSnapshot]:
    """Put what dead ranks have left, and this one writes for them, into `state` and `own`.

    Returns what owns the memory of it: to be kept until it is written.
    """
    paths, orphaned = dict(order.arenas), dict(order.orphaned)
    adopted = {
        other: _adopted(other, paths.get(other), order.version)
        for other, writer in order.orphaned
        if writer == life.world_rank
    }
    for other, path in order.legacies:
        own.update(_left_by(life, other, path, paths.get(other), order.version))
    for other, stored in adopted.items():
        for name, item in stored.orphans(order.writers, orphaned, other).items():
            before = state.get(name, Pieces())
            state[name] = Pieces((*(before if isinstance(before, Pieces) else (before,)), item))
        own.update(stored.own(other))
    return list(adopted.values())


class Dumping:
    """Carries out the manager's orders, in the main thread, at the gate."""

    def __init__(self, life: Life, job_id: str) -> None:
        self._life = life
        self._job_id = job_id
        self._draft: Draft | None = None
        self._begun: list[Draft] = []  # all into which this process has begun to write,
        self._attempt = ""  # those of other attempts are void
        self._carried: Holding | None = None  # whose carrier has written
        self._began = 0.0  # monotonic time at which this rank began to write
        self._answers: dict[object, tuple[str, str]] = {}  # to the orders of one dump, as obeyed

    def obey(self, order: commands.Dump | commands.Publish) -> tuple[str, str]:
        """What to tell the manager: a stage of `taskd.core.events` and its detail.

        ("", "") if this rank is not meant. The manager repeats an order to an agent that registers
        again: it is obeyed once, and answered each time.
        """
        key: object = order.attempt if isinstance(order, commands.Dump) else order.withdraw
        if key not in self._answers:
            if isinstance(order, commands.Dump):
                self._answers = {}
            self._answers[key] = self._obey(order)
        return self._answers[key]

    def _obey(self, order: commands.Dump | commands.Publish) -> tuple[str, str]:
        try:
            return (
                self._publish(order) if isinstance(order, commands.Publish) else self._write(order)
            )
        except (TaskdError, OSError) as error:
            return FAILED, str(error)
        # whatever a user's state_dict() raises: the manager waits for an answer
        except Exception as error:
            log.exception("rank %d: the state could not be saved", self._life.rank)
            return FAILED, f"{type(error).__name__}: {error}"

    def _write(self, order: commands.Dump) -> tuple[str, str]:
        life, saving = self._life, self._life.saving
        records = life.records
        self._draft, self._carried, self._began = None, None, time.monotonic()
        self._give_way(order)
        if life.world_rank not in order.writers:
            return "", ""
        is_live = (
            records.version == order.version
            and bool(records.parked)
            and not records.is_inconsistent
        )
        if not is_live and order.version not in saving.versions():
            return FAILED, (
                f"it holds version {records.version} and snapshots of "
                f"{list(saving.versions())}, not version {order.version}"
            )
        if is_live:
            for holding in records.parked.values():
                if holding.carrier is not None:
                    return self._write_carried(order, holding)
            directory, states, state, own = self._live(order)
        else:
            stored = snapshot_of(life, order.version)
            directory, states = stored.directory, stored.states
            state, own = stored.shared(), stored.own(life.world_rank)
        draft = Draft(
            directory,
            self._job_id,
            Kind.DUMP,
            order.version,
            order.attempt,
            order.writers,
            order.generation,
            order.world_size,
            order.reason,
            states,
        )
        owners = _add_what_others_left(order, life, state, own)
        self._draft = draft
        self._begun.append(draft)
        write(draft, life.world_rank, state, own, self._user_files(order.version, is_live=is_live))
        del owners
        return WRITTEN, ""

    def _give_way(self, order: commands.Dump) -> None:
        """What was written in vain must not take up the room: a writer has died since."""
        self._attempt = order.attempt
        for void in (draft for draft in self._begun if draft.attempt != order.attempt):
            successor = dataclasses.replace(
                void, version=order.version, attempt=order.attempt, writers=order.writers
            )
            void.give_way(self._life.world_rank, successor)

    def _write_carried(self, order: commands.Dump, holding: Holding) -> tuple[str, str]:
        """By who has the content: nothing of it is in files of ours."""
        assert holding.carrier is not None
        holding.carrier.write(holding.step, order.writers)
        self._carried = holding
        return WRITTEN, ""

    def _live(
        self, order: commands.Dump
    ) -> tuple[Path, tuple[str, ...], dict[str, Any], dict[str, Any]]:
        """From this process's memory: folder, TrainStates, what is shared, what is its own."""
        life, parked = self._life, self._life.records.parked
        return (
            contents.directory_of(life, parked),
            tuple(sorted(parked)),
            contents.shared(life, parked, (*order.writers, *dict(order.orphaned))),
            contents.own(life, order.version),
        )

    def _user_files(self, version: int, *, is_live: bool) -> Callable[[Path], None] | None:
        """What writes files in the user's own formats; None: nothing does."""
        records = self._life.records
        functions = [
            function for holding in records.parked.values() for function in holding.on_dump
        ]
        if functions and not is_live:
            log.warning(
                "rank %d: the functions given to on_dump() are not called: version %d is "
                "saved from node memory, the objects are at version %s",
                self._life.rank,
                version,
                records.version,
            )
        return functools.partial(_call_all, functions) if functions and is_live else None

    def _publish(self, order: commands.Publish) -> tuple[str, str]:
        draft, self._draft = self._draft, None
        carried, self._carried = self._carried, None
        for void in self._begun:
            if void.attempt != self._attempt:  # all have come to this one: nobody writes there
                void.withdraw()
        if order.rank != self._life.world_rank:
            return "", ""
        if order.withdraw:
            if draft is not None:  # else nothing came to be written here
                draft.withdraw()
            return WITHDRAWN, ""
        if carried is not None and carried.carrier is not None:
            where = carried.carrier.publish(carried.step)
            check_grace(self._life, time.monotonic() - self._began)
            return PUBLISHED, where
        if draft is None:
            return FAILED, "it has written nothing"
        path = publish(draft)
        check_grace(self._life, time.monotonic() - self._began)
        return PUBLISHED, str(path)
