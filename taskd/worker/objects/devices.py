"""Plain values with tensors of a device, on their way to another process.

Pickle writes the number that a device has in this process: read by another rank, the tensor would
lie on the device of this one, or could not be read at all. So it goes by way of the host, and
remembers what kind of device it comes from until it is put on that of the rank that reads it.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KIND = "taskd_device_kind"  # an attribute of a tensor in host memory


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Of all but numbers, text and containers; called by pickle."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        kind = _kind_of(value)
        return NotImplemented if kind is None else (arrived, (to_host(value), kind))


def dumps(value: Any, protocol: int) -> bytes:
    """As `pickle.dumps`. What is read with `pickle.loads` has all tensors in host memory."""
    stream = io.BytesIO()
    _Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in host memory; one that is there already without what it remembers."""
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


def arrived(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """`tensor`, in host memory, which comes from a device of that kind."""
    setattr(tensor, _KIND, kind)
    return tensor


def to_own_device(value: Any, own: Any, near: Iterable[torch.Tensor]) -> Any:
    """What another process has written, with what comes from a device on that of this rank.

    Args:
        own: what this rank has in the same place; None: nothing.
        near: tensors of this rank, which tell its devices where `own` does not.
    """
    return _placed(value, own, lambda tensor, other: _own_device(tensor, other, near))


def beside(value: Any, own: Any) -> Any:
    """What comes from a checkpoint, which knows no devices: tensors where `own` has them."""
    return _placed(value, own, lambda tensor, other: (tensor if other is None else other).device)


def at_parameter(value: Any, parameter: torch.Tensor) -> Any:
    """What comes from a checkpoint and is memory of a parameter: where torch puts it, beside it."""
    return _placed(value, None, lambda *_: parameter.device)


def _placed(
    value: Any, own: Any, device_for: Callable[[torch.Tensor, torch.Tensor | None], torch.device]
) -> Any:
    if isinstance(value, torch.Tensor):
        device = device_for(value, own if isinstance(own, torch.Tensor) else None)
        if device == value.device:
            return value
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if kinds.is_known(value):
        of_key = own if isinstance(own, dict) else {}
        items = {key: _placed(item, of_key.get(key), device_for) for key, item in value.items()}
        return kinds.dict_as(value, items)
    if type(value) in (list, tuple):
        is_alike = isinstance(own, (list, tuple)) and len(own) == len(value)
        in_order = own if is_alike else [None] * len(value)
        pairs = zip(value, in_order, strict=True)
        return kinds.sequence_as(value, (_placed(item, other, device_for) for item, other in pairs))
    return value


def _own_device(
    tensor: torch.Tensor, own: torch.Tensor | None, near: Iterable[torch.Tensor]
) -> torch.device:
    kind = getattr(tensor, _KIND, None)
    if kind is None:
        return tensor.device
    for other in near if own is None else (own, *near):
        if other.device.type == kind:
            return other.device
    module = getattr(torch, kind, None)
    if module is not None and module.is_available():
        return torch.device(kind, module.current_device())
    return tensor.device


def _kind_of(tensor: torch.Tensor) -> str | None:
    """Of the device that it comes from; None: host memory, or it has no memory at all."""
    kind: str = tensor.device.type
    return getattr(tensor, _KIND, None) if kind == "cpu" else None if kind == "meta" else kind
