"""Bytes and tensors between two ranks of the default process group.

Small tensors are packed together, large ones go from and to their own memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from taskd.worker.objects.memory import overwrite

if TYPE_CHECKING:
    from taskd.worker.restore.manifest import Meta

# large enough for any link, small enough to hold two beside a full model
_CHUNK_BYTES = 32 * 1024 * 1024
# below this a tensor shares a chunk with its neighbours: one message costs about 50 us
_PACKED_BYTES = 1024 * 1024
_IN_FLIGHT = 2


def send_bytes(data: bytes, peer: int, device: torch.device) -> None:
    """Send the length, then the bytes. `device`: where the group's backend wants them."""
    dist.send(torch.tensor([len(data)], dtype=torch.int64, device=device), peer)
    if data:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), peer)


def receive_bytes(peer: int, device: torch.device) -> bytes:
    """Opposite of `send_bytes`."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, peer)
    if not length.item():
        return b""
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(data, peer)
    host = data.cpu()
    # not bytes(storage), which asks Python for each byte: 1.5 s for one MB
    return ctypes.string_at(host.data_ptr(), host.numel())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's content as a flat byte tensor: a view if it is laid out so, else a copy."""
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # the stride of a single element may be any
    return plain.as_strided(plain.shape, (1,)).view(torch.uint8)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether its content is its memory, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _chunks(sizes: list[int]) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of these byte sizes into messages: lists of (tensor, first byte, last byte + 1).

    Both ends compute the same.
    """
    chunks: list[list[tuple[int, int, int]]] = []
    packed: list[tuple[int, int, int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size >= _PACKED_BYTES:
            chunks += [
                [(index, start, min(start + _CHUNK_BYTES, size))]
                for start in range(0, size, _CHUNK_BYTES)
            ]
        elif size:
            if filled + size > _CHUNK_BYTES:
                chunks.append(packed)
                packed, filled = [], 0
            packed.append((index, 0, size))
            filled += size
    return [*chunks, packed] if packed else chunks


def send_tensors(tensors: list[torch.Tensor], receiver: int, device: torch.device) -> None:
    """Send the bytes of `tensors`, cut into chunks."""
    in_flight: deque[tuple[Any, torch.Tensor]] = deque()
    for chunk in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        pieces = [_flat_bytes(tensors[index])[start:end].to(device) for index, start, end in chunk]
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        in_flight.append((dist.isend(data, receiver), data))
        if len(in_flight) >= _IN_FLIGHT:
            in_flight.popleft()[0].wait()
    while in_flight:
        in_flight.popleft()[0].wait()


def receive_tensors(
    metas: list[Meta], targets: list[torch.Tensor], source: int, device: torch.device
) -> None:
    """Receive the bytes of tensors as `metas` describes them into `targets`."""
    in_flight: deque[tuple[Any, torch.Tensor, list[tuple[int, int, int]]]] = deque()
    # large tensors that are not contiguous, or not where the wire is
    staged: dict[int, torch.Tensor] = {}

    def arrive() -> None:
        work, data, chunk = in_flight.popleft()
        work.wait()
        offset = 0
        for index, start, end in chunk:
            _put(targets[index], staged, index, (start, end), data[offset : offset + end - start])
            offset += end - start

    sizes = [meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in metas]
    for chunk in _chunks(sizes):
        in_flight.append(_post(targets, chunk, source, device))
        if len(in_flight) >= _IN_FLIGHT:
            arrive()
    while in_flight:
        arrive()


def _post(
    targets: list[torch.Tensor],
    chunk: list[tuple[int, int, int]],
    source: int,
    device: torch.device,
) -> tuple[Any, torch.Tensor, list[tuple[int, int, int]]]:
    """Start receiving a chunk, into the target itself if that is contiguous."""
    index, start, end = chunk[0]
    target = targets[index]
    if len(chunk) == 1 and _is_flat(target) and target.device == device:
        data = _flat_bytes(target)[start:end]
    else:
        data = torch.empty(
            sum(end - start for _, start, end in chunk), dtype=torch.uint8, device=device
        )
    return dist.irecv(data, source), data, chunk


def _put(
    target: torch.Tensor,
    staged: dict[int, torch.Tensor],
    index: int,
    span: tuple[int, int],
    data: torch.Tensor,
) -> None:
    """Put received bytes `span` of tensor `index` in place."""
    start, end = span
    size = target.numel() * target.element_size()
    if _is_flat(target):
        place = _flat_bytes(target)[start:end]
        if place.data_ptr() != data.data_ptr():
            place.copy_(data)
        return
    whole = staged.get(index)
    if whole is None:
        whole = staged[index] = torch.empty(size, dtype=torch.uint8, device=target.device)
    whole[start:end].copy_(data)
    if end == size:
        overwrite(target, staged.pop(index).view(target.dtype).view(target.shape))
