"""What a commit remembers so that an interrupted step leaves no trace in a TrainState's objects.

Parameters and optimizer memory change only inside `optimizer.step()`, which is never interrupted
before `commit()`. Everything else that a step may touch earlier is small and remembered here:
hyperparameters of param groups, scheduler and scaler state, and the module buffers that change in
the forward pass (running statistics). Knows neither black box nor plan.
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import torch
from torch import nn

from taskd.worker import internals
from taskd.worker.objects import shards
from taskd.worker.objects.own_state import OwnState
from taskd.worker.objects.roles import Roles, tensors_in
from taskd.worker.objects.scalers import read_scaler, write_scaler

_LOOKED_AT = 32  # tensors of an average, at each commit


def _silent_kinds() -> tuple[type[nn.Module], ...]:
    """Batch norm writes its running statistics without raising their version counter.

    Until torch 2.15 at least: they are always copied.
    """
    if internals.has("the buffers of batch norm", (nn.modules.batchnorm, "_NormBase")):
        return (nn.modules.batchnorm._NormBase,)
    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class _Buffer:
    """One buffer.

    Where it hangs, what it was at the last commit, and a copy if it is known to change.
    """

    __slots__ = ("copy", "is_distributed", "key", "module", "name", "tensor", "version")

    def __init__(self, name: str, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
        self.name, self.module, self.key, self.tensor = name, module, key, tensor
        self.version = tensor._version
        # then copies are made of its local tensor
        self.is_distributed = shards.is_distributed(tensor)
        self.copy: torch.Tensor | None = None


class Rollback:
    """Remembers at each commit, rolls back when the state is parked."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._schedulers: dict[str, bytes] = {}
        self._scalers: dict[str, dict[str, Any]] = {}
        self._moving: list[_Buffer] = []  # change in the forward pass: copied at every commit
        self._still: list[_Buffer] = []  # have not changed so far: only their version is looked at
        # One parameter per optimizer: it tells an update by an optimizer that was not registered.
        self._probes: list[tuple[torch.Tensor, int]] = []
        # Average weights: parameters that no registered optimizer has, and objects that hold large
        # tensors. Whoever writes them does so by himself. The sum of their version counters.
        self._followers: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._followed: dict[str, int] = {}
        self._scheduler_items = list(roles.schedulers.items())
        self._optimizer_items = list(roles.optimizers.items())

    # ------------------------------------------------------------ remembering

    def begin(self) -> None:
        """At restore().

        Copy every buffer once, for it is not known yet which ones the forward pass changes.
        """
        self._moving, self._still, seen = [], [], set()
        for role, module in self._roles.modules.items():
            for path, part in module.named_modules():
                for key, tensor in part._buffers.items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    name = ".".join(word for word in (role, path, key) if word)
                    buffer = _Buffer(name, part, key, tensor)
                    buffer.copy = shards.local(tensor).detach().clone()
                    (self._moving if isinstance(part, _silent_kinds()) else self._still).append(
                        buffer
                    )
        self._followers = self._find_followers()
        self._remember_small()
        self._probes = []  # DDP may still broadcast its first weights into the parameters

    def _find_followers(self) -> dict[str, list[weakref.ref[torch.Tensor]]]:
        owned = {
            id(parameter)
            for optimizer in self._roles.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        tensors: dict[str, list[torch.Tensor]] = {}
        for role, module in self._roles.modules.items():
            parameters: list[torch.Tensor] = list(module.parameters())
            if not any(id(one) in owned for one in parameters):
                tensors[role] = parameters
        for role, replica in self._roles.replicas.items():
            if not isinstance(replica, OwnState):  # that changes with its optimizer
                tensors[role] = list(tensors_in(replica.state_dict()))
        return {
            role: [
                weakref.ref(one)
                for one in found[:: 1 + len(found) // _LOOKED_AT]
                if not one.is_inference()
            ]
            for role, found in tensors.items()
            if found
        }

    def _versions(self, role: str) -> int:
        """Grows with each write. Copies that a state_dict() made are gone, and do not count."""
        found = (one() for one in self._followers[role])
        return sum(tensor._version for tensor in found if tensor is not None)

    def touched_followers(self) -> list[str]:
        """The roles of averages that were written since the last commit.

        No copy of them is kept: each stays as it is, with all of its buffers.
        """
        return [role for role, before in self._followed.items() if self._versions(role) != before]

    def remember(self) -> None:
        """At commit(): a few microseconds without buffers that change."""
        if self._still:
            self._sort_buffers()
        if self._moving:
            self._copy_moving()
        self._remember_small()

    def _remember_small(self) -> None:
        self._probes = []
        for role, optimizer in self._optimizer_items:
            groups = self._groups[role] = [group.copy() for group in optimizer.param_groups]
            for group in groups:
                rate = group.get("lr")
                # capturable optimizers: the scheduler writes into it
                if type(rate) is not float and isinstance(rate, torch.Tensor):
                    group["lr"] = rate.clone()
            if groups and groups[0]["params"]:
                parameter = groups[0]["params"][0]
                self._probes.append((parameter, parameter._version))
        self._followed = {role: self._versions(role) for role in self._followers}
        for role, scheduler in self._scheduler_items:
            self._schedulers[role] = pickle.dumps(scheduler.state_dict(), 5)
        for role, scaler in self._roles.scalers.items():
            self._scalers[role] = read_scaler(scaler)

    def _sort_buffers(self) -> None:
        """Copy always what changed since the last commit, and the others of its modules."""
        changed: set[int] = set()
        for buffer in self._still:
            now = buffer.module._buffers.get(buffer.key)
            if now is not buffer.tensor or now._version != buffer.version:
                changed.add(id(buffer.module))
            elif buffer.copy is not None:
                buffer.copy = None  # it stood still for a step: its memory is given back
        if not changed:
            return
        self._moving += [buffer for buffer in self._still if id(buffer.module) in changed]
        self._still = [buffer for buffer in self._still if id(buffer.module) not in changed]

    def _copy_moving(self) -> None:
        copies, tensors = [], []
        for buffer in self._moving:
            now = buffer.module._buffers[buffer.key]
            if now is None:
                buffer.tensor = buffer.copy = None  # type: ignore[assignment]
                continue
            buffer.tensor, buffer.version = now, now._version
            own = shards.local(now) if buffer.is_distributed else now
            if (
                buffer.copy is None
                or buffer.copy.shape != own.shape
                or buffer.copy.dtype != own.dtype
            ):
                buffer.copy = torch.empty_like(own)
            copies.append(buffer.copy)
            tensors.append(own)
        if copies:
            with torch.no_grad():
                if internals.has(
                    "the copies of several tensors at once", (torch, "_foreach_copy_")
                ):
                    torch._foreach_copy_(copies, tensors)  # one call for all
                    return
                for copy, own in zip(copies, tensors, strict=True):
                    copy.copy_(own)

    @property
    def has_moving(self) -> bool:
        """Whether any buffer is known to change in the forward pass."""
        return bool(self._moving)

    def moving_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that change in the forward pass, live, by name.

        The local tensors of distributed ones.
        """
        found = []
        for buffer in self._moving:
            now = buffer.module._buffers.get(buffer.key)
            if now is not None:
                found.append((buffer.name, shards.local(now) if buffer.is_distributed else now))
        return found

    # ------------------------------------------------------------ rolling back

    def roll_back(self) -> str:
        """Make the objects what they were at the last commit.

        Returns "" or why that is not possible.
        """
        for parameter, version in self._probes:
            if parameter._version != version:
                return (
                    "parameters were changed since the last commit() by something that is not a "
                    "registered optimizer"
                )
        problem = self._roll_back_buffers()
        for role, optimizer in self._roles.optimizers.items():
            for group, remembered in zip(optimizer.param_groups, self._groups[role], strict=False):
                write_group(group, remembered)
        for role, scheduler in self._roles.schedulers.items():
            scheduler.load_state_dict(pickle.loads(self._schedulers[role]))  # noqa: S301
        for role, scaler in self._roles.scalers.items():
            write_scaler(scaler, self._scalers[role])
        return problem

    def _roll_back_buffers(self) -> str:
        problem, modules = "", self._roles.modules
        touched = self.touched_followers()
        kept = {id(part) for role in touched if role in modules for part in modules[role].modules()}
        for buffer in (*self._moving, *self._still):
            if id(buffer.module) in kept:
                continue
            now = buffer.module._buffers.get(buffer.key)
            is_touched = now is not buffer.tensor or (
                now is not None and now._version != buffer.version
            )
            if buffer.copy is not None and buffer.tensor is not None:
                with torch.no_grad():
                    shards.local(buffer.tensor).copy_(buffer.copy)
                buffer.module._buffers[buffer.key] = buffer.tensor
            elif is_touched:
                problem = problem or (
                    f"buffer {buffer.name} changed for the first time since the "
                    "last commit() and no copy of it was kept"
                )
        return problem


def write_group(group: dict[str, Any], remembered: dict[str, Any]) -> None:
    """Put hyperparameters into a param group.

    Tensors keep their identity (captured graphs look at them).
    """
    for key, value in remembered.items():
        if key == "params":
            continue
        now = group.get(key)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(now, torch.Tensor)
            and now.shape == value.shape
        ):
            with torch.no_grad():
                now.copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, torch.Tensor) else value
