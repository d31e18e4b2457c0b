"""What a commit remembers so that an interrupted step leaves no trace in a TrainState's objects.

Parameters and optimizer memory change only inside `optimizer.step()`, which is never interrupted
before `commit()`. Everything else that a step may touch earlier is small and remembered here:
hyperparameters of param groups, scheduler and scaler state, and the module buffers that change in
the forward pass (running statistics), as well as parameters that something else than an optimizer
writes (`taskd.worker.objects.untrained`). Knows neither black box nor plan.
"""

from __future__ import annotations

import pickle
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from taskd.worker import internals
from taskd.worker.objects import memory, shards
from taskd.worker.objects.memory import Kept
from taskd.worker.objects.own_state import OwnState
from taskd.worker.objects.roles import Roles, tensors_in
from taskd.worker.objects.scalers import read_scaler, write_scaler
from taskd.worker.objects.still import Still
from taskd.worker.objects.untrained import Untrained

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_LOOKED_AT = 32  # tensors of an average, at each commit
# Contents that no version counter tells of are compared at commits 1, 2, 4, ... of an entry, and
# then at each that is a multiple of this: what it costs a device is spread over so many steps.
_COMPARED_EVERY = 128


def _silent_kinds() -> tuple[type[nn.Module], ...]:
    """Batch norm writes its running statistics without raising their version counter.

    Until torch 2.15 at least: they are always copied. Others that do so are found by their content.
    """
    if internals.has("the buffers of batch norm", (nn.modules.batchnorm, "_NormBase")):
        return (nn.modules.batchnorm._NormBase,)
    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Rollback:
    """Remembers at each commit, rolls back when the state is parked."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._schedulers: dict[str, bytes] = {}
        self._scalers: dict[str, dict[str, Any]] = {}
        self._moving: list[Kept] = []  # change in the forward pass: copied at every commit
        self._first: list[Kept] = []  # of which the first commit tells whether they change
        self._still = Still()  # have not changed so far
        self._absent: list[tuple[str, nn.Module, str]] = []  # are None: name, module, key
        self.untrained = Untrained(roles)
        self._commits = 0  # in this entry
        # One parameter per optimizer: it tells an update by an optimizer that was not registered.
        self._probes: list[tuple[torch.Tensor, int]] = []
        # Average weights: parameters that no registered optimizer has, and objects that hold large
        # tensors. Whoever writes them does so by himself. The sum of their version counters.
        self._followers: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._followed: dict[str, int] = {}
        # The largest of each, and a sample of it: `.data` is written past the counters.
        self._largest: dict[str, weakref.ref[torch.Tensor]] = {}
        self._samples: dict[str, torch.Tensor | None] = {}
        self._scheduler_items = list(roles.schedulers.items())
        self._optimizer_items = list(roles.optimizers.items())

    # ------------------------------------------------------------ remembering

    def begin(
        self,
        known: Collection[str] = (),
        others: Callable[[], Iterable[Roles]] = tuple,
    ) -> None:
        """At restore().

        Copy every buffer once, for it is not known yet which ones the forward pass changes.

        Args:
            known: names of `untrained.moving` in the entry before.
            others: what the other TrainStates hold by now.
        """
        self._moving, self._first, self._still, self._absent = [], [], Still(), []
        seen: set[int] = set()
        self._commits = 0
        for role, module in self._roles.modules.items():
            for path, part in module.named_modules():
                for key, tensor in part._buffers.items():
                    name = ".".join(word for word in (role, path, key) if word)
                    if tensor is None:
                        self._absent.append((name, part, key))
                        continue
                    if id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    buffer = Kept(name, part, key, tensor, is_parameter=False)
                    buffer.copy = shards.local(tensor).detach().clone()
                    is_moving = isinstance(part, _silent_kinds()) or tensor.is_inference()
                    (self._moving if is_moving else self._first).append(buffer)
        followers = self._find_followers()
        self.untrained.begin(
            {id(one) for each in followers.values() for one in each}, known, others
        )
        self._followers = {
            role: [
                weakref.ref(one)
                for one in found[:: 1 + len(found) // _LOOKED_AT]
                if not one.is_inference()
            ]
            for role, found in followers.items()
            if found
        }
        self._largest = {
            role: weakref.ref(max(found, key=torch.Tensor.numel))
            for role, found in followers.items()
            if found
        }
        self._remember_small()
        self._probes = []  # DDP may still broadcast its first weights into the parameters

    def _find_followers(self) -> dict[str, list[torch.Tensor]]:
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
        return tensors

    def _versions(self, role: str) -> int:
        """Grows with each write. Copies that a state_dict() made are gone, and do not count."""
        found = (one() for one in self._followers[role])
        return sum(tensor._version for tensor in found if tensor is not None)

    def _sample(self, role: str) -> torch.Tensor | None:
        largest = self._largest[role]()
        return None if largest is None else memory.sample_of(shards.local(largest))

    def touched_followers(self, *, is_seldom: bool = False) -> list[str]:
        """The roles of averages that were written since the last commit.

        No copy of them is kept: each stays as it is, with all of its buffers. `is_seldom`: contents
        are compared behind some commits only, as a device has to be waited for.
        """
        touched = [
            role for role, before in self._followed.items() if self._versions(role) != before
        ]
        if not is_seldom or _is_due(self._commits):
            others = [
                role
                for role in self._samples
                if role not in touched and self._largest[role]() is not None
            ]
            now = [self._sample(role) for role in others]
            before = [self._samples[role] for role in others]
            touched += [others[index] for index in memory.changed(before, now)]
        return touched

    def remember(self) -> None:
        """At commit(): a few microseconds without buffers that change."""
        self._commits += 1
        is_due = _is_due(self._commits)
        if self._absent:
            self._find_made()
        if self._commits == 1:
            self._sort_first()
        elif self._still.kept:
            self._sort_buffers(is_due=is_due)
        if self._moving:
            memory.copy_all(self._moving)
        self.untrained.remember(is_due=is_due)
        self._remember_small()

    def remember_also(self) -> None:
        """At the commit of another TrainState, whose step may have run modules of this one.

        What that has written in them is part of the version that begins there. All else is as of
        the last commit of its own.
        """
        if self._absent:
            self._find_made()
        if not self._commits:  # there are copies of all
            memory.copy_all([*self._moving, *self._first])
            return
        if self._still.kept:
            self._sort_buffers(is_due=False)
        if self._moving:
            memory.copy_all(self._moving)
        self.untrained.remember(is_due=False)

    def _remember_small(self) -> None:
        self._probes = []
        for role, optimizer in self._optimizer_items:
            groups = self._groups[role] = [group.copy() for group in optimizer.param_groups]
            for group in groups:
                rate = group.get("lr")
                # capturable optimizers: the scheduler writes into it
                if type(rate) is not float and isinstance(rate, torch.Tensor):
                    group["lr"] = rate.clone()
            for parameter in groups[0]["params"] if groups else ():
                if parameter.requires_grad and id(parameter) not in self.untrained.normed:
                    self._probes.append((parameter, memory.version_of(parameter)))
                    break
        self._followed = {role: self._versions(role) for role in self._followers}
        self._samples = {role: self._sample(role) for role in self._largest}
        for role, scheduler in self._scheduler_items:
            self._schedulers[role] = pickle.dumps(scheduler.state_dict(), 5)
        for role, scaler in self._roles.scalers.items():
            self._scalers[role] = read_scaler(scaler)

    def _find_made(self) -> None:
        """Buffers that were None, and are none any more: a forward pass makes them."""
        made = {
            (name, key): (part, tensor)
            for name, part, key in self._absent
            if key in part._buffers and (tensor := part._buffers[key]) is not None
        }
        if not made:
            return
        self._absent = [one for one in self._absent if (one[0], one[2]) not in made]
        self._moving += [
            Kept(name, part, key, tensor, is_parameter=False)
            for (name, key), (part, tensor) in made.items()
        ]

    def _sort_first(self) -> None:
        """At the first commit, before which there is a copy of everything."""
        first, self._first = self._first, []
        changed = {id(buffer.module) for buffer in first if _has_changed(buffer)}
        still = []
        for buffer in first:
            if id(buffer.module) in changed:
                self._moving.append(buffer)
            else:  # it stood still for a step: its memory is given back
                buffer.copy = None
                buffer.note()
                still.append(buffer)
        self._still.hold(still)

    def _sort_buffers(self, *, is_due: bool) -> None:
        """Copy always what changed since the last commit, and the others of its modules."""
        written = self._still.take_written(is_due=is_due)
        if not written:
            return
        changed = {id(buffer.module) for buffer in written}
        self._moving += written
        self._moving += [buffer for buffer in self._still.kept if id(buffer.module) in changed]
        self._still.hold(
            [buffer for buffer in self._still.kept if id(buffer.module) not in changed]
        )

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
            now = buffer.now()
            if now is not None:
                found.append((buffer.name, shards.local(now) if buffer.is_distributed else now))
        return found

    # ------------------------------------------------------------ rolling back

    def roll_back(self) -> str:
        """Make the objects what they were at the last commit.

        Returns "" or why that is not possible.
        """
        for parameter, version in self._probes:
            if memory.version_of(parameter) != version:
                return (
                    "parameters were changed since the last commit() by something that is not a "
                    "registered optimizer"
                )
        problem = self._roll_back_buffers() or self.untrained.roll_back()
        for role, optimizer in self._roles.optimizers.items():
            for group, remembered in zip(optimizer.param_groups, self._groups[role], strict=False):
                write_group(group, remembered)
        for role, scheduler in self._roles.schedulers.items():
            scheduler.load_state_dict(pickle.loads(self._schedulers[role]))  # noqa: S301
        for role, scaler in self._roles.scalers.items():
            write_scaler(scaler, self._scalers[role])
        return problem

    def _roll_back_buffers(self) -> str:
        modules = self._roles.modules
        touched = self.touched_followers()
        kept = {id(part) for role in touched if role in modules for part in modules[role].modules()}
        for buffer in (*self._moving, *self._first):
            if id(buffer.module) in kept:
                continue
            if buffer.copy is not None:
                buffer.put_back()
            elif buffer.tensor is None:  # there was none
                buffer.place[buffer.key] = None
        for _, module, key in self._absent:
            if id(module) not in kept and key in module._buffers:
                module._buffers[key] = None
        for buffer in self._still.written():
            if id(buffer.module) not in kept:
                return (
                    f"buffer {buffer.name} changed for the first time since the "
                    "last commit() and no copy of it was kept"
                )
        return ""


def _has_changed(buffer: Kept) -> bool:
    """Whether a buffer with a copy is another one by now.

    Kernels that torch or others call from a forward pass need not raise the counters of what they
    write.
    """
    return buffer.is_written() or (
        buffer.copy is not None and not memory.is_same(buffer.copy, buffer.own(buffer.tensor))
    )


def _is_due(commits: int) -> bool:
    return not commits & (commits - 1) or not commits % _COMPARED_EVERY


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
