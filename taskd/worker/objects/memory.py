"""The memory of one tensor: whether something was written there, and writing into it.

A version counter does not tell of what is written through `.data`, nor by kernels that leave it
alone, and an inference tensor has none: samples of the content do. Knows no roles and no optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from taskd.worker import internals
from taskd.worker.objects import shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# elements of a sample: spread over the tensor, so that of averages and statistics, which are
# written as a whole, one of them differs
_SAMPLED = 64


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1: an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def sample_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of some elements, on the tensor's device, which is not waited for.

    None: there is no such memory (sparse tensors, those on "meta", quantized ones and the like).
    """
    if not is_strided(tensor):
        return None
    with torch.no_grad():
        flat = _flat(tensor.detach())
        return flat[:: flat.numel() // _SAMPLED + 1].clone().view(torch.uint8)


def changed(before: Sequence[torch.Tensor | None], now: Sequence[torch.Tensor | None]) -> list[int]:
    """Which of these samples differ, by index. Waits for the devices, for each of them once."""
    pairs: dict[torch.device, list[int]] = {}
    found = []
    for index, (one, other) in enumerate(zip(before, now, strict=True)):
        if one is None or other is None:
            if one is not other:
                found.append(index)
        elif one.shape != other.shape or one.device != other.device:
            if one.shape != other.shape or not torch.equal(one.cpu(), other.cpu()):
                found.append(index)
        else:
            pairs.setdefault(one.device, []).append(index)
    for indices in pairs.values():
        ones = torch.cat([before[index] for index in indices])  # type: ignore[misc]
        if not torch.equal(ones, torch.cat([now[index] for index in indices])):  # type: ignore[misc]
            found += [
                index
                for index in indices
                if not torch.equal(before[index], now[index])  # type: ignore[arg-type]
            ]
    return found


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether every byte of the content is. Waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (is_strided(one) and is_strided(other)):
        return True  # as far as can be told
    if one.stride() != other.stride():
        one, other = one.contiguous(), other.contiguous()
    with torch.no_grad():
        return torch.equal(
            _flat(one.detach()).view(torch.uint8), _flat(other.detach()).view(torch.uint8)
        )


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into the memory of `target`, which may repeat some of it (`expand()`).

    Raises RuntimeError: torch does not write there, as into an inference tensor.
    """
    with torch.no_grad():
        if target.layout is torch.strided and target.shape == source.shape:
            for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
                if not stride and size > 1:
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it is a plain piece of memory, and no class that makes its own of each operation."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of the memory: a view, but for gaps and overlaps."""
    if not tensor.is_contiguous():
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.clone()
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        tensor = tensor.permute(order)
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    # that of a single element may be any, and no tensor of bytes can be made of it then
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


class Kept:
    """A parameter or buffer of a module.

    Where it hangs, what it was at the last commit, and a copy if it is known to change.
    """

    __slots__ = (
        "copy", "is_dict", "is_distributed", "is_parameter", "key", "module", "name", "place",
        "pointer", "sample", "tensor", "version",
    )  # fmt: skip

    def __init__(
        self, name: str, module: nn.Module, key: str, tensor: torch.Tensor, *, is_parameter: bool
    ) -> None:
        self.name, self.module, self.key, self.tensor = name, module, key, tensor
        self.is_parameter = is_parameter
        # those of torch.jit's modules look like a dict, but have no get()
        self.place: dict[str, Any] = module._parameters if is_parameter else module._buffers
        self.is_dict = isinstance(self.place, dict)
        # then copies are made of its local tensor
        self.is_distributed = shards.is_distributed(tensor)
        self.version = version_of(tensor)
        self.pointer: int | None = None  # None: it tells nothing
        self.sample: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None

    def now(self) -> torch.Tensor | None:
        """What hangs there now.

        FSDP puts whole parameters in the place of shards, which are what is meant.
        """
        if self.is_parameter and self.is_distributed:
            return self.tensor
        if self.is_dict:
            return self.place.get(self.key)
        return self.place[self.key] if self.key in self.place else None  # noqa: SIM401

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of it that this rank holds."""
        return shards.local(tensor) if self.is_distributed else tensor

    def is_written(self) -> bool:
        """Whether it is another one, or its counter has moved, or it has none."""
        now = self.now()
        return now is not self.tensor or self.version < 0 or now._version != self.version

    def is_elsewhere(self) -> bool:
        """Whether its memory is another one: `.data` was assigned to."""
        return self.pointer is not None and self.pointer != self.own(self.tensor).data_ptr()

    def note(self) -> None:
        """What it is now is what `is_written`, `is_elsewhere` and its sample compare with."""
        now = self.now()
        if now is None:
            return
        own = self.own(now)
        self.tensor, self.version = now, version_of(now)
        self.pointer = own.data_ptr() if is_strided(own) else None
        self.sample = sample_of(own)

    def sample_now(self) -> torch.Tensor | None:
        """Of what hangs there."""
        now = self.now()
        return None if now is None else sample_of(self.own(now))

    def put_back(self) -> None:
        """Make it what the copy says. It stays the same object where torch lets it."""
        copy = self.copy
        assert copy is not None
        own = self.own(self.tensor)
        if own.is_inference():  # torch lets nobody write there now
            new = copy.clone()
            self.tensor = nn.Parameter(new, requires_grad=False) if self.is_parameter else new
        elif own.shape != copy.shape or own.dtype != copy.dtype or own.device != copy.device:
            own.data = copy.clone()  # `.data` was given another one
        else:
            overwrite(own, copy)
        if not (self.is_parameter and self.is_distributed):
            self.place[self.key] = self.tensor


def copy_all(kept: Iterable[Kept]) -> None:
    """What hangs there now becomes what is put back."""
    copies, tensors = [], []
    for one in kept:
        now = one.now()
        if now is None:
            one.tensor = one.copy = None  # type: ignore[assignment]
            continue
        one.tensor, one.version = now, version_of(now)
        own = one.own(now)
        copy = one.copy
        if (
            copy is None
            or copy.shape != own.shape
            or copy.dtype != own.dtype
            or copy.device != own.device
        ):
            one.copy = copy = torch.empty_like(own, requires_grad=False)
        copies.append(copy)
        tensors.append(own)
    if not copies:
        return
    with torch.no_grad():
        if internals.has("the copies of several tensors at once", (torch, "_foreach_copy_")):
            torch._foreach_copy_(copies, tensors)  # one call for all
            return
        for copy, own in zip(copies, tensors, strict=True):
            copy.copy_(own)
