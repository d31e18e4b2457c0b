"""What a module's own state_dict() gives beside parameters, buffers and extra states.

A metric is one: it counts in plain attributes, which its class writes into its state_dict() and
reads from it again. That is carried as an object with a state_dict of its own, each rank's alone.
Of a module that has parameters or buffers as well, it is not: asking for all of it within each step
would cost time, and giving it back would load these too.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from taskd.checkpoint.values import pack
from taskd.errors import CheckpointError
from taskd.worker.objects import shards, units
from taskd.worker.objects.kinds import dict_as
from taskd.worker.objects.nesting import problem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)

_GIVE = ("state_dict", "_save_to_state_dict")
_TAKE = ("load_state_dict", "_load_from_state_dict")
_EXTRA = "_extra_state"  # what torch calls them
_NAMED = 5  # in a warning: a large model may have thousands


class ModuleState:
    """Of the parts of one module that may have any, by their path.

    Which ones these are is a matter of their classes, so that it is the same in each entry.
    """

    def __init__(
        self, label: str, parts: Mapping[str, nn.Module], known: Mapping[str, set[str]]
    ) -> None:
        self._label = label
        self._parts = parts
        self._known = known  # of each part, the names of what is carried in another way
        self._failed: set[str] = set()

    @classmethod
    def of(cls, label: str, module: nn.Module) -> ModuleState | None:
        """None: there is none. Warns of what cannot be carried."""
        parts: dict[str, nn.Module] = {}
        known: dict[str, set[str]] = {}
        problems: dict[str, list[str]] = {}
        covered: set[str] = set()  # what the parts within a part have of their own
        for path, part in reversed([*module.named_modules()]):  # the inner ones first
            if not _has_other(part, _GIVE) or units.has_any([part]):  # FSDP1 asks all ranks for it
                continue
            start = f"{path}." if path else ""
            names = _carried_names(part) | {
                name.removeprefix(start) for name in covered if name.startswith(start)
            }
            own, problem = _own_of(part, names)
            if problem:
                problems.setdefault(problem, []).append(path or type(part).__qualname__)
            elif _may_be_asked(part):
                parts[path], known[path] = part, names
            covered |= {f"{start}{name}" for name in own}
        for problem, paths in problems.items():
            _warn(label, _some(reversed(paths)), problem)
        return cls(label, parts, known) if parts else None

    def state_dict(self) -> dict[str, Any]:
        """What each part has of its own. One that fails, which did not at first, is left out."""
        found = {}
        for path, part in self._parts.items():
            own, problem = _own_of(part, self._known[path])
            if not problem:
                found[path] = own
            elif path not in self._failed:
                self._failed.add(path)
                _warn(self._label, path or type(part).__qualname__, problem)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each part its own back, with that of the parts within as it is now."""
        for path, part in self._parts.items():
            if path not in state:  # not carried, or of a checkpoint from before it was
                continue
            own = state[path]
            if _has_other(part, _TAKE[:1]):
                own = {**part.state_dict(), **own}
            accepted = inspect.signature(part.load_state_dict).parameters.values()
            if any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in accepted):
                part.load_state_dict(own, strict=False)
            else:
                part.load_state_dict(own)


def _warn(label: str, who: str, problem: str) -> None:
    log.warning(
        "%s: what %s has in its state_dict() beside parameters and buffers is not carried, as %s: "
        "after a fault it is as the script builds it",
        label,
        who,
        problem,
    )


def check_metrics(label: str, module: nn.Module) -> None:
    """Warn of metrics of torchmetrics that keep their states out of their state_dict()."""
    left_out = [
        path or type(part).__qualname__
        for path, part in module.named_modules()
        if isinstance(part.__dict__.get("_defaults"), dict)
        and isinstance(part.__dict__.get("_persistent"), dict)
        and all(callable(getattr(part, name, None)) for name in ("update", "compute", "reset"))
        and not all(part._persistent.values())
    ]
    if left_out:
        log.warning(
            "%s: %s counts in states that are not persistent: they are not in its state_dict(), "
            "and not carried: after a fault they are as the script builds them. Call its "
            "persistent(True) before TrainState is created",
            label,
            _some(left_out),
        )


def _some(paths: Iterable[str]) -> str:
    """The first ones, and how many more there are."""
    named = [*paths]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


def _has_other(part: nn.Module, names: Iterable[str]) -> bool:
    """Whether its class, or it, has a method of its own in place of one of nn.Module's."""
    return any(
        name in vars(part) or getattr(type(part), name) is not getattr(nn.Module, name)
        for name in names
    )


def _carried_names(part: nn.Module) -> set[str]:
    """As its state_dict() calls parameters, buffers and extra states."""
    return {
        *(name for name, _ in part.named_parameters(remove_duplicate=False)),
        *(name for name, _ in part.named_buffers(remove_duplicate=False)),
        *(
            f"{path}.{_EXTRA}" if path else _EXTRA
            for path, _ in part.named_modules(remove_duplicate=False)
        ),
    }


def _may_be_asked(part: nn.Module) -> bool:
    """Whether it has a way to take its own back, and nothing that is carried in another way."""
    has_tensors = any(True for _ in part.parameters()) or any(True for _ in part.buffers())
    return not has_tensors and (_has_other(part, _TAKE) or bool(part._load_state_dict_pre_hooks))


def _own_of(part: nn.Module, names: set[str]) -> tuple[dict[str, Any], str]:
    """What a part has beside `names`, and why it cannot be carried, or ""."""
    try:
        state: Any = part.state_dict()
    except Exception as error:  # noqa: BLE001 - code of the user's class
        return {}, f"that method fails ({type(error).__name__}: {error})"
    if not isinstance(state, dict):
        return {}, f"that is a {type(state).__qualname__}, and not a dict"
    tensors = {_place(tensor) for tensor in (*part.parameters(), *part.buffers())} - {None}
    items = {
        name: value
        for name, value in state.items()
        if name not in names and _place(value) not in tensors
    }
    own = dict_as(state, items)
    return own, _problem(part, own) if own else ""


def _place(value: Any) -> Any:
    """Of a tensor's memory; None: of anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    value = shards.local(value)
    return (value.data_ptr(), value.shape) if value.layout is torch.strided else None


def _problem(part: nn.Module, own: dict[str, Any]) -> str:
    if not _has_other(part, _TAKE) and not part._load_state_dict_pre_hooks:
        return "it has no load_state_dict() of its own"
    if not _may_be_asked(part):
        return "it has parameters or buffers, too: keep it in a module without, or in an object"
    problem = problem_of(own)
    if problem:
        return problem
    try:
        pack("it", own)
    except CheckpointError as error:
        return str(error)
    return ""
