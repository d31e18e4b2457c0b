"""The way to the store at which the ranks of a recovery meet, which its host may not survive.

torch connects in C++: it tries again and again for the timeout of the group, half an hour by
default, and no signal and no shutdown of a socket ends that. So its own connect comes only once one
from here has been answered, and has little time; what waits is Python, and asks whether it still is
to wait. Knows nothing of groups and generations.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Between two looks at whether to go on: most of what an abort waits for.
_LOOK_S = 0.05
# Between two tries where nobody listens: the store may be just opening.
_AGAIN_S = 0.1
# For torch's own connect, to a port that has just answered. If there are so many clients that it
# takes longer, the next try has twice that.
_FIRST_S = 5.0


def reach(
    create: Callable[[timedelta], Any],
    host: str,
    port: int,
    timeout: timedelta,
    is_over: Callable[[], bool],
) -> Any:
    """The store that `create` returns for a timeout, within this one, which it has afterwards.

    Raises what torch raises, also where `is_over` says that nobody waits for it any more.
    """
    until = time.monotonic() + timeout.total_seconds()
    patience_s = _FIRST_S
    while True:
        _await(host, port, until, is_over)
        left_s = max(_LOOK_S, until - time.monotonic())
        try:
            store = create(timedelta(seconds=min(left_s, patience_s)))
        except RuntimeError:  # torch's errors of stores and networks are some
            if is_over() or left_s <= patience_s:
                raise
            patience_s *= 2
            continue
        store.set_timeout(timeout)
        return store


def _await(host: str, port: int, until: float, is_over: Callable[[], bool]) -> None:
    """Until somebody accepts a connection there."""
    from torch.distributed import DistNetworkError  # noqa: PLC0415

    while not _answers(host, port, until, is_over):
        if is_over():
            raise DistNetworkError(
                f"the way to the store at {host}:{port} was left: a recovery has begun"
            )
        if time.monotonic() >= until:
            raise DistNetworkError(f"timed out: nobody has answered at the store {host}:{port}")
        time.sleep(_AGAIN_S)


def _answers(host: str, port: int, until: float, is_over: Callable[[], bool]) -> bool:
    """Whether one of the host's addresses answers; each is tried, all at the same time."""
    with ExitStack() as sockets:
        trying: dict[int, socket.socket] = {}
        poll = select.poll()
        for family, kind, protocol, _, address in _addresses(host, port):
            try:
                probe = sockets.enter_context(socket.socket(family, kind, protocol))
            except OSError:  # this machine has no such family
                continue
            probe.setblocking(False)
            if probe.connect_ex(address) in (0, errno.EINPROGRESS):
                trying[probe.fileno()] = probe
                poll.register(probe, select.POLLOUT)
        while trying and not is_over() and time.monotonic() < until:
            for number, _ in poll.poll(_LOOK_S * 1000):
                if trying[number].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    return True
                poll.unregister(trying.pop(number))
    return False


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # the name means nothing at the moment
        return []
