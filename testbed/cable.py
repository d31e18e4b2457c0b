"""A bad cable: takes frames off one network interface, and puts them on another later, or never.

It stands in for what few kernels are built with (sch_netem, nftables): it needs packet sockets
alone, and counts what it does. A process of its own, started by `testbed.hosts`:

    python cable.py '{"near": "c0", "far": "d0", "delay_s": 0.2, "lost_out": 0.1, "lost_in": 0}'

`delay_s`: seconds that each frame is held, in either direction. `lost_out`, `lost_in`: which part
of the frames from near to far, and from far to near, is dropped. It says `ready`, answers each line
of its standard input by one JSON line of counts, and at the end of that input lets go what it holds
and ends.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque

# linux/if_packet.h
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_ROOM_BYTES = 1 << 26  # held by the kernel for us: it is to drop nothing that is not asked for
_FRAME_BYTES = 1 << 17  # the largest that segmentation offload makes is 64 KiB and its headers


def _open(interface: str) -> socket.socket:
    """Frames with their offload headers, so that checksums and segments stay as they are."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_BYTES)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.bind((interface, _ETH_P_ALL))
    end.setblocking(False)
    return end


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class Cable:
    """Two ends, and the frames that are on their way between them."""

    def __init__(
        self, near: str, far: str, *, delay_s: float, lost_out: float, lost_in: float
    ) -> None:
        self._near, self._far = _open(near), _open(far)
        self._delay_s = delay_s
        self._lost = {self._near: lost_out, self._far: lost_in}
        self._held: deque[tuple[float, socket.socket, bytes]] = deque()
        self._random = random.Random(4711)
        self.counts = {"passed_out": 0, "passed_in": 0, "lost_out": 0, "lost_in": 0}

    def run(self) -> None:
        """Until nobody asks any more."""
        poll = select.poll()
        for descriptor in (0, self._near.fileno(), self._far.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            wait_s = None if not self._held else max(0.0, self._held[0][0] - time.monotonic())
            ready = {number for number, _ in poll.poll(None if wait_s is None else wait_s * 1000)}
            for source, target, way in (
                (self._near, self._far, "out"),
                (self._far, self._near, "in"),
            ):
                if source.fileno() in ready:
                    self._take(source, target, way)
            self._let_go(time.monotonic())
            if 0 in ready:
                if not os.read(0, 64):
                    break
                _say(json.dumps(self.counts))
        self._let_go(float("inf"))

    def _take(self, source: socket.socket, target: socket.socket, way: str) -> None:
        due = time.monotonic() + self._delay_s
        while True:
            try:
                frame = source.recv(_FRAME_BYTES)
            except BlockingIOError:
                return
            if self._random.random() < self._lost[source]:
                self.counts[f"lost_{way}"] += 1
            else:
                self.counts[f"passed_{way}"] += 1
                self._held.append((due, target, frame))

    def _let_go(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            _, target, frame = self._held.popleft()
            target.send(frame)


if __name__ == "__main__":
    cable = Cable(**json.loads(sys.argv[1]))
    _say("ready")
    cable.run()
