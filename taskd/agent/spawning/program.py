"""The training script of a worker: understood from its command line, and run as `__main__`.

Owns what happens from the start of the script to the end of the process: what an interpreter would
do with `python -u script.py` or `python -u -m module`, with the runtime around it.
"""

import ctypes
import importlib.machinery
import os
import signal
import sys
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from taskd import streams

WORKER_ENV = "TASKD_WORKER"  # bootstrap as JSON, for a worker that starts as a fresh interpreter


@dataclass(frozen=True, slots=True)
class Program:
    """The command line, understood: a script file or a module, and its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


def parse(argv: tuple[str, ...]) -> Program | None:
    """Understand what torchrun builds; None for anything else."""
    rest = list(argv)
    if rest[:1] == ["-u"]:
        rest.pop(0)
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        return None
    return Program(rest[0], is_module, tuple(rest[1:]))


def folder_of(program: Program) -> str:
    """Where its own modules are."""
    return os.getcwd() if program.is_module else os.path.dirname(os.path.realpath(program.target))


def path_of(program: Program, search_path: tuple[str, ...]) -> list[str]:
    """`sys.path` when it begins; `search_path` is what is behind the folder of the script."""
    safe_path = getattr(sys.flags, "safe_path", False)
    return [*([] if safe_path else [folder_of(program)]), *search_path]


def prepare_forks() -> None:
    """Do what `run` would do in each fork of this process, as far as it can be done once."""
    groups = sys.modules.get("taskd.worker.process.groups")
    if groups is not None:
        groups.prepare_forks()


def run(program: Program, search_path: tuple[str, ...], worker: dict[str, Any] | None) -> NoReturn:
    """Run the program as `__main__` and end the process as an interpreter would."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing's name for it: what spawned children send back is looked up here
        sys.modules["__mp_main__"] = main
    sys.argv[:] = [program.target, *program.arguments]
    sys.path[:] = path_of(program, search_path)
    runtime = _start_runtime(worker)
    uncaught: BaseException | None = None
    try:
        if program.is_module:
            sys.argv[0] = "-m"
            import runpy  # noqa: PLC0415

            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]
        else:
            _run_script(program.target, main)
    except BaseException as error:  # noqa: BLE001
        uncaught = error
    # Reported outside the handler: a hook must not find this exception as the context of its own.
    code = 0
    if uncaught is not None:
        if runtime is not None and not isinstance(uncaught, SystemExit):
            runtime.on_uncaught(uncaught)
        code = _report(uncaught)
    if runtime is not None:
        runtime.on_exit()
    # As the interpreter ends: joins threads, runs atexit, flushes, takes modules down, exit(3).
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    raise AssertionError("unreachable")


def _start_runtime(worker: dict[str, Any] | None) -> Any:
    if worker is None:
        return None
    from taskd.worker.process import runtime  # noqa: PLC0415

    runtime.start(worker)
    return runtime


def _run_script(target: str, main: types.ModuleType) -> None:
    path = target
    if not os.path.isabs(path):
        path = f"{os.getcwd()}/{path}"
    with open(path, "rb") as file:
        source = file.read()
    main.__dict__.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _report(error: BaseException) -> int:
    """Print what the interpreter would print and give its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        streams.tell(f"{error.code}\n")
        return 1
    trace = _without_our_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as second:  # noqa: BLE001
        streams.tell("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, _without_our_frames(second))
        streams.tell("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        return _end_by_sigint()
    return 1


def _without_our_frames(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    BaseException.__setattr__(error, "__traceback__", trace)  # its class may be frozen
    return trace


def _end_by_sigint() -> int:
    """Arrange that this process ends by SIGINT, as an interpreter does that Ctrl-C ended.

    So its parent sees why. glibc's on_exit() calls raise(status, NULL) inside exit(status), and the
    status that is returned here is SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), None)
    return int(signal.SIGINT)
