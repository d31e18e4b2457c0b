"""Reading tensors of an accelerator into host memory without stopping the computation.

A stream of its own waits for what the training stream had been given at the commit, then copies
into two pinned buffers in turn: while one is being filled, the other is read by the caller. Knows
neither arenas nor when a copy is due.
"""

from collections.abc import Iterator
from typing import Any

import torch


class Staging:
    """Of one device, used by one thread. `piece_bytes` is the size of each of the two buffers."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._module: Any = torch.get_device_module(device)
        self._piece_bytes = piece_bytes
        self._stream = (
            self._module.Stream() if device.type == "cpu" else self._module.Stream(device)
        )
        is_pinned = device.type != "cpu"
        self._buffers = [
            torch.empty(piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            for _ in range(2)
        ]
        self._events = [self._module.Event() for _ in range(2)]

    def follow(self, event: Any) -> None:
        """Copies from here on begin when `event` of another stream has happened."""
        self._stream.wait_event(event)

    def pieces(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Address and length of the tensor's bytes, in order.

        What is at an address holds until the next piece is asked for.
        """
        with self._module.stream(self._stream):
            flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        count = flat.numel()
        starts = range(0, count, self._piece_bytes)
        for number, start in enumerate(starts):
            if number == 0:
                self._fetch(flat, 0, 0)
            if start + self._piece_bytes < count:
                self._fetch(flat, start + self._piece_bytes, (number + 1) % 2)
            self._events[number % 2].synchronize()
            yield self._buffers[number % 2].data_ptr(), min(self._piece_bytes, count - start)

    def _fetch(self, flat: torch.Tensor, start: int, buffer: int) -> None:
        piece = flat[start : start + self._piece_bytes]
        with self._module.stream(self._stream):
            self._buffers[buffer][: piece.numel()].copy_(piece, non_blocking=True)
            self._events[buffer].record(self._stream)


def mark(device: torch.device) -> Any:
    """An event on the stream that trains, for `Staging.follow`.

    What has been asked of the device up to now.
    """
    return torch.get_device_module(device).current_stream(device).record_event()
