"""Copies of the training state into node memory, beside the training.

Owns the thread that copies and the arena that it copies into:

    training thread                            copying thread
      | commit(): takes references -- queue -->  |   tensors into the arena's older buffer
      | forward, backward                        |
      | optimizer hook: wait() <--- done ------  |   published when the last byte is there

A step changes the tensors in place, but not before its optimizer begins: until then the copy may
run, then it is waited for. What changes earlier (running statistics in the forward pass) is small
and is copied inside commit(). Knows neither TrainState nor agent: whoever makes the arenas hands
their descriptors on.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from taskd.errors import ArenaError, StateError
from taskd.native.arena import PIECE_BYTES, Arena, Held, Snapshot, Writer
from taskd.native.arena_index import room_for, room_for_rest
from taskd.threads import start_thread
from taskd.worker.objects.memory import overwrite
from taskd.worker.saving.staging import Staging, mark

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # a wait for the copy looks so often whether somebody is still copying


@dataclass(frozen=True)
class Job:
    """One snapshot to be made. `events`: per device what its copies have to wait for."""

    version: int
    generation: int
    tensors: dict[str, torch.Tensor]
    rest: bytes
    events: dict[torch.device, Any]
    counters: list[int]  # of changes in place, of each tensor, when it began


class Snapshotter:
    """Makes a snapshot at every `every`-th version. One training thread calls it.

    `make_arena(shard_bytes)` makes an arena and lets the agent know of it; it is called by
    `prepare`, and in the copying thread when the state has outgrown the arena. The old one stays
    until the new one holds two snapshots: others may have only what the old one has.
    """

    def __init__(
        self,
        make_arena: Callable[[int], Arena],
        every: int,
        rank: int = 0,
        drop_arena: Callable[[Arena], None] = Arena.close,
    ) -> None:
        """`drop_arena` is called with one that is not needed any more.

        Raises StateError: `every` is no number of steps.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            message = (
                f"snapshot_every={every!r}: give a number of steps, 1 or more; leave it out "
                "for no snapshots"
            )
            raise StateError(message)
        self.arena: Arena | None = None  # that with the newest complete snapshot
        self.newest: Held | None = None  # the last one that was completed by this process
        self.problem = ""  # why the last one was not; "" if it was
        self.copy_s = self.waited_s = 0.0  # time of the last copy, and of all waits together
        self._make_arena, self._every, self._rank, self._drop_arena = (
            make_arena,
            every,
            rank,
            drop_arena,
        )
        self._grown: Arena | None = None  # a larger one without a complete snapshot
        self._old: Arena | None = None  # a smaller one, until the larger one holds two
        self._stagings: dict[torch.device, Staging] = {}
        # those of the last snapshot, and where they are
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def adopt(self, arenas: Sequence[Arena]) -> None:
        """Go on with those of an earlier life of this rank, the newest last.

        The last one that holds a snapshot, and one behind it.
        """
        full = [number for number, arena in enumerate(arenas) if arena.versions()]
        at = full[-1] if full else len(arenas) - 1
        if at >= 0:
            self.arena, self._grown = arenas[at], arenas[at + 1] if at + 1 < len(arenas) else None
        before = list(arenas[: max(at, 0)])
        if before and len(arenas[at].versions()) == 1:
            self._old = before.pop()
        for arena in before:
            self._drop_arena(arena)

    def prepare(self, shard_bytes: int) -> None:
        """Make the arena before training begins: a node without enough memory says so at the start.

        Nothing is done if there is one of an earlier life of this rank.

        Raises:
            ArenaError: there is not enough.
        """
        if self.arena is None:
            self.arena = self._make_arena(shard_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether no copy is running."""
        return self._idle.is_set()

    def is_due(self, version: int) -> bool:
        """Whether `commit` would begin a copy.

        The version is one of those, and the copy before it is done.
        """
        return version % self._every == 0 and self._idle.is_set() and not self._is_closing

    def commit(
        self,
        version: int,
        generation: int,
        tensors: Mapping[str, torch.Tensor],
        rest: bytes = b"",
        changing: Collection[str] = (),
    ) -> bool:
        """Begin a snapshot of `version`, whether it is one of those or not.

        Returns False if the copy before it is not done.

        `tensors` are plain ones (the local part of a sharded tensor), detached; they may differ
        from those of the last snapshot in every respect, but then they come in another mapping.
        `changing` names those which may change before the next call of `wait`: they are copied
        here. `rest` is stored as it is.
        """
        if not self._idle.is_set() or self._is_closing:
            return False
        taken = dict(tensors)
        for name in changing:
            taken[name] = taken[name].clone()
        if tensors is not self._tensors:
            self._tensors = tensors
            self._devices = {tensor.device for tensor in taken.values()}
        events = {
            device: mark(device) for device in self._devices if device.type not in {"cpu", "meta"}
        }
        self._idle.clear()
        if self._thread is None:
            self._thread = start_thread("taskd-snapshot", self._run, stop=self._begin_to_close)
        counters = _counters(taken)
        self._jobs.put(Job(version, generation, taken, rest, events, counters))
        return True

    def wait(self) -> None:
        """Return when no copy is running.

        Before anything changes the tensors that were given to `commit`.
        """
        if self._idle.is_set() or self._thread is None:
            return
        start = time.perf_counter()
        # a forked child has no such thread, and nothing to wait for
        while self._thread.is_alive() and not self._idle.wait(_LOOK_S):
            pass
        self.waited_s += time.perf_counter() - start

    def close(self) -> None:
        """End the thread; a copy that is running is given up at its next piece.

        The arena stays open: it belongs to whoever made it.
        """
        self._begin_to_close()
        if self._thread is not None:
            self._thread.join()

    def _begin_to_close(self) -> None:
        self._is_closing = True
        self._jobs.put(None)

    # ------------------------------------------------------------ the copying thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
            # Whatever a tensor or the device raises: training goes on, with the snapshot before
            # this one.
            except Exception as error:  # noqa: BLE001
                self._report(job.version, error)
            # holds the tensors: a parameter that was replaced need not live until the next snapshot
            del job
            self._idle.set()

    def _report(self, version: int, error: Exception) -> None:
        problem = (
            str(error) if isinstance(error, ArenaError) else (f"{type(error).__name__}: {error}")
        )
        if problem != self.problem and not self._is_closing:
            kept = f"that of version {self.newest.version}" if self.newest else "none"
            log.warning(
                "rank %d: no snapshot of version %d could be made: %s. The newest snapshot "
                "is %s; training goes on",
                self._rank,
                version,
                problem,
                kept,
                exc_info=None if isinstance(error, ArenaError) else error,
            )
        self.problem = problem

    def _copy(self, job: Job) -> None:
        start = time.perf_counter()
        needed = room_for_rest(job.rest)
        for name, tensor in job.tensors.items():
            needed += room_for(name, tensor.shape, _bytes_of(name, tensor))
        arena = self._fitting(needed)
        for device, event in job.events.items():
            if device not in self._stagings:
                self._stagings[device] = Staging(device, PIECE_BYTES)
            self._stagings[device].follow(event)
        writer = arena.begin(job.version, job.generation)
        for name, tensor in job.tensors.items():
            self._put(writer, name, tensor)
        for name, now, before in zip(
            job.tensors, _counters(job.tensors), job.counters, strict=True
        ):
            if now != before:
                raise ArenaError(
                    f"{name} was changed while it was copied: between commit() and "
                    "the next optimizer step the state must stay as it is"
                )
        self.newest = writer.complete(job.rest)
        # the second one in a larger arena: now that holds what others may need
        if self._old is not None and arena is self.arena:
            old, self._old = self._old, None
            self._drop_arena(old)
        if arena is self._grown:
            self._old, self.arena, self._grown = self.arena, arena, None
        self.copy_s = time.perf_counter() - start
        self.problem = ""

    def _fitting(self, needed: int) -> Arena:
        if self.arena is not None and needed <= self.arena.capacity:
            return self.arena
        if self._grown is None or needed > self._grown.capacity:
            if self._grown is not None:
                self._drop_arena(self._grown)
                self._grown = None
            self._grown = self._make_arena(needed)
        return self._grown

    def _put(self, writer: Writer, name: str, tensor: torch.Tensor) -> None:
        count = tensor.nbytes
        writer.add(name, dtype_name(tensor.dtype), tuple(tensor.shape), count)
        staging = self._stagings.get(tensor.device)
        if staging is not None:
            for address, piece in staging.pieces(tensor):
                self._give_up_if_closing()
                writer.put(address, piece)
            return
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        address = flat.data_ptr()
        for at in range(0, count, PIECE_BYTES):
            self._give_up_if_closing()
            writer.put(address + at, min(PIECE_BYTES, count - at))

    def _give_up_if_closing(self) -> None:
        if self._is_closing:
            message = "the process ends"
            raise ArenaError(message)


def load(arena: Arena, version: int, targets: Mapping[str, torch.Tensor]) -> bytes:
    """Copy the snapshot of `version` into `targets`, in place, and return what was given as `rest`.

    Nothing is changed if it does not fit.

    Raises:
        StateError: a target is not in the snapshot, or of another dtype or shape, or the snapshot
            has a tensor more. The text names it.
        ArenaError: there is no such snapshot, or it is damaged. If its writer, still alive,
            overwrote it meanwhile, so the text says and targets are a mixture: load another one.
    """
    snapshot = arena.open(version)
    if further := sorted(snapshot.entries.keys() - targets.keys()):
        raise StateError(
            f"the snapshot of version {version} does not fit: it has {further[0]!r}, "
            "which is not among the targets"
        )
    fill(snapshot, targets)
    return snapshot.rest


def fill(snapshot: Snapshot, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy some of a snapshot's tensors into `targets`, in place. Raises as `load`."""
    version = snapshot.held.version
    for name, target in targets.items():
        entry = snapshot.entries.get(name)
        if entry is None:
            raise StateError(f"the snapshot of version {version} has no tensor {name!r}")
        have = f"{dtype_name(target.dtype)} {list(target.shape)}"
        found = f"{entry.dtype} {list(entry.shape)}"
        if have != found:
            raise StateError(
                f"the snapshot of version {version} does not fit: {name!r} is {found} "
                f"there and {have} here"
            )
        _bytes_of(name, target)
    with torch.no_grad():
        for name, target in targets.items():
            place = target.detach()
            if (
                place.device.type == "cpu"
                and place.is_contiguous()
                and not (place.is_conj() or place.is_neg())
            ):
                snapshot.copy_out(name, place.data_ptr())
            else:
                host = torch.empty(place.shape, dtype=place.dtype, device="cpu")
                snapshot.copy_out(name, host.data_ptr())
                overwrite(place, host)


def dtype_name(dtype: torch.dtype) -> str:
    """As an index has it: "float32"."""
    return str(dtype).removeprefix("torch.")


def _counters(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """How often each was changed in place.

    Writes through `.data` are not counted, nor any of an inference tensor.
    """
    try:
        return [tensor._version for tensor in tensors.values()]
    except RuntimeError:  # there is an inference tensor
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _bytes_of(name: str, tensor: torch.Tensor) -> int:
    """Size of a tensor that has bytes of its own.

    Raises ArenaError for one that has not (sharded, sparse, on no device).
    """
    count = tensor.nbytes if tensor.layout is torch.strided else -1
    # a wrapper (DTensor) has no address
    if count < 0 or tensor.device.type == "meta" or (count and tensor.data_ptr() == 0):
        message = (
            f"tensor {name!r} ({type(tensor).__name__}, {tensor.layout}, {tensor.device}) "
            "has no memory of its own: give its local, dense part"
        )
        raise ArenaError(message)
    return int(count)
