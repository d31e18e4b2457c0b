"""A cast: a tensor around a single plain one of its form, in which all of its content is.

FSDP2 gathers such weights in another type than they are kept in (torchao's float8 ones, for
example). What is saved, sent and compared of one is the tensor within.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether it is one."""
    return _within(tensor) is not None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within a cast, live; of anything else itself."""
    # what a collective still writes into waits for it in each operation, and not here
    if type(tensor) in _PLAIN or hasattr(tensor, "trigger_wait"):
        return tensor
    inner = _within(tensor)
    return tensor if inner is None else inner


def _within(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names: list[str] = [] if flatten is None else list(flatten()[0])
    if len(names) != 1:
        return None
    inner: Any = getattr(tensor, names[0])
    is_alike = (inner.dtype, inner.shape) == (tensor.dtype, tensor.shape)
    return inner if type(inner) in _PLAIN and is_alike else None
