"""Windows onto the memory of many tensors: a few words of each, read with one operation.

To slice a piece out of a tensor takes torch some microseconds, which is too long where hundreds are
looked at in each commit. So all of the memory of a device counts as one tensor here, of which words
are picked by their addresses. Nothing of a device's memory is held by that: who reads has made sure
that each tensor is where it was when the windows were opened. Knows no names and no versions.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.objects import memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = 8  # bytes
# How many words are read in all. One takes 3 ns, that in a line of the cache of its own.
_WORDS = 2048
# Of one tensor: more than one, as a single word may happen to keep its content; and no more than
# samples have.
_LEAST, _MOST = 4, 64
# Moves each word within its part of a tensor, so that they are not all of one column.
_SPREAD = 40503


def has_window(tensor: torch.Tensor) -> bool:
    """Whether there can be a window onto this one: it fills a piece of memory that has addresses.

    That is so on the host, and on devices whose memory torch takes by address.
    """
    return (
        tensor.device.type in ("cpu", "cuda")
        and memory.is_strided(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements have neither gaps nor overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


class Windows:
    """Those onto tensors of which each has one, see `has_window`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises RuntimeError, TypeError: torch does not take addresses of that device."""
        count = min(_MOST, max(_LEAST, _WORDS // max(1, len(tensors))))
        indices: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            indices.setdefault(tensor.device, []).append(index)
        self._panes = [
            _Pane(device, [(index, tensors[index]) for index in each], count)
            for device, each in indices.items()
        ]

    def read(self) -> list[torch.Tensor]:
        """What the windows show, to be compared. Waits for no device."""
        return [pane.read() for pane in self._panes]

    def is_same(self, before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
        """Whether the host's memory shows the same. Waits for no device."""
        return all(
            not pane.is_host or torch.equal(one, other)
            for pane, one, other in zip(self._panes, before, now, strict=True)
        )

    def changed(self, before: list[torch.Tensor], now: list[torch.Tensor]) -> set[int]:
        """Which tensors show something else, by index. Waits for the devices."""
        return {
            index
            for pane, one, other in zip(self._panes, before, now, strict=True)
            if not torch.equal(one, other)
            for index in pane.owners[(one != other).cpu()].tolist()
        }


class _Pane:
    """The windows onto the memory of one device."""

    def __init__(
        self, device: torch.device, tensors: Sequence[tuple[int, torch.Tensor]], count: int
    ) -> None:
        self.is_host = device.type == "cpu"
        # What is read on the host must be mapped: it stays as long as these.
        self._held = [tensor.detach() for _, tensor in tensors] if self.is_host else []
        addresses: list[int] = []
        masks: list[int] = []
        owners: list[int] = []
        for index, tensor in tensors:
            start = tensor.data_ptr()
            end = start + tensor.numel() * tensor.element_size()
            for address in _words_of(start, end, count):
                addresses.append(address)
                masks.append(_mask(address, start, end))
                owners.append(index)
        low, high = min(addresses), max(addresses) + _WORD
        self._memory = _memory(device, low, high)
        self._places = torch.tensor(
            [(address - low) // _WORD for address in addresses], dtype=torch.int64, device="cpu"
        ).to(device)
        is_partial = any(mask != -1 for mask in masks)
        self._mask = (
            torch.tensor(masks, dtype=torch.int64, device="cpu").to(device) if is_partial else None
        )
        self.owners = torch.tensor(owners, device="cpu")

    def read(self) -> torch.Tensor:
        words = self._memory.index_select(0, self._places)
        return words if self._mask is None else words.bitwise_and_(self._mask)


def _words_of(start: int, end: int, count: int) -> list[int]:
    """The addresses of words with bytes between these two, spread over them.

    A word that is not wholly between them is in the same page of memory: it can be read.
    """
    first, last = start // _WORD, (end - 1) // _WORD
    total = last - first + 1
    parts = min(count, total)
    found = []
    for part in range(parts):
        begin = total * part // parts
        room = total * (part + 1) // parts - begin
        found.append((first + begin + part * _SPREAD % room) * _WORD)
    return found


def _mask(address: int, start: int, end: int) -> int:
    """The bits of the word at `address` that lie between the other two; -1: all of them."""
    within = bytes(0xFF if start <= byte < end else 0 for byte in range(address, address + _WORD))
    return int.from_bytes(within, sys.byteorder, signed=True)


def _memory(device: torch.device, low: int, high: int) -> torch.Tensor:
    """All that lies between two addresses, as words."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * (high - low)).from_address(low), dtype=torch.int64)
    return torch.as_tensor(_Addresses(low, high), device=device)


class _Addresses:
    """As torch takes memory of CUDA and of ROCm that is not its own."""

    def __init__(self, low: int, high: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": ((high - low) // _WORD,),
            "typestr": "<i8",
            "data": (low, False),
            "version": 2,
        }
