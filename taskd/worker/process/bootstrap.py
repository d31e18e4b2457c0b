"""What the agent hands to the process that it starts (docs/protocol.md, "bootstrap")."""

import json
import logging
import os
import re
from dataclasses import dataclass, fields
from typing import Any

from taskd.errors import NativeLibraryError
from taskd.native.arenas import Arenas
from taskd.native.black_box import BlackBox
from taskd.native.box_payloads import TAKEN_OVER
from taskd.worker.life import Life, Plan, Records, Saving

log = logging.getLogger(__name__)

WORKER_ENV = "TASKD_WORKER"  # JSON of the bootstrap, for workers that were started by exec


@dataclass(frozen=True)
class Bootstrap:
    """The fields of the dict. Descriptors are numbers in this process."""

    job_id: str
    node_rank: int
    local_rank: int
    rank: int
    world_size: int
    incarnation: int
    generation: int
    plain: bool  # the agent goes on without a manager
    gated: bool  # a recovery is going on: it replaces another process
    store_generation: int  # of the start for which the store was opened
    box_fd: int
    life_fd: int
    # seconds from SIGTERM to the end, in which the job is saved; None: it is not
    grace_s: float | None = None
    channel_fd: int | None = None
    previous_fd: int | None = None  # the predecessor's black box
    arena_fds: tuple[int, ...] = ()
    # Its extras are also kept by the rank that is so many further, on another node; 0: by nobody.
    keeper_distance: int = 0
    takes_over: bool = False  # the arenas were left by an agent that was lost
    imports_fd: int | None = None  # where the forkserver waits for what it imports

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Bootstrap":
        """As the agent made it for this incarnation. What is not known here is left out."""
        known = {field.name for field in fields(cls)}
        arenas = [name for name in sorted(given) if re.fullmatch("arena.*_fd", name)]
        return cls(
            **{name: value for name, value in given.items() if name in known},
            arena_fds=tuple(given[name] for name in arenas),
        )

    def plain_life(self) -> Life:
        """Without any memory that outlives it."""
        return Life(
            self.rank,
            self.world_size,
            self.incarnation,
            job_id=self.job_id,
            plan=Plan(self.generation),
        )

    def life(self) -> Life:
        """With its black box, begun anew, and what the predecessor has left."""
        life = self.plain_life()
        life.keeper_distance, life.is_replacement = self.keeper_distance, self.gated
        box = life.box = BlackBox.attach(self.box_fd)
        arenas = Arenas(list(self.arena_fds))
        life.saving = Saving(arenas, is_unverified=self.takes_over, grace_s=self.grace_s)
        box.begin(os.getpid(), self.incarnation)
        box.mark_generation(self.generation)
        # else the whole group starts anew, from checkpoints
        if self.gated and self.previous_fd is not None:
            life.records = self._inherited(self.previous_fd, box)
        return life

    def _inherited(self, previous_fd: int, box: BlackBox) -> Records:
        """What the predecessor left: nothing, if its box is not known as one any more.

        Whatever wrote over it is as dead as its process; the others may hold the state.
        """
        try:
            previous = BlackBox.attach(previous_fd)
        except NativeLibraryError as error:
            os.close(previous_fd)
            log.warning(
                "rank %d: nothing is used of what its predecessor left in its black box, as RNG "
                "and sampler state: its beginning was overwritten, which a program that overwrites "
                "memory of others has likely done, in that worker (%s)",
                self.rank,
                error,
            )
            return Records()
        return _inherit(previous, box)


def _inherit(previous: BlackBox, own: BlackBox) -> Records:
    """What the predecessor left, which goes into our own box, too.

    Our successor may need it before we commit. What is pending stays so: if its step is done again,
    what we write of it then takes its place. Closes `previous`.
    """
    committed = previous.read_committed()
    extras, layout = previous.read_pending() | committed, previous.read_layout()
    previous.close()
    for version, payload in sorted(extras.items())[-TAKEN_OVER:]:
        own.write_extras(version, payload, pending=version not in committed)
    if layout is not None:
        own.write_layout(layout)
    return Records(inherited_extras=extras, inherited_layout=layout)


def from_environment() -> dict[str, Any] | None:
    """The bootstrap of a worker that was started by exec; None if there is none for this one."""
    text = os.environ.get(WORKER_ENV)
    if not text:
        return None
    bootstrap: dict[str, Any] = json.loads(text)
    # a child of the worker inherits its environment
    return bootstrap if bootstrap.get("pid") == os.getpid() else None
