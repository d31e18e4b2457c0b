"""Tries imports in a process that is thrown away.

Owns the rule, with its reasons: what a module must not do at its import if it is imported once, in
the parent of all workers. A worker could tell the difference, or could not be forked any more.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from taskd.agent.spawning import known, processes
from taskd.agent.spawning.protocol import packed
from taskd.imported import namespace

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection

_KNOWN = {*known.HARMLESS, *known.MENDED}
_IMPORT = "<frozen importlib._bootstrap>"  # the file of frames between two modules
_DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/kfd", "/dev/dri")


class Trial:
    """The child's side: imports, one by one, and says what each of them does.

    Messages: [position, None]: it begins; [position, reason]: this one is to be left out, and the
    process ends; [count, None]: all are through.
    """

    def __init__(self, connection: socket.socket, hidden: Collection[str], own: Own) -> None:
        """`hidden`: variables that each worker has for itself, or differently from this process."""
        self._connection = connection
        self._hidden = hidden
        self._own = own
        self._position = 0

    def run(self, names: list[str]) -> NoReturn:
        """Never returns; the process ends at the first that is to be left out."""
        self._watch()
        gc.freeze()  # garbage from before closes no descriptor that an import is blamed for
        before = _State()
        for self._position, name in enumerate(names):
            self._say(self._position, None)
            loaded = set(sys.modules)
            with suppress(BaseException):  # what cannot be imported alone is no harm
                importlib.import_module(name)
            for new in sys.modules.keys() - loaded:
                if self._own.has(namespace(sys.modules[new]).get("__file__")):
                    self._refuse(f"imports {new} of the script's own folder")
            reason = _State().difference(before)
            if reason is not None:
                self._refuse(reason)
        self._say(len(names), None)
        os._exit(0)

    def _say(self, position: int, reason: str | None) -> None:
        self._connection.send(packed([position, reason]))

    def _refuse(self, reason: str) -> NoReturn:
        self._say(self._position, reason)
        os._exit(0)

    def _refuse_unknown(self, reason: str) -> None:
        """Unless the module that is being imported is known to be harmless."""
        frame = sys._getframe(1)  # noqa: SLF001
        while frame is not None and frame.f_code.co_filename != _IMPORT:
            if frame.f_globals.get("__name__") in _KNOWN:
                return
            frame = frame.f_back  # type: ignore[assignment]
        self._refuse(reason)

    def _watch(self) -> None:
        """What leaves no trace is seen as it happens."""
        kind: Any = type(os.environ)
        get, iterate = kind.__getitem__, kind.__iter__

        def get_watched(environment: Any, name: Any) -> Any:
            if os.fsdecode(name) in self._hidden:
                self._refuse_unknown(f"reads {os.fsdecode(name)}")
            return get(environment, name)

        def iterate_watched(environment: Any) -> Any:
            self._refuse_unknown("reads the whole environment")
            return iterate(environment)

        kind.__getitem__, kind.__iter__ = get_watched, iterate_watched
        seed = random.Random.seed

        def seed_watched(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self._refuse("makes a random generator of its own")
            seed(generator, a, version)

        random.Random.seed = seed_watched  # type: ignore[assignment,method-assign]
        draw = os.urandom

        def draw_watched(count: int) -> bytes:
            self._refuse_unknown("draws random bytes")
            return draw(count)

        os.urandom = random._urandom = draw_watched  # type: ignore[attr-defined]  # noqa: SLF001


def change_of_torch(name: str) -> str | None:
    """Import it, and say whether that has replaced functions or classes of torch.

    For a process that is thrown away, too: of a module that is left out.
    """
    before = _functions_of_torch()
    with suppress(BaseException):
        importlib.import_module(name)
    after = _functions_of_torch()
    changed = (where for where in before if after.get(where) is not before[where])
    return next((f"changes {where}" for where in changed), None)


def _functions_of_torch() -> dict[str, Any]:
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch"
        for attribute, value in list(namespace(module).items())
        if callable(value)
    }


class Own:
    """Which files are the script's own: those in its folder, but no installed package there."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder) + os.sep

    def has(self, path: str | None) -> bool:
        """Whether this file is."""
        if path is None:
            return False
        path = os.path.realpath(path)
        inside = path.removeprefix(self._folder)
        return inside != path and not {"site-packages", "dist-packages"} & set(inside.split(os.sep))


class _State:
    """What an import may have changed in this process."""

    def __init__(self) -> None:
        self.threads = processes.settle_threads()
        self.descriptors = {(number, _target(number)) for number in processes.open_descriptors()}
        self.handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        self.masks = _signal_masks()
        self.environment = dict(os.environ._data)  # type: ignore[attr-defined]  # noqa: SLF001
        self.path, self.directory = list(sys.path), os.readlink("/proc/self/cwd")
        self.randoms = _random_states()
        self.has_children = _has_children()

    def difference(self, before: _State) -> str | None:
        """What is to be said against it; None: nothing."""
        if self.threads > before.threads:
            count = self.threads - before.threads
            return f"starts {count} thread{'s' if count > 1 else ''}"
        if self.descriptors != before.descriptors:
            return _opened([target for _, target in self.descriptors - before.descriptors])
        if any(self.randoms[name] != state for name, state in before.randoms.items()):
            return "draws random numbers"
        for attribute, reason in _REASONS.items():
            if getattr(self, attribute) != getattr(before, attribute):
                return reason
        return None


_REASONS = {
    "handlers": "changes signal handlers",
    "masks": "changes signal handlers",
    "environment": "changes the environment",
    "path": "changes sys.path",
    "directory": "changes the working directory",
    "has_children": "starts a process",
}


def _opened(targets: list[str]) -> str:
    for target in targets:
        if target.startswith(_DEVICES):
            return f"opens {target}"
    if any(target.startswith("socket:") for target in targets):
        return "opens a socket"
    return f"opens {targets[0]}" if targets else "closes a descriptor"


def _target(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _signal_masks() -> list[str]:
    """Ignored and caught ones, those of native code included."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return [line for line in file if line.startswith(("SigIgn:", "SigCgt:", "SigBlk:"))]


def _random_states() -> dict[str, Any]:
    """Of the generators that scripts seed, where their library is loaded."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        name, key, *rest = numpy_random.get_state()
        states["numpy"] = (name, key.tobytes(), rest)
    if torch is not None:
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return states


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
