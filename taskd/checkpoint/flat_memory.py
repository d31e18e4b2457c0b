"""Flat states in node memory: what a snapshot says of itself, and how it becomes a checkpoint.

    rank 0: step 40, 41      the arenas of those ranks whose memory this process holds
    rank 1: step 40, 41      41 was being copied when rank 2 died, so 40 is
    rank 2: step 39, 40      the last step that all ranks have whole

Each rank keeps its newest two. A step needs all ranks, so they are never further apart than one,
and one step is common to all. Where several processes hold the ranks (several nodes, or workers
without an agent), nobody asks anybody: each writes what it has, the newest first, and the publisher
takes the newest that is complete. Needs neither torch nor the framework that has trained.
"""

from __future__ import annotations

import json
import logging
import select
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.checkpoint import flat, folder
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.flat import Flat, Layout
from taskd.checkpoint.names import Kind
from taskd.errors import ArenaError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.clock import Clock
    from taskd.native.arenas import Arenas

log = logging.getLogger(__name__)

STATE = "state"  # the one entry of a snapshot: all bytes
_LOOK_S = 0.05  # between two looks at which parts have come


@dataclass(frozen=True)
class Origin:
    """Of whom a snapshot is, and where it goes if the job has to end.

    `attempt`: the same on all ranks since they started, and never used before by this job. A
    snapshot from which a restarted group goes on keeps that under which it was made.
    """

    directory: str
    job: str
    attempt: str
    world_size: int
    generation: int
    framework: str


@dataclass(frozen=True)
class Saved:
    """What came of it. `path`: None where another process publishes."""

    step: int
    path: Path | None


def describe(origin: Origin, notes: Mapping[str, str], layout: bytes) -> bytes:
    """The rest of a snapshot. `layout`: as `encode_layout` made it, which is always the same."""
    return json.dumps([asdict(origin), dict(notes)]).encode() + b"\n" + layout


def encode_layout(layout: tuple[Layout, ...]) -> bytes:
    """What lies where."""
    return json.dumps(
        [[one.name, one.dtype, one.shape, one.start, one.end] for one in layout]
    ).encode()


def open_snapshot(arenas: Arenas, step: int) -> tuple[Origin, Flat]:
    """What a rank had after this step, verified. The bytes are those of the arena.

    Raises:
        ArenaError: there is none that is whole, or it is no flat state.
    """
    arena = arenas.find(step)
    if arena is None:
        raise ArenaError(f"there is no snapshot of step {step}")
    snapshot = arena.open(step)
    try:
        first, _, rest = snapshot.rest.partition(b"\n")
        said, notes = json.loads(first)
        origin = Origin(**{field.name: said[field.name] for field in fields(Origin)})
        layout = tuple(
            Layout(name, dtype, tuple(shape), start, end)
            for name, dtype, shape, start, end in json.loads(rest)
        )
        data = snapshot.view(STATE)
    except (ValueError, TypeError, LookupError) as error:
        raise ArenaError(
            f"the snapshot of step {step} is no state of this kind: {error!r}"
        ) from error
    return origin, Flat(layout, notes, data)


def common_steps(arenas: Mapping[int, Arenas]) -> list[int]:
    """Steps that all these ranks have, the newest first."""
    held = [set(one.versions()) for one in arenas.values()]
    return sorted(set.intersection(*held), reverse=True) if held else []


def save(arenas: Mapping[int, Arenas], fault: str, clock: Clock, wait_s: float) -> Saved | None:
    """Write the newest steps that these ranks have in common; the publisher publishes one of them.

    Args:
        arenas: by rank, of the ranks of this process or node.
        fault: why the job has to end.
        clock: measures `wait_s`.
        wait_s: how long the publisher waits for the parts of others, in seconds.

    Returns None: there is nothing to be saved. Raises nothing but ArenaError, CheckpointError.
    """
    steps = common_steps(arenas)
    if not steps:
        return None
    # A step of before a restart is of another attempt, by which others know it as well.
    origins = [open_snapshot(next(iter(arenas.values())), step)[0] for step in steps]
    origin = origins[0]
    writers = tuple(range(origin.world_size))
    is_alone = set(writers) <= set(arenas)
    # Others may have an older step alone, and then need this process's part of it.
    written = _written(origin, steps[0]) if is_alone else None
    if written is not None:
        return Saved(steps[0], written)
    drafts = [
        Draft(
            Path(own.directory), own.job, Kind.DUMP, step, f"{own.attempt}-end", writers,
            own.generation, own.world_size, fault=fault,
        )
        for step, own in [*zip(steps, origins, strict=True)][: 1 if is_alone else None]
    ]  # fmt: skip
    try:
        _write_parts(drafts, arenas)
    except (ArenaError, CheckpointError):
        for draft in drafts if drafts[0].publisher in arenas else []:
            draft.withdraw()
        raise
    if drafts[0].publisher not in arenas:
        return Saved(drafts[0].version, None)
    whole = _await_parts(drafts, clock, wait_s)
    return Saved(whole.version, flat.publish(whole, origin.framework))


def _written(origin: Origin, step: int) -> Path | None:
    """The checkpoint of this step, if these ranks have one that they could read."""
    for one in folder.scan(Path(origin.directory), origin.job, is_flat=True).valid:
        is_its = (one.manifest.version, one.manifest.world_size) == (step, origin.world_size)
        if is_its and not folder.problems(one.path, is_full=True):
            return one.path
    return None


def _write_parts(drafts: list[Draft], arenas: Mapping[int, Arenas]) -> None:
    """Those of these ranks, of the newest step first.

    Where another process publishes, it may find all parts of that step before this one has written
    the older one, which is removed then: nobody needs it any more.
    """
    newest = drafts[0]
    for draft in drafts:
        if draft is not newest and newest.is_gone():
            return
        try:
            for rank, held in sorted(arenas.items()):
                _, state = open_snapshot(held, draft.version)
                flat.write(draft, rank, _named(state, draft))
        except CheckpointError:
            if draft is newest or not (newest.is_gone() or draft.is_gone()):
                raise
        if draft is not newest and newest.is_gone():
            draft.withdraw()  # its folder may have been made again


def _named(state: Flat, draft: Draft) -> Flat:
    """With what whoever finds the file alone wants to know."""
    return replace(state, notes={**state.notes, "step": str(draft.version), "job": draft.job})


def _await_parts(drafts: list[Draft], clock: Clock, wait_s: float) -> Draft:
    """The newest to which all have given their part.

    Who has a step writes it before an older one: when an older one is complete, no newer one comes.
    """
    deadline = clock.now() + wait_s
    while True:
        whole = next((draft for draft in drafts if not draft.missing()), None)
        if whole is not None:
            return whole
        if clock.now() >= deadline:
            missing = {draft.version: draft.missing() for draft in drafts}
            for draft in drafts:
                draft.withdraw()
            raise CheckpointError(
                f"job {drafts[0].job}: after {wait_s:.0f} s no step is complete; parts of these "
                f"ranks are missing, by step: {missing}"
            )
        select.select([], [], [], _LOOK_S)
