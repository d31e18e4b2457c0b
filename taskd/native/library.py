"""Finds libtaskd and its binding, checks that they fit, and says once if they do not.

Knows nothing of what they do.
"""

import logging
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from taskd.config.names import NATIVE_ENV
from taskd.config.native import is_native_off
from taskd.errors import NativeLibraryError

logger = logging.getLogger(__name__)

LIBRARY_PATH = Path(__file__).parent.parent / "python" / "cython_api" / "libs" / "libtaskd.so"

_WITHOUT = (
    "going on without the death alarm: a death is noticed when its pidfd says so, 0.1 s and "
    "more later per GB"
)


class Binding(Protocol):
    """What a binding module offers; see csrc/include/taskd.h.

    The calls raise `NativeLibraryError`.
    """

    BUILT_FOR_ABI: int

    def abi_version(self) -> int: ...  # noqa: D102
    def layout_value(self, name: str) -> int: ...  # noqa: D102
    def guard_start(self, box_fd: int, life_fd: int) -> None: ...  # noqa: D102
    def watch(self, box_fd: int, token: int, pipe_fd: int) -> None: ...  # noqa: D102
    def unwatch(self, box_fd: int) -> None: ...  # noqa: D102
    def prefer_soon(self) -> None: ...  # noqa: D102
    def waits_hook(self, library: str) -> None: ...  # noqa: D102
    def waits_expire(self, tids: list[int]) -> int: ...  # noqa: D102
    def waits_forgive(self, tids: list[int]) -> None: ...  # noqa: D102
    def is_preloaded(self) -> bool: ...  # noqa: D102
    def last_words_start(self, box_fd: int, stacks_signal: int) -> int: ...  # noqa: D102
    def last_words_python(self, all_threads_signal: int, one_thread_signal: int) -> None: ...  # noqa: D102
    def collectives_start(self, box_fd: int) -> None: ...  # noqa: D102
    def collectives_reset(self) -> None: ...  # noqa: D102
    def collectives_see(self, communicator: int, name: str, entered: int, left: int) -> None: ...  # noqa: D102
    def collectives_add(  # noqa: D102
        self, communicator: int, name: str, number: int, size: int, enter_ns: int, leave_ns: int
    ) -> None: ...
    def collectives_forget(self, communicator: int) -> None: ...  # noqa: D102
    def names_numeric(self, library: str) -> None: ...  # noqa: D102
    def copy_checksummed(self, destination: int, source: int, count: int) -> int: ...  # noqa: D102
    def checksum(self, source: int, count: int) -> int: ...  # noqa: D102


def _import_binding() -> tuple[Binding | None, str]:
    """The compiled binding, else the one through ctypes, else None and the reason."""
    reason = ""
    for name in ("taskd.native._binding", "taskd.native._ctypes_binding"):
        try:
            return cast("Binding", import_module(name)), ""
        except ImportError as error:
            reason = str(error)
    return None, reason


def export_line() -> str:
    """What a shell must run so that the programs that it starts have libtaskd preloaded.

    Raises:
        NativeLibraryError: there is no library, or the dynamic linker could not read its path in
            LD_PRELOAD.
    """
    path = str(LIBRARY_PATH)
    if not LIBRARY_PATH.exists():
        raise NativeLibraryError(f"there is no {path}: install taskd with a C compiler")
    if re.search(r"[\s:;$]", path):
        raise NativeLibraryError(
            f"{path} cannot be preloaded: its path has a space, a colon or a dollar sign in it"
        )
    return f'export LD_PRELOAD="${{LD_PRELOAD:+$LD_PRELOAD:}}"{shlex.quote(path)}'


@cache
def require_preloaded(feature: str) -> bool:
    """Whether libtaskd was preloaded into this process.

    If not, says once what does not work and what to do.
    """
    binding = load()
    if binding is not None and binding.is_preloaded():
        return True
    try:
        advice = f"Run `{export_line()}` before torchrun."
    except NativeLibraryError as error:
        advice = f"It cannot be: {error}."
    logger.error("the libtaskd.so has not been loaded: %s does not work. %s", feature, advice)
    return False


def load() -> Binding | None:
    """The loaded library, or None: then `tell_absence` says why."""
    return find()[0]


def tell_absence() -> None:
    """Say in the log why there is no libtaskd, if there is none.

    For an agent, whose log is set up only when much has asked for the library already.
    """
    binding, reason = find()
    if reason:
        logger.warning("libtaskd could not be loaded (%s); %s", reason, _WITHOUT)
    elif binding is None:
        logger.info("libtaskd is switched off by %s; %s", NATIVE_ENV, _WITHOUT)


@cache
def find() -> tuple[Binding | None, str]:
    """The library, or None and the reason, if it is not switched off."""
    if is_native_off():
        return None, ""
    binding, reason = _import_binding()
    if binding is None:
        return None, reason
    found, wanted = binding.abi_version(), binding.BUILT_FOR_ABI
    if found != wanted:
        return None, (
            f"its ABI version is {found}, {wanted} is needed: a preloaded copy of another version?"
        )
    return binding, ""
