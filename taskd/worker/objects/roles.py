"""The objects of one TrainState, sorted by what they are.

Modules, optimizers, schedulers, scalers, samplers, plain values.

Owns which object counts as what, and the names of its tensors. Knows neither black box nor plan.

- *Held by several* (module, optimizer, scheduler, scaler, anything whose state holds large
  tensors): the same on every rank, or on those
  with the same shard, so a rank that lost it receives it from another.
- *Per rank* (sampler, loader, generators, everything else with a state_dict): goes into the black
  box at every commit.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taskd.errors import StateError
from taskd.worker import internals
from taskd.worker.objects import shards, units
from taskd.worker.objects.extra_states import ExtraStates
from taskd.worker.objects.module_state import ModuleState, check_metrics
from taskd.worker.objects.nesting import NestingScheduler, carried
from taskd.worker.objects.own_state import (
    OwnState,
    has_own_state,
    optimizers_within,
    unwrap_optimizer,
)
from taskd.worker.objects.positions import check_loader, walks_data
from taskd.worker.objects.scalers import load_scaler

_PLAIN = (int, float, str, bool, bytes, complex, type(None))
# A state_dict with more tensor bytes than this, or with a DTensor, is taken for a replica (an EMA),
# not for a position: writing it out at every commit would cost more than the step boundary may.
_LARGE_BYTES = 16 * 1024


@dataclass
class Roles:
    """Objects by role, one dict per kind."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    steppers: dict[str, Any] = field(default_factory=dict)  # optimizers that are not torch's
    schedulers: dict[str, Any] = field(default_factory=dict)  # and what modules carry as extra
    scalers: dict[str, Any] = field(default_factory=dict)
    # anything else that is the same on every rank, also what optimizers keep beside their memory
    replicas: dict[str, Any] = field(default_factory=dict)
    # per rank: samplers, loaders, generators
    positions: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # plain values

    @classmethod
    def sort(cls, state_name: str, objects: dict[str, Any]) -> "Roles":
        """Sort the arguments of `TrainState(...)`.

        Raises:
            StateError: an object that cannot be carried; the text says what to do.
        """
        roles = cls()
        for role, value in objects.items():
            roles._add(state_name, role, value)
        roles._add_within(state_name)
        roles._check_layouts(state_name)
        roles._check_units(state_name)
        shards.prepare_caches()
        return roles

    def _add(self, state_name: str, role: str, value: Any) -> None:
        if is_plain(value):
            self.values[role] = value
        elif isinstance(value, nn.Module):
            module = self.modules[role] = _checked_module(state_name, role, unwrap(value))
            self._add_beside(f"TrainState({state_name!r}): {role}", role, module)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[role] = _checked_optimizer(state_name, role, unwrap_optimizer(value))
        elif isinstance(value, (torch.Generator, random.Random)) or hasattr(value, "bit_generator"):
            self.positions[role] = value
        elif not (
            callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
        ):
            raise StateError(_unsupported(state_name, role, value))
        else:
            label, kind = f"TrainState({state_name!r}): {role}", self._kind_of(value)
            kind[role] = carried(label, value) if kind is self.schedulers else value
            check_loader(label, value)

    def _add_beside(self, label: str, role: str, module: nn.Module) -> None:
        """What a module has beside parameters and buffers."""
        extra = ExtraStates.of(label, module, _is_bare)
        if extra is not None:  # small, and the same on every rank
            self.schedulers[f"{role}.extra"] = extra
        own = ModuleState.of(label, module)
        if own is not None:
            self.positions[f"{role}.own"] = own
        check_metrics(label, module)

    def _add_within(self, state_name: str) -> None:
        """What optimizers hold of others, and keep beside, see `taskd.worker.objects.own_state`."""
        given = dict(self.optimizers)
        registered = {id(optimizer) for optimizer in given.values()}
        for role, optimizer in given.items():
            within = optimizers_within(optimizer)
            is_own = has_own_state(optimizer)
            for path, inner in within.items():
                name = f"{role}.{path}"
                if is_own and shards.is_zero(inner):
                    raise StateError(_divided_within(state_name, role, optimizer, name))
                if id(inner) not in registered:
                    registered.add(id(inner))
                    self.optimizers[name] = _checked_optimizer(state_name, name, inner)
            if is_own:
                self.replicas[f"{role}.own"] = OwnState(optimizer, [*within.values()])

    def _check_layouts(self, state_name: str) -> None:
        """What has no memory of one piece can be kept, but not sent to another rank.

        Gradients are no state: they may be sparse.
        """
        tensors = [*self.named_tensors().items()]
        for role, replica in self.replicas.items():
            tensors += [(f"{role}.state_dict()", one) for one in tensors_in(replica.state_dict())]
        for name, tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                message = (
                    f"TrainState({state_name!r}): {name} is a tensor with the layout {kind}, "
                    "which cannot be sent to a rank that is replaced: register its dense parts "
                    "(indices and values) instead and put it together where it is used; or, if "
                    "it does not change, keep it in a plain attribute, not in a buffer, that every "
                    "rank builds itself"
                )
                raise StateError(message)

    def _check_units(self, state_name: str) -> None:
        """FSDP1.

        What a unit keeps is found through its wrapper alone, and under a name of the shard, which
        DTensors must not have.
        """
        own = units.parameters_of(self.modules.values())
        for name, tensor in self.named_tensors().items():
            if units.is_of_unit(tensor) and id(tensor) not in own:
                message = (
                    f"TrainState({state_name!r}): {name} belongs to a FullyShardedDataParallel "
                    "module that is not registered: give that module, the wrapper and not what "
                    "is within, to the same TrainState"
                )
                raise StateError(message)
            if own and shards.is_distributed(tensor):
                message = (
                    f"TrainState({state_name!r}): {name} is a DTensor, and other parameters "
                    "are in FullyShardedDataParallel: use fully_shard "
                    "for all of them, or a TrainState for each kind"
                )
                raise StateError(message)

    def _kind_of(self, value: Any) -> dict[str, Any]:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) or hasattr(value, "get_last_lr"):
            return self.schedulers
        if isinstance(value, torch.amp.GradScaler) or (
            hasattr(value, "get_scale") and hasattr(value, "unscale_")
        ):
            return self.scalers
        if callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None)):
            return self.steppers
        if walks_data(value):
            return self.positions
        tensors = list(tensors_in(value.state_dict()))
        if (
            any(map(shards.is_distributed, tensors))
            or sum(t.numel() * t.element_size() for t in tensors) > _LARGE_BYTES
        ):
            return self.replicas
        return self.positions

    @property
    def others(self) -> dict[str, Any]:
        """What several ranks hold besides modules and optimizers: all that has a state_dict."""
        return {**self.schedulers, **self.steppers, **self.replicas, **self.scalers}

    def load_others(self, states: Mapping[str, Any]) -> None:
        """Put state_dicts back, by role."""
        for role, value in self.others.items():
            if role in self.scalers:
                load_scaler(value, states[role])
            else:
                value.load_state_dict(states[role])

    def find(self, role: str) -> Any:
        """The object or plain value called `role`. Raises KeyError."""
        for kind in (self.values, *self._kinds):
            if role in kind:
                value = kind[role]
                return value.scheduler if isinstance(value, NestingScheduler) else value
        raise KeyError(role)

    @property
    def _kinds(self) -> tuple[dict[str, Any], ...]:
        """Those of objects, which are no plain values."""
        return (
            self.modules,
            self.optimizers,
            self.steppers,
            self.schedulers,
            self.scalers,
            self.replicas,
            self.positions,
        )

    def is_object(self, role: str) -> bool:
        """True if `role` names an object given to the constructor, not a plain value."""
        return role not in self.values and any(role in kind for kind in self._kinds)

    def object_roles(self) -> set[str]:
        """The roles of all objects."""
        return {role for kind in self._kinds for role in kind}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by "role.name", then parameters that only an optimizer knows.

        Shared ones under each name.

        FSDP gets its shards back first, for these are the state: call it outside a forward or
        backward pass that is to go on.
        """
        named: dict[str, torch.Tensor] = {}
        for role, module in self.modules.items():
            shards.reshard(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                named[f"{role}.{name}"] = parameter
            for name, buffer in module.named_buffers(remove_duplicate=False):
                named[f"{role}.{name}"] = buffer
        seen = {id(tensor) for tensor in named.values()}
        for role, optimizer in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"{role}.parameter {index}"] = parameter
        return named


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order that its state_dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_plain(value: Any) -> bool:
    """A value that can be an attribute of TrainState.

    Builtin scalars, containers of them, tensors.
    """
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return (
            not isinstance(value, nn.Parameter)
            and value.layout is torch.strided
            and not shards.is_distributed(value)
        )
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


def _is_bare(value: Any) -> bool:
    """A plain value without tensors."""
    return is_plain(value) and next(tensors_in(value), None) is None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module in DistributedDataParallel and torch.compile, which names leave out."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _checked_module(state_name: str, role: str, module: nn.Module) -> nn.Module:
    problem = units.problem_of(module)
    if problem:
        message = f"TrainState({state_name!r}): {role} cannot be carried: {problem}"
        raise StateError(message)
    shards.reshard(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        shards.sharding_of(tensor, f"TrainState({state_name!r}): {role}.{name}")
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            message = (
                f"TrainState({state_name!r}): {role}.{name} has no shape yet (a lazy module): run "
                "one forward pass before TrainState is created"
            )
            raise StateError(message)
    return module


def _checked_optimizer(
    state_name: str, role: str, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    what = ""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") and internals.has(
        "whether an optimizer is complete",
        (
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)]),
            "_optimizer_step_pre_hooks",
        ),
    ):
        inner = getattr(optimizer, "optimizer", None)
        within = (
            (f" ({role}.optimizer, a {type(inner).__qualname__})")
            if isinstance(inner, torch.optim.Optimizer)
            else ""
        )
        message = (
            f"TrainState({state_name!r}): {role} is a {type(optimizer).__qualname__}, which is no "
            "complete torch optimizer: its __init__ does not call Optimizer.__init__, so that "
            f"its steps cannot be followed. Give the optimizer that it wraps{within}, and what it "
            "keeps beside that as an object of its own with state_dict() and load_state_dict()"
        )
        raise StateError(message)
    if not shards.is_zero(optimizer):
        if hasattr(optimizer, "consolidate_state_dict"):
            what = f"{type(optimizer).__name__} shards its memory in a way that is not known here"
    elif getattr(optimizer, "_overlap_with_ddp", False):
        what = (
            "overlap_with_ddp=True writes parameters in the middle of the backward pass, where "
            "a fault would tear them"
        )
    if what:
        message = (
            f"TrainState({state_name!r}): {role} cannot be carried: {what}. Use "
            "torch.distributed.optim.ZeroRedundancyOptimizer without "
            "overlap_with_ddp, or fully_shard and an ordinary optimizer"
        )
        raise StateError(message)
    return optimizer


def _divided_within(state_name: str, role: str, optimizer: torch.optim.Optimizer, name: str) -> str:
    return (
        f"TrainState({state_name!r}): {role} cannot be carried: {name} is a "
        f"ZeroRedundancyOptimizer, so that the state_dict of the {type(optimizer).__qualname__} "
        "around it is on no rank as a whole: give that to the TrainState, and what the other one "
        "keeps beside it as an object of its own with state_dict() and load_state_dict()"
    )


def _unsupported(state_name: str, role: str, value: Any) -> str:
    kind = type(value).__name__
    advice = (
        "give an object with state_dict() and load_state_dict(), or a plain value (numbers, "
        "text, bytes, lists, dicts, tensors)"
    )
    if isinstance(value, torch.utils.data.DistributedSampler):
        advice = (
            "a DistributedSampler has no state_dict: keep `state.epoch` and the number of "
            "batches done as attributes, call "
            "set_epoch(state.epoch) after restore() and skip the batches done"
        )
    elif isinstance(value, torch.utils.data.DataLoader):
        advice = (
            "a DataLoader has no state_dict: use a stateful loader, or keep the number of "
            "batches done as an attribute and skip them after restore()"
        )
    elif shards.is_distributed(value) and not isinstance(value, nn.Parameter):
        advice = (
            "a DTensor is carried inside a module (as a buffer) or through an optimizer: a "
            "plain value belongs to one rank"
        )
    elif isinstance(value, nn.Parameter):
        advice = (
            "a single parameter is carried through its optimizer, or inside a module: "
            "register one of these"
        )
    return f"TrainState({state_name!r}): {role}={kind} cannot be carried: {advice}"
