"""What one TrainState holds in this process.

Its objects, its step count, and the hooks that follow a training step.

Owns the hooks on optimizers and modules, the capture of the per-rank part, and the rolling back at
parking. Knows neither plan nor collectives. `TrainState` is the user's face of it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from taskd.native.black_box import Phase
from taskd.worker import life as life_module
from taskd.worker.objects import shards
from taskd.worker.objects.positions import Positions
from taskd.worker.objects.rollback import Rollback
from taskd.worker.state import closures
from taskd.worker.state.extras import Part, encode_part
from taskd.worker.state.logbook import Logbook, logbook_of, parts_of
from taskd.worker.state.vote import vote

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from taskd.worker.life import Life
    from taskd.worker.objects.roles import Roles

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


class Holding:
    """Objects of one TrainState in one entry of the recoverable function."""

    def __init__(self, name: str, roles: Roles, shard_id: str | int | None = None) -> None:
        self.name = name
        self.roles = roles
        self.checkpoint_dir: str | os.PathLike[str] | None = None
        given = shards.checked(shard_id)
        self.shard_id = shards.part_of(roles, given)  # of the plain tensors
        self.shard = shards.shard_of(roles, given)  # what part of the state this is; "": all of it
        self.peers = Peers()  # known once restore() is complete
        self.checkpoint_every, self.checkpoint_keep, self.snapshot_every = 0, 3, 0
        self.snapshot_buddy = False
        self.on_dump: list[Callable[[Path], object]] = []
        self.step = 0
        # the state changes, or may have: an optimizer stepped since the last commit
        self.began = False
        self.is_landed = False  # restore() is complete
        self.has_committed = False  # in this entry
        self.part = b""  # the per-rank part as of the last commit, pickled
        self.parked_versions: dict[int, int] = {}  # id(parameter) -> its version counter at parking
        self.rollback = Rollback(roles)
        self.positions = Positions(roles.positions)
        self._removers: list[Any] = []
        self._is_large_reported = False

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
        ]  # type: ignore[attr-defined]

    # ------------------------------------------------------------ the per-rank part

    def encode(self, *, is_in_step: bool = True) -> bytes:
        """The per-rank part as it is now.

        `is_in_step` False: no step of this entry has begun, see `taskd.worker.objects.positions`.
        """
        roles = self.roles
        positions = self.positions.read(is_in_step=is_in_step)
        buffers = self._read_buffers() if self.rollback.has_moving else {}
        return (
            encode_part(roles.values, positions, buffers)
            if roles.values or positions or buffers
            else _BARE
        )

    def _read_buffers(self) -> dict[str, bytes]:
        """Running statistics, which differ between ranks (DDP spreads those of rank 0 in the next forward pass).

        Host memory only: asking a device would make every step wait for it.
        """
        read: dict[str, bytes] = {}
        total = 0
        for name, tensor in self.rollback.moving_buffers():
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                continue
            size = tensor.numel() * tensor.element_size()
            total += size
            if total > _MAX_BUFFER_BYTES:
                if not self._is_large_reported:
                    self._is_large_reported = True
                    log.warning(
                        "TrainState(%r): buffers that change in the forward pass take more "
                        "than %d bytes; a replaced rank gets %s and "
                        "those behind it from another "
                        "rank",
                        self.name,
                        _MAX_BUFFER_BYTES,
                        name,
                    )
                break
            read[name] = ctypes.string_at(tensor.data_ptr(), size)
        return read

    def load_part(self, part: Part, *, with_values: bool) -> None:
        """Put the per-rank part into the objects.

        `with_values` False: plain values are left as they are.
        """
        if with_values:
            self.roles.values.clear()
            self.roles.values.update(part.values)
        self.positions.write(part.positions)
        tensors = self.roles.named_tensors() if part.buffers else {}
        for name, data in part.buffers.items():
            if name not in tensors:
                continue
            tensor = shards.local(tensors[name])
            if tensor.numel() * tensor.element_size() == len(data):
                with torch.no_grad():
                    tensor.copy_(
                        torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
                    )

    # ------------------------------------------------------------ following the step

    def attach(self) -> None:
        """Hook the objects: a forward pass ends, an optimizer begins."""
        for module in self.roles.modules.values():
            self._removers.append(module.register_forward_pre_hook(_ForwardBegin(self)).remove)
            self._removers.append(module.register_forward_hook(_ForwardEnd(self)).remove)
        for optimizer in self.roles.optimizers.values():
            self._removers.append(optimizer.register_step_pre_hook(self._begin_step).remove)
        for stepper in self.roles.steppers.values():
            self._removers.append(_wrap_step(stepper, self.begin_update))

    def detach(self) -> None:
        """Take the hooks off again: objects built outside the function live on."""
        while self._removers:
            self._removers.pop()()

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer is called.

        With a closure it writes behind that, and this copy is whole until then.
        """
        life, closure = life_module.current(), closures.find(args, kwargs)
        is_known = closure is not None and closures.is_known(optimizer)
        # Where the state is sharded all ranks vote at the same place: there it is not tried out
        # when an optimizer writes.
        if (
            closure is None
            or life is None
            or life.held
            or life.is_half_way
            or (self.shard and not is_known)
        ):
            self.begin_update()
            return None
        if is_known:
            life.hold()
            self.began = True
        else:
            self.begin_update()
        return closures.replaced(
            args, kwargs, closures.Closure(closure, self, closures.Unwritten(optimizer))
        )

    def begin_update(self, *, is_ours: bool = False) -> None:
        """An optimizer begins to write: from here to commit() this copy is torn.

        `is_ours`: interrupts are held off by this step alone.
        """
        life = life_module.current()
        if life is None:
            return
        if life.snapshots is not None:
            life.snapshots.wait()
        if self.shard and (is_ours or not life.held) and life.world_size > 1:
            agreed = vote(
                life, self.name, agrees=life.snapshots is None or life.snapshots.may_replace()
            )
            if life.snapshots is not None:
                life.snapshots.is_allowed = agreed
        life.hold()
        self.capture_pending(life)
        self.began = True
        life.mark(Phase.OPTIMIZER)

    def capture_pending(self, life: Life) -> None:
        """Write what this rank's extras will be once the present step is committed."""
        parts = parts_of(life.states)
        parts[self.name] = self.encode()
        logbook_of(life).write_pending((life.version or 0) + 1, parts)

    def commit(self, life: Life, logbook: Logbook) -> None:
        """One version further. The caller holds interrupts off."""
        self.began = True  # whatever fails in here leaves a copy that is neither version
        life.mark(Phase.COMMIT)
        self.rollback.remember()
        self.step += 1
        self.part = self.encode()
        version = life.version = (life.version or 0) + 1
        logbook.write_committed(version, parts_of(life.states))
        if life.box is not None:
            life.box.mark_version(version)
            life.box.mark_step(is_first=not self.has_committed)
        profile = life.profile  # once: another thread takes it away
        if profile is not None:
            profile.step(version)
        life.mark(Phase.STEP)
        self.began, self.has_committed = False, True

    # ------------------------------------------------------------ parking

    def park(self) -> str:
        """Leave the entry: hooks off, gradients freed, mid-step changes rolled back.

        Returns why the copy is torn, or "".
        """
        self.detach()
        reason = (
            ("between optimizer.step() and commit()") if self.began else self.rollback.roll_back()
        )
        self.drop_gradients()
        self.parked_versions = {
            id(tensor): tensor._version
            for tensor in self.roles.named_tensors().values()
            if isinstance(tensor, torch.nn.Parameter)
        }
        return reason

    def drop_gradients(self) -> None:
        """Gradients of an interrupted step are no state."""
        for module in self.roles.modules.values():
            shards.drop_whole_gradients(module)
        for tensor in self.roles.named_tensors().values():
            if tensor.grad is not None:
                tensor.grad = None


class _Hook:
    """Hook of a registered module.

    A class of its own so that a copied or pickled model does not drag the TrainState along.
    """

    def __init__(self, holding: Holding | None = None) -> None:
        self._holding = holding

    def _life(self) -> Life | None:
        return (
            None
            if self._holding is None or torch.compiler.is_compiling()
            else life_module.current()
        )

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _ForwardBegin(_Hook):
    """Forward pass, or evaluation."""

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        life = self._life()
        if life is not None and not life.held:  # a closure of the optimizer may run the model again
            life.mark(Phase.FORWARD if _trains(module) else Phase.EVALUATION)


class _ForwardEnd(_Hook):
    """What comes next is the loss, and the backward pass."""

    def __call__(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        life = self._life()
        if life is None or self._holding is None or not _trains(module):
            return
        self._holding.capture_pending(life)
        if not life.held:
            life.mark(Phase.BACKWARD)


def _trains(module: torch.nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _wrap_step(stepper: Any, before: Any) -> Any:
    """Call `before` at each `stepper.step()`. Returns what undoes it."""
    had_own = "step" in vars(stepper)
    original = stepper.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    stepper.step = step

    def undo() -> None:
        if had_own:
            stepper.step = original
        else:
            del stepper.step

    return undo
