"""Making every collective of an old generation raise, one way per backend."""

import fcntl
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from taskd.threads import start_thread

log = logging.getLogger(__name__)

_ABORT_S = 5.0  # then the thread that listens to the agent is needed elsewhere


def open_sockets() -> dict[int, str]:
    """Every socket of this process.

    Fd -> its kernel name ("socket:[inode]"), which tells a reused number apart.
    """
    found: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        name = _kernel_name(int(entry))
        # None: closed since the listing, the listing's own descriptor among them
        if name is not None and name.startswith("socket:"):
            found[int(entry)] = name
    return found


def _kernel_name(fd: int) -> str | None:
    """None: it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def without_scripts(sockets: dict[int, str], store: dict[int, str]) -> dict[int, str]:
    """Without those that Python objects have: another thread of the script has opened them.

    `store`: sockets of the store, to which a group may open more. They and what Python opens are
    closed on exec, what gloo opens is not: seldom must all objects be looked at (0.1 s for a
    million).
    """
    closed_on_exec = {fd for fd in sockets if _is_closed_on_exec(fd)}
    if not closed_on_exec:
        return sockets
    stores = {_peer(fd) for fd, name in store.items() if _kernel_name(fd) == name} - {None}
    doubtful = {fd for fd in closed_on_exec if _peer(fd) not in stores}
    if not doubtful:
        return sockets
    scripts = doubtful & _of_objects()
    return {fd: name for fd, name in sockets.items() if fd not in scripts}


def of_store(sockets: dict[int, str], port: int | None) -> dict[int, str]:
    """Of those that appeared while a store was reached: without those of the script.

    `port`: to which the store has connected meanwhile. If one of them alone leads there, it is the
    store's, and only others can be of the script.
    """
    there = {fd: name for fd, name in sockets.items() if _leads_to(fd, port)}
    return without_scripts(sockets, there if len(there) == 1 else {})


def _of_objects() -> set[int]:
    """The descriptors that Python's sockets and the connections of multiprocessing have."""
    kinds = (socket.socket, Connection)
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), kinds):
            kind = socket.socket if issubclass(type(each), socket.socket) else Connection
            with suppress(OSError, AttributeError):  # closed, or just being made
                found.add(kind.fileno(each))
    return found


def _is_closed_on_exec(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    except OSError:  # closed meanwhile
        return False


def _leads_to(fd: int, port: int | None) -> bool:
    peer = _peer(fd)
    return isinstance(peer, tuple) and peer[1] == port


def _peer(fd: int) -> Any:
    """Its address; None: there is none."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            return duplicate.getpeername() or None
    except OSError:
        return None


def shut_down_sockets(sockets: dict[int, str]) -> int:
    """Shut down those of `sockets` that are still the same, connected, TCP. Returns how many.

    Never a listening one: gloo's listener ends the process when its socket fails (torch 2.13), and
    NCCL corrupts its memory (2.28).
    """
    count = 0
    for fd, name in sorted(sockets.items()):
        try:
            if _kernel_name(fd) != name:
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if (
                    duplicate.family not in (socket.AF_INET, socket.AF_INET6)
                    or duplicate.type != socket.SOCK_STREAM
                ):
                    continue
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError as error:  # not connected any more, or closed meanwhile: nothing waits on it
            log.debug("socket %s was gone before its shutdown: %s", name, error)
    return count


def abort_backend(backend: Any) -> None:
    """Abort what runs on an accelerator. gloo's abort() does nothing in torch 2.13: see sockets."""
    name = type(backend).__name__
    if "Gloo" in name:
        return
    abort = getattr(backend, "abort", None)
    if abort is None:
        log.warning(
            "backend %s has no abort(): a collective that waits for a dead peer ends by "
            "its own timeout",
            name,
        )
        return
    abort()


def unwrapped(backend: Any) -> Any:
    """Without what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it, which aborts nothing."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def abort_groups(
    backends: Iterable[Any],
    sockets: dict[int, str],
    under_way: dict[int, threading.Thread],
) -> None:
    """Make every collective of the old generation raise.

    Called from the runtime thread, before the unwinding starts. `under_way`: by id of a backend,
    the thread that aborts it; one that takes long is left alone.
    """
    # All at once: one communicator may wait for what the device does for another (pytorch 119797).
    begun = []
    for backend in map(unwrapped, backends):
        if "Gloo" in type(backend).__name__ or _is_alive(under_way.get(id(backend))):
            continue
        thread = start_thread("taskd-abort", _abort, backend)
        under_way[id(backend)] = thread
        begun.append(thread)
    shut_down_sockets(sockets)
    deadline = time.monotonic() + _ABORT_S
    for thread in begun:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("a process group has not been aborted after %g s", _ABORT_S)


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _abort(backend: Any) -> None:
    try:
        abort_backend(backend)
    except RuntimeError as error:  # torch's own errors derive from it
        log.warning("abort of %s failed: %s", type(backend).__name__, error)
