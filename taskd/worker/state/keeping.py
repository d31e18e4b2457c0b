"""The extras of each rank are kept by a rank of another node, too: a node may be lost as a whole.

A replacement on the same node finds its predecessor's extras in the black box; on another node
there is none. So, where nodes may be replaced, each rank sends its extras to its keeper, the rank
of the same place on the next node, as it writes them to its black box: at the end of the forward
pass, before its gradients can reach anybody. Before an optimizer writes, each rank waits until it
has those of its ward: who has all gradients has also what was sent before them. After a recovery
the keeper hands them to the replacement, through the store of the default group.

None of this can fail a step: without its keeper a rank trains on, and says so once.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.config.launcher import master_address
from taskd.transport.peer_link import PeerLink

if TYPE_CHECKING:
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

_KEPT = 3  # versions: the last commit, the one before, and the step under way
_CONNECT_S = 10.0
_WAIT_S = 2.0  # for what must have been sent before the gradients
_LOOK_S = 0.005

_VERSION = struct.Struct("!Q")  # before the extras; alone: they are as in the frame before
_SIZE = struct.Struct("!Q")  # of the extras that are handed over, before them and those before


class Keeping:
    """One per process; connected anew in each generation."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._active = life.active  # ranks in here are those of this world
        self._link: PeerLink | None = None
        self._generation = -1  # for which it was connected, or that was tried
        self._sent, self._heard = b"", b""  # over this connection, last
        # Of the ward, by version; what was committed is put over what was pending.
        self._kept: dict[int, bytes] = {}

    @property
    def keeper(self) -> int:
        """Who keeps its extras."""
        return (self._life.world_rank + self._life.keeper_distance) % self._life.world_size

    @property
    def ward(self) -> int:
        """Whose it keeps."""
        return (self._life.world_rank - self._life.keeper_distance) % self._life.world_size

    # ------------------------------------------------------------------ within a step

    def send(self, version: int, generators: bytes, blob: bytes) -> None:
        """To the keeper: what belongs to `version`. Never waits."""
        if self._link is None:
            return
        extras = generators + blob
        try:
            self._link.send(_VERSION.pack(version) + (b"" if extras == self._sent else extras))
        except OSError as error:
            self._lose(error)
            return
        self._sent = extras

    def wait_for_ward(self, version: int) -> None:
        """Until what its ward will be at `version` is here. Interrupts may be raised meanwhile."""
        deadline = time.monotonic() + _WAIT_S
        while self._link is not None:
            try:
                self._link.flush()
                self._read(self._link)
                if version in self._kept:
                    return
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"nothing of version {version} came from rank {self.ward}")
                self._link.wait(min(_LOOK_S, left_s))
            except OSError as error:
                self._lose(error)

    def _read(self, link: PeerLink) -> None:
        """Take what has come. Raises OSError behind the last."""
        for frame in link.receive():
            (version,) = _VERSION.unpack_from(frame)
            self._heard = frame[_VERSION.size :] or self._heard
            self._kept[version] = self._heard
            while len(self._kept) > _KEPT:
                del self._kept[min(self._kept)]

    # ------------------------------------------------------------------ at the start of an entry

    def recover(self, version: int, *, has_own: bool) -> dict[int, bytes]:
        """Hand over what is kept here, and take back what is missing.

        By version: `version`, and the one before if it is known, too. `has_own`: this rank knows
        its extras of `version`.
        """
        if not dist.is_initialized():
            return {}
        if self._life.active != self._active:
            # what is kept is of ranks that have other numbers now
            self._close()
            self._active, self._kept = self._life.active, {}
        self._hand_over(version)
        receives = self._life.plan.receives(self._life.rank)
        return self._take_back(version) if receives and not has_own else {}

    def begin(self) -> None:
        """Connect, once in a generation. All ranks are at this place."""
        generation = self._life.plan.generation
        if generation == self._generation:
            return
        self._close()
        if self._life.world_size <= self._life.keeper_distance:
            self._generation = generation
            return  # there is no other node
        self._generation = generation
        try:
            self._link = PeerLink.connect(
                c10d._get_default_store(),
                f"taskd/extras/{generation}/at",
                rank=self._life.world_rank,
                target=self.keeper,
                towards=master_address() or "127.0.0.1",
                until=time.monotonic() + _CONNECT_S,
            )
        except (OSError, RuntimeError, ValueError) as error:
            log.warning(
                "rank %d: no other node keeps its RNG and sampler state: there is no connection to "
                "rank %d and from rank %d (%s). If its node is lost now, it goes on with those "
                "that the script sets",
                self._life.rank,
                self.keeper,
                self.ward,
                error,
            )

    def _hand_over(self, version: int) -> None:
        """To a ward that was replaced: what belongs to `version`, or that nothing is here."""
        self._close()  # what its ward sent last may not have been read yet
        kept = [self._kept.get(known, b"") for known in (version, version - 1)]
        # What is newer belongs to steps that are done again.
        self._kept = {known: extras for known, extras in self._kept.items() if known <= version}
        if self._life.plan.receives(self._life.rank_of(self.ward)):
            given = _SIZE.pack(len(kept[0])) + b"".join(kept)
            c10d._get_default_store().set(self._key(self.ward), given)

    def _take_back(self, version: int) -> dict[int, bytes]:
        """Of this rank, from its keeper; empty: it has nothing. Interrupts may be raised."""
        store, key = c10d._get_default_store(), self._key(self._life.world_rank)
        deadline = time.monotonic() + _CONNECT_S
        while not store.check([key]):
            if time.monotonic() >= deadline:
                return {}
            time.sleep(_LOOK_S)
        given = bytes(store.get(key))
        end = _SIZE.size + _SIZE.unpack_from(given)[0]
        kept = {version: given[_SIZE.size : end], version - 1: given[end:]}
        return {known: extras for known, extras in kept.items() if extras}

    def _key(self, rank: int) -> str:
        return f"taskd/extras/{self._life.plan.generation}/of/{rank}"

    # ------------------------------------------------------------------ the connection

    def _lose(self, error: OSError) -> None:
        """A peer is gone, or does not keep up: until the next recovery."""
        self._close()
        log.info("rank %d: its peers keep no extras from here on: %s", self._life.rank, error)

    def _close(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._read(self._link)
            self._link.close()
        self._link, self._sent, self._heard = None, b"", b""


def keeping_of(life: Life) -> Keeping | None:
    """That of this life, made when first asked for; None: nodes are not replaced in this job."""
    if not life.keeper_distance:
        return None
    keeping: Keeping | None = life.records.keeping
    if keeping is None:
        keeping = life.records.keeping = Keeping(life)
    return keeping
