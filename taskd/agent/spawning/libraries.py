"""The libraries of a warm process, made quiet before its forks and fresh in each of them.

Imports neither torch nor numpy: it looks at what is already loaded.
"""

import atexit
import ctypes
import gc
import importlib
import logging
import os
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from taskd.agent.spawning import known

log = logging.getLogger(__name__)

# What torch imports lazily at the first optimizer, DDP or FSDP: without it a recovery took 2.4 s
# instead of 0.3 s.
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",  # of worker/objects/shards.py: 0.1 s of a recovery
    "torch.utils.data",
    # What each worker imports of ours: 50 ms of a recovery.
    "taskd.worker.process.runtime",
    "taskd.worker.recoverable",
    "taskd.worker.restore.parking",
    "taskd.worker.train_state",
    "taskd.worker.state.phases",
)
_BLAS_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)
_BLAS_PREFIXES = ("OPENBLAS", "GOTO")  # of its own variable; the second one is older


# What torchrun sets for each worker. A pod may have variables of these names, with other values.
OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def preload(extra: Iterable[str]) -> None:
    """Import what workers need, and `extra` modules. One that fails costs a log line.

    None finds a rank in the environment, from now on: those that follow get their own.
    """
    for name in OF_A_WORKER:
        os.environ.pop(name, None)
    with _uncollected():
        for name in PRELOAD:
            _import(name)
    for name in extra:
        _import(name)
    warm_optimizers()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001
        if name != "numpy":
            log.warning(
                "the forkserver could not preload %s: %s: %s", name, type(error).__name__, error
            )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nearly all that imports make stays: to look for garbage in it again and again takes 0.5 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def warm_optimizers() -> None:
    """Take the first step of the usual optimizers.

    What they import lazily, workers find imported.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with _without_devices():
        for name in ("SGD", "Adam", "AdamW"):
            parameter = torch.nn.Parameter(torch.zeros(2, device="cpu"))
            parameter.grad = torch.zeros(2, device="cpu")
            getattr(torch.optim, name)([parameter], lr=0.1).step()


@contextmanager
def _without_devices() -> Iterator[None]:
    """Torch finds none. To look for one opens it, and Adam does so at each step.

    A process that has opened a device must not be forked.
    """
    torch = sys.modules["torch"]
    askers: list[Any] = [
        getattr(torch, name)
        for name in ("accelerator", "cuda", "npu", "xpu")
        if hasattr(torch, name)
    ]
    before = {asker: asker.is_available for asker in askers if hasattr(asker, "is_available")}
    for asker in before:
        asker.is_available = lambda: False
    try:
        yield
    finally:
        for asker, original in before.items():
            asker.is_available = original


def refresh(environment: dict[str, str], blas: dict[str, int]) -> None:
    """Give this fork a rank and random states of its own, and thread pools of the right size."""
    known.mend(environment)
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    _size_pools(environment, blas)
    finalizers = sys.modules.get("multiprocessing.util")
    if finalizers is not None:
        finalizers._finalizer_registry.clear()


def _size_pools(environment: dict[str, str], blas: dict[str, int]) -> None:
    """Give libraries the number of threads that they would read in a fresh interpreter.

    OMP_NUM_THREADS, which torchrun sets to 1 where nobody has set it, unless one of their own
    precedes it. Those were the same when the warm process loaded them (`warmth`).
    """
    threads = _count(environment, "OMP_NUM_THREADS")
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        is_of_mkl = torch.backends.mkl.is_available() and _count(environment, "MKL_NUM_THREADS")
        if not is_of_mkl and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    if any(_count(environment, f"{name}_NUM_THREADS") for name in _BLAS_PREFIXES):
        threads = None
    for library, usual in blas.items():
        if (threads or usual) > 1:
            _blas_call(library, "set", threads or usual)


def _count(environment: dict[str, str], name: str) -> int | None:
    """A number of threads; None where libraries look further: there is none, or it is no number."""
    value = environment.get(name, "").strip()
    return int(value) if value.isdecimal() and int(value) > 0 else None


def free_what_is_counted() -> None:
    """Let each fork of this warm process end without a word about objects that it has frozen.

    nanobind, in the triton of torch 2.15, counts what was not freed at the end of the interpreter,
    and prints it. Freed, the end takes 0.8 s of a core more, as in a fresh interpreter.

    A fork would copy the pages of all modules to look at them: 2,000, a twentieth of a recovery.
    """
    is_counted = any(
        type(value).__module__ == "nanobind"
        for name, module in list(sys.modules.items())
        if name.startswith("triton._C")
        for value in list(vars(module).values())
    )
    if is_counted:
        atexit.register(gc.unfreeze)


def keep_operators() -> None:
    """Let no fork of this warm process take the operators of torch.library down at its end.

    There are 174 in torch 2.13; a fork copies 6,000 pages for that, 0.04 s of a processor.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.detach()


def skip_inherited_destructors() -> None:
    """Let exit() end after the handlers of what this worker itself has loaded.

    The static destructors of torch free memory that is shared with the forkserver, page by page:
    0.2 s per worker for nothing. Handlers run last in, first out: these, which flush C streams and
    end the process, run between the worker's own and the inherited ones.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # _exit(status, NULL)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)  # fflush(NULL)


def quiet_blas() -> dict[str, int]:
    """Set numpy's OpenBLAS to one thread, so that no worker begins with a pool.

    Called in the forkserver; `refresh` gives each worker the number that is its own.

    Returns:
        By library: how many threads it had, as it read the environment when it was loaded.
    """
    if "numpy" not in sys.modules:
        return {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line}
    found = {path: _blas_call(path, "get") for path in sorted(paths)}
    for path in found:
        _blas_call(path, "set", 1)
    return {path: threads for path, threads in found.items() if threads is not None}


def _blas_call(path: str, verb: str, *arguments: int) -> int | None:
    with suppress(OSError):
        library = ctypes.CDLL(path)
        for name in _BLAS_NAMES:
            if hasattr(library, name.format(verb)):
                return int(getattr(library, name.format(verb))(*arguments))
    return None
