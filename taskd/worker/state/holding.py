"""What one TrainState holds in this process: its objects, its step count, its per-rank part.

Owns the capture of the per-rank part, and the rolling back at parking. Knows neither plan nor
collectives, and nothing of the process. `TrainState` is the user's face of it; what happens in a
step is `taskd.worker.state.step`.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from taskd.worker.objects import devices, memory, shards
from taskd.worker.objects.identity import identity_of
from taskd.worker.objects.named import Named
from taskd.worker.objects.positions import Positions
from taskd.worker.objects.rollback import Rollback
from taskd.worker.state.extras import Part, decode_part, encode_part

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from taskd.worker.objects.roles import Roles
    from taskd.worker.state.carrier import Carrier
    from taskd.worker.state.comparison import Comparison

log = logging.getLogger(__name__)

# Running statistics above this are not written to the black box at every commit (copying 4 MiB
# takes about 1 ms).
_MAX_BUFFER_BYTES = 4 * 1024 * 1024
_BARE = encode_part({}, {}, {})


@dataclass(frozen=True)
class Peers:
    """The shard_id and the shard of each rank, by rank.

    Empty: not asked for, as plain tensors are the same on all ranks.
    """

    ids: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()


@dataclass
class Settings:
    """What the user asked for, see `TrainState`."""

    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 0
    checkpoint_keep: int = 3
    snapshot_every: int = 0
    snapshot_buddy: bool = False


class Holding:
    """Objects of one TrainState in one entry of the recoverable function."""

    def __init__(
        self,
        name: str,
        roles: Roles,
        shard_id: str | int | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.name = name
        self.roles = roles
        self.settings = settings or Settings()
        # of the plain tensors; what part of the state this is, "": all of it
        self.shard_id, self.shard = identity_of(roles, shard_id)
        self.peers = Peers()  # known once restore() has begun
        self.comparison: Comparison | None = None  # from restore() on
        self.world: tuple[int, ...] = ()  # as `Life.active`, from restore() on
        self.on_dump: list[Callable[[Path], object]] = []
        self.carrier: Carrier | None = None  # who has the content, if it is not in `roles`
        self.problem = ""  # why this copy is none, whatever its steps say
        self.step = 0
        # between an optimizer's step and the commit: the state changes, or may have
        self.is_half_way = False
        self.is_ahead = False  # a forward pass of its next step has ended
        self.is_restored = False  # restore() is complete
        self.has_committed = False  # in this entry
        self.part = b""  # the per-rank part as of the last commit, pickled
        self.parked_versions: dict[int, int] = {}  # id(parameter) -> its version counter at parking
        self.rollback = Rollback(roles)
        self.positions = Positions(roles.positions)
        self.removers: list[Callable[[], None]] = []  # of the hooks on the objects
        self._is_large_reported = self._is_follower_reported = False

    @property
    def has_parts(self) -> bool:
        """Whether plain tensors differ between ranks.

        Under a shard_id, in FSDP1, or in the memory of a ZeroRedundancyOptimizer.
        """
        return bool(self.shard_id or self.zeros())

    def zeros(self) -> list[str]:
        """The roles of the optimizers that have their memory divided among ranks."""
        return [
            role
            for role, optimizer in self.roles.optimizers.items()
            if shards.is_zero(optimizer) and optimizer.world_size > 1
        ]

    # ------------------------------------------------------------ the per-rank part

    def encode(self, *, is_in_step: bool = True) -> bytes:
        """The per-rank part as it is now.

        `is_in_step` False: no step of this entry has begun, see `taskd.worker.objects.positions`.
        """
        roles = self.roles
        positions = self.positions.read(is_in_step=is_in_step)
        buffers = self._read_buffers() if self.rollback.has_moving else {}
        return (
            encode_part(roles.values, positions, buffers, self.world)
            if roles.values or positions or buffers or self.world
            else _BARE
        )

    def remember_also(self) -> None:
        """Another TrainState commits: its step may have changed buffers of this one."""
        self.rollback.remember_also()
        if self.rollback.has_moving:
            part = decode_part(self.part)
            self.part = encode_part(part.values, part.positions, self._read_buffers(), part.world)

    def _read_buffers(self) -> dict[str, bytes]:
        """Running statistics, which differ between ranks.

        DDP spreads those of rank 0 in the next forward pass. Host memory only: asking a device
        would make every step wait for it.
        """
        read: dict[str, bytes] = {}
        total = 0
        for name, tensor in self.rollback.moving_buffers():
            is_flat = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            if tensor.device.type != "cpu" or not is_flat:
                continue
            size = tensor.numel() * tensor.element_size()
            total += size
            if total > _MAX_BUFFER_BYTES:
                if not self._is_large_reported:
                    self._is_large_reported = True
                    log.warning(
                        "TrainState(%r): buffers that change in the forward pass take more than "
                        "%d bytes; a replaced rank gets %s and those behind it from another rank",
                        self.name,
                        _MAX_BUFFER_BYTES,
                        name,
                    )
                break
            read[name] = ctypes.string_at(tensor.data_ptr(), size)
        return read

    def load_part(self, part: Part, named: Named) -> None:
        """Put the per-rank part into the objects."""
        near = named.tensors.values()
        values = devices.to_own_device(part.values, self.roles.values, near)
        self.roles.values.clear()
        self.roles.values.update(values)
        positions = part.positions
        if part.world != self.world:
            positions = self.positions.of_any_world(positions)
            for role in sorted(part.positions.keys() - positions.keys()):
                log.warning(
                    "TrainState(%r): where %s was in the data is not put back: it is of a world of "
                    "another number of ranks. It begins where the script sets it: take "
                    "taskd.ElasticSampler, which needs no position",
                    self.name,
                    role,
                )
        self.positions.write(devices.to_own_device(positions, None, near))
        for name, data in part.buffers.items():
            if name not in named.tensors:
                continue
            tensor = shards.local(named.tensors[name])
            if data and tensor.numel() * tensor.element_size() == len(data):
                content = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
                memory.overwrite(tensor, content.view(tensor.shape))

    def check_followers(self) -> None:
        """Warn, once, of what was changed between a commit and the step that begins now."""
        if self._is_follower_reported:
            return
        touched = self.rollback.touched_followers(is_seldom=True)
        if touched:
            self._is_follower_reported = True
            log.warning(
                "TrainState(%r): %s was changed after commit() and before the next step: a fault "
                "in between may do that twice, or leave it out. Change it before commit()",
                self.name,
                ", ".join(touched),
            )

    # ------------------------------------------------------------ parking

    def park(self) -> str:
        """Leave the entry: hooks off, gradients freed, mid-step changes rolled back.

        Returns why the copy is inconsistent, or "": that is `problem` from now on.
        """
        self.detach()
        reason = self.problem or (
            "between optimizer.step() and commit()" if self.is_half_way else self._roll_back()
        )
        touched = [] if self.is_half_way or reason else self.rollback.touched_followers()
        if touched:
            log.warning(
                "TrainState(%r): %s was changed since the last commit() and stays so: if the "
                "script does that again, the run differs from one without the fault. Change it "
                "before commit()",
                self.name,
                ", ".join(touched),
            )
        for module in self.roles.modules.values():
            reason = reason or shards.problem_of(module)
        self.parked_versions = {
            id(tensor): memory.version_of(tensor)
            for tensor in self.drop_gradients().tensors.values()
            if isinstance(tensor, torch.nn.Parameter)
        }
        self.problem = reason
        return reason

    def _roll_back(self) -> str:
        try:
            return self.rollback.roll_back()
        except Exception as error:
            log.debug("TrainState(%r) cannot be rolled back", self.name, exc_info=True)
            return (
                "what the interrupted step has changed could not be set back "
                f"({type(error).__name__}: {error})"
            )

    def detach(self) -> None:
        """Take the hooks off again: objects built outside the function live on."""
        while self.removers:
            self.removers.pop()()

    def drop_gradients(self, named: Named | None = None) -> Named:
        """Free the gradients of an interrupted step, which are no state. Returns the tensors."""
        for module in self.roles.modules.values():
            shards.drop_whole_gradients(module)
        named = named or Named(self.roles)
        for tensor in named.tensors.values():
            if tensor.grad is not None:
                tensor.grad = None
        return named
