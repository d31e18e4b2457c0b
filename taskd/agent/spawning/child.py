"""How a forked copy of the warm process becomes the process of a worker.

Owns what happens between fork() and the start of the training script (`program`): descriptors,
signals, streams, environment, libraries.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from taskd.agent.spawning import libraries, processes, program

if TYPE_CHECKING:
    from taskd.agent.spawning.protocol import SpawnRequest

_SIGNALS_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # what an interpreter ignores from its start


def become(
    request: SpawnRequest, search_path: tuple[str, ...], blas: dict[str, int], *, warm: bool
) -> NoReturn:
    """Turn this freshly forked process into the worker. Never returns.

    Args:
        request: what it is to become; its descriptors are open in this process.
        search_path: `sys.path` behind the entry of the script's own directory.
        blas: what `libraries.quiet_blas` gave.
        warm: keep this interpreter; else a fresh one is executed.
    """
    keep_only(tuple(request.fds.values()))
    _restore_signals(request)
    for path, target in ((request.stdout, 1), (request.stderr, 2)):
        if path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, target)
            os.close(descriptor)
    if request.cwd is not None:
        os.chdir(request.cwd)
    worker = request.bootstrap()
    if not warm:
        _execute(request, worker)
    os.environ.clear()
    os.environ.update(request.env)
    script = program.parse(request.argv)
    assert script is not None  # why_not_warm said so
    processes.set_title([sys.executable, *request.argv])
    sys.orig_argv[:] = [sys.executable, *request.argv]
    fresh_streams()
    libraries.refresh(request.env, blas)
    libraries.skip_inherited_destructors()
    program.run(script, search_path, worker)


def _execute(request: SpawnRequest, worker: dict[str, Any] | None) -> NoReturn:
    environment = dict(request.env)
    if worker is not None:
        environment[program.WORKER_ENV] = json.dumps({**worker, "pid": os.getpid()})
    for descriptor in request.fds.values():
        os.set_inheritable(descriptor, True)
    command = [*request.prefix, sys.executable, *request.argv]
    os.execvpe(command[0], command, environment)


def keep_only(wanted: tuple[int, ...]) -> None:
    """Close every descriptor above 2 but these.

    By their numbers, which are given out again: garbage that was inherited with one of them is
    kept, since to collect it would close what has that number by then.
    """
    gc.freeze()
    for descriptor in processes.open_descriptors():
        if descriptor > 2 and descriptor not in wanted:
            with suppress(OSError):
                os.close(descriptor)


def _restore_signals(request: SpawnRequest) -> None:
    """As execve and the start of an interpreter leave them.

    Handlers gone, what torchrun ignores and blocks ignored and blocked.
    """
    signal.set_wakeup_fd(-1)
    faulthandler = sys.modules.get("faulthandler")
    if faulthandler is not None and not os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.disable()  # torchrun turns it on for itself
    ignored = {*request.ignored, *_SIGNALS_OF_PYTHON}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        former = signal.getsignal(number)
        wanted = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if former is not None and former != wanted:
            signal.signal(number, wanted)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def fresh_streams() -> None:
    """Make stdin buffered, stdout and stderr as `-u` makes them.

    Encodings as this interpreter chose them.
    """
    for name, descriptor, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        previous = getattr(sys, f"__{name}__")
        stream = (
            None
            if previous is None
            else _stream(name, descriptor, mode, previous.encoding, previous.errors)
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(
    name: str, descriptor: int, mode: str, encoding: str, errors: str
) -> io.TextIOWrapper | None:
    try:
        binary = open(descriptor, mode, buffering=-1 if mode == "rb" else 0, closefd=False)  # noqa: SIM115
    except OSError:
        return None  # closed by whoever started torchrun
    raw = getattr(binary, "raw", binary)
    raw.name = f"<{name}>"  # type: ignore[misc]
    is_output = mode == "wb"
    text = io.TextIOWrapper(
        binary,
        encoding=encoding,
        errors=errors,
        newline="\n" if is_output else None,
        line_buffering=False,
        write_through=True,
    )
    text.mode = mode[0]  # type: ignore[misc]
    return text
