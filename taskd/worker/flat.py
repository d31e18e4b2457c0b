"""One TrainState as a flat table of named tensors and one tree of plain values: the form that checkpoints have.

Owns the names. A tensor keeps its name whatever the world size: parameters by module path, optimizer state by the parameter that it
belongs to, so that a checkpoint of four ranks is read by two. Knows no files.

    <state>.<role>.<parameter or buffer>             of modules
    <state>.<role>.state.<role>.<parameter>.<key>    of optimizers
    <state>.<role>.<path>                            of other objects with large tensors (an EMA)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from taskd.errors import StateError
from taskd.worker.rollback import load_scaler, write_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.worker.holding import Holding


def flatten(holding: Holding) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors as they are (no copies), and everything else. Per-rank objects (samplers, generators) are left out."""
    roles, prefix = holding.roles, holding.name
    tensors = {f"{prefix}.{name}": tensor.detach() for name, tensor in _distinct(holding)}
    names = _names(holding)
    optimizers = {}
    for role, optimizer in roles.optimizers.items():
        state: dict[str, dict[str, Any]] = {}
        for parameter, entries in optimizer.state.items():
            owner = names.get(id(parameter))
            if owner is None:
                message = f"TrainState({prefix!r}): {role} keeps state for {parameter!r}, which is none of its parameters: it cannot be saved"
                raise StateError(message)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{prefix}.{role}.state.{owner}.{key}"] = value.detach()
                    state.setdefault(owner, {})[key] = None
                else:
                    state.setdefault(owner, {})[key] = value
        groups = [
            {key: [names[id(parameter)] for parameter in value] if key == "params" else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        optimizers[role] = {"groups": groups, "state": state}
    states = {}
    for kind in (roles.schedulers, roles.scalers, roles.steppers, roles.replicas):
        for role, value in kind.items():
            states[role] = _take_tensors(value.state_dict(), f"{prefix}.{role}", tensors)
    return tensors, {"step": holding.step, "values": dict(roles.values), "optimizers": optimizers, "states": states}


def targets(holding: Holding, plain: dict[str, Any], shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Where a checkpoint's tensors are to be read into: the objects' own where there are any, new memory elsewhere.

    Args:
        plain: what `flatten` gave besides the tensors.
        shapes: global shape and dtype of every tensor in the checkpoint.

    Raises:
        StateError: the objects are others than those that were saved; the text names the tensor or role.
    """
    wanted = {f"{holding.name}.{name}": tensor for name, tensor in _distinct(holding)}
    wanted.update(_optimizer_targets(holding, plain["optimizers"], shapes))
    roles = holding.roles
    saved_states, own_states = set(plain["states"]), {*roles.schedulers, *roles.scalers, *roles.steppers, *roles.replicas}
    if saved_states != own_states:
        raise _misfit(holding, f"it was saved with {sorted(saved_states)}, here are {sorted(own_states)}")
    for name in _slots(plain["states"]):
        shape, dtype = shapes[name]
        wanted[name] = torch.empty(shape, dtype=dtype)
    saved_names = {name for name in shapes if name.startswith(f"{holding.name}.")}
    for name in sorted(saved_names ^ set(wanted)):
        raise _misfit(holding, f"{name} is only in {'the checkpoint' if name in saved_names else 'this program'}")
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != tuple(shapes[name][0]):
            raise _misfit(holding, f"{name} has shape {tuple(shapes[name][0])} in the checkpoint and {tuple(tensor.shape)} here")
    return wanted


def _optimizer_targets(holding: Holding, saved_optimizers: dict[str, Any], shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    names, wanted = _names(holding), {}
    parameters = {names[id(tensor)]: tensor for tensor in holding.roles.named_tensors().values()}
    for role in sorted({*saved_optimizers, *holding.roles.optimizers}):
        saved, own = saved_optimizers.get(role), holding.roles.optimizers.get(role)
        if saved is None or own is None:
            raise _misfit(holding, f"the optimizer {role!r} is only in {'the checkpoint' if own is None else 'this program'}")
        own_groups = [[names[id(parameter)] for parameter in group["params"]] for group in own.param_groups]
        if [group["params"] for group in saved["groups"]] != own_groups:
            raise _misfit(holding, f"{role} has other parameter groups")
        for owner, entries in saved["state"].items():
            for key in (key for key, value in entries.items() if value is None):
                name = f"{holding.name}.{role}.state.{owner}.{key}"
                if name in shapes:                    # else a value that is None
                    wanted[name] = _room(name, parameters[owner], own, shapes)
    return wanted


def load(holding: Holding, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """All tensors are read: put everything else in place."""
    roles, prefix = holding.roles, holding.name
    parameters = dict(roles.named_tensors().items())
    for role, saved in plain["optimizers"].items():
        optimizer = roles.optimizers[role]
        optimizer.state.clear()
        for owner, entries in saved["state"].items():
            optimizer.state[parameters[owner]] = {
                key: tensors.get(f"{prefix}.{role}.state.{owner}.{key}") if value is None else value for key, value in entries.items()
            }
        for group, remembered in zip(optimizer.param_groups, saved["groups"], strict=True):
            write_group(group, {key: value for key, value in remembered.items() if key != "params"})
    states = {role: _put_tensors(tree, tensors) for role, tree in plain["states"].items()}
    for kind in (roles.schedulers, roles.steppers, roles.replicas):
        for role, value in kind.items():
            value.load_state_dict(states[role])
    for role, scaler in roles.scalers.items():
        load_scaler(scaler, states[role])
    holding.step = plain["step"]
    roles.values = dict(plain["values"])


# ---------------------------------------------------------------- names


def _distinct(holding: Holding) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor once, under its first name."""
    seen = set()
    for name, tensor in holding.roles.named_tensors().items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _names(holding: Holding) -> dict[int, str]:
    """First name of each tensor, by identity."""
    return {id(tensor): name for name, tensor in _distinct(holding)}


def _room(name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, shapes: dict[str, Any]) -> torch.Tensor:
    """Memory for one tensor of an optimizer's state."""
    shape, dtype = shapes[name]
    if tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


# ---------------------------------------------------------------- tensors in trees

_SLOT = "taskd:tensor"       # {_SLOT: name} stands for the tensor of that name


def _take_tensors(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree.detach()
        return {_SLOT: path}
    if isinstance(tree, dict):
        return {key: _take_tensors(value, f"{path}.{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_take_tensors(value, f"{path}.{index}", tensors) for index, value in enumerate(tree))
    return tree


def _put_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        return tensors[tree[_SLOT]] if set(tree) == {_SLOT} else {key: _put_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_put_tensors(value, tensors) for value in tree)
    return tree


def _slots(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if set(tree) == {_SLOT}:
            yield tree[_SLOT]
        else:
            for value in tree.values():
                yield from _slots(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _slots(value)


def _misfit(holding: Holding, what: str) -> StateError:
    return StateError(f"TrainState({holding.name!r}) does not fit the checkpoint: {what}")
