"""Child side of the forkserver.

How a forked copy of a warm interpreter becomes `python -u script.py`.

Owns what happens between fork() and the end of the training script. Imports neither torch nor
numpy: it looks at what is already loaded. The rule: what a script can observe is what a fresh
interpreter would show it, or a fresh interpreter is started instead (`why_not_warm` gives the
reason).
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import signal
import sys
import types
import zipimport
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from taskd.agent import processes

if TYPE_CHECKING:
    from taskd.agent.spawn_protocol import SpawnRequest

WORKER_ENV = "TASKD_WORKER"  # bootstrap as JSON, for a worker that starts as a fresh interpreter
_SIGNALS_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # what an interpreter ignores from its start
# Variables that an interpreter or a library reads once, when it starts: a warm process has already
# read them.
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "TORCH",
    "PYTORCH_",
)
# ... except those that torchrun itself writes for each worker, which are read later, and the one
# applied by hand below.
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM_THREADS")
_BLAS_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the forkserver knew of itself before it loaded anything."""

    search_path: tuple[str, ...]  # sys.path without the entry of the launcher's own script
    environment: dict[str, str]  # as execve handed it over


@dataclass(frozen=True, slots=True)
class Program:
    """The command line, understood: a script file or a module, and its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


def initial_environment() -> dict[str, str]:
    """The environment as it was when this process was executed."""
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}


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


def why_not_warm(request: SpawnRequest, baseline: Baseline) -> str | None:
    """The reason why this worker needs a fresh interpreter, or None if a fork of this one will look the same."""
    if request.kind != "python":
        return "asked for"
    program = parse(request.argv)
    if program is None:
        return "the command line is not a script or a module"
    path = os.path.join(request.cwd or "", program.target)
    problem = _program_problem(request, program, path)
    if problem is not None:
        return problem
    for name in sorted(set(baseline.environment) | set(request.env)):
        if (
            name.startswith(_READ_AT_START)
            and not name.startswith(_READ_LATER)
            and baseline.environment.get(name) != request.env.get(name)
        ):
            return f"{name} differs from what the warm process was started with"
    if request.env.get("PYTHONINSPECT"):
        return "PYTHONINSPECT is set"
    directory = (
        (request.cwd or ".") if program.is_module else os.path.dirname(os.path.realpath(path))
    )
    shadowed = _shadowed(directory)
    return (
        (f"{directory} has its own {shadowed}, which is already loaded from elsewhere")
        if shadowed
        else None
    )


def _program_problem(request: SpawnRequest, program: Program, path: str) -> str | None:
    has_directory = processes.has_directory() if request.cwd is None else os.path.isdir(request.cwd)
    if not has_directory and not os.path.isabs(program.target):
        return "the working directory was removed"
    return None if program.is_module else _script_problem(path)


def _script_problem(path: str) -> str | None:
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return f"the script {path} is not a readable file"
    with open(path, "rb") as file:
        if file.read(4) == importlib.util.MAGIC_NUMBER or path.endswith(".pyc"):
            return "the script is compiled"
    with suppress(zipimport.ZipImportError):
        zipimport.zipimporter(path)
        return "the script is an archive"
    return None


def _shadowed(directory: str) -> str | None:
    """A module beside the script that a fresh interpreter would have found first, were it not loaded from elsewhere."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    here = os.path.realpath(directory)
    for entry in os.listdir(directory):
        stem = entry.partition(".")[0]
        module = sys.modules.get(stem)
        if module is None or stem in sys.builtin_module_names or stem == "__main__":
            continue
        if not entry.endswith(suffixes) and not os.path.isfile(
            os.path.join(directory, entry, "__init__.py")
        ):
            continue
        origin = getattr(module, "__file__", None)
        if origin is None or not os.path.realpath(origin).startswith(here + os.sep):
            return stem
    return None


# ---------------------------------------------------------------- in the child


def become(
    request: SpawnRequest, baseline: Baseline, blas: dict[str, int], *, warm: bool
) -> NoReturn:
    """Turn this freshly forked process into the worker. Never returns.

    `blas`: what `quiet_blas` gave.
    """
    _keep_only(tuple(request.fds.values()))
    _restore_signals(request)
    for path, target in ((request.stdout, 1), (request.stderr, 2)):
        if path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, target)
            os.close(descriptor)
    if request.cwd is not None:
        os.chdir(request.cwd)
    worker = (
        None
        if request.worker is None
        else {
            **request.worker,
            "previous_fd": None,
            **{f"{name}_fd": number for name, number in request.fds.items()},
        }
    )
    if not warm:
        _execute(request, worker)
    os.environ.clear()
    os.environ.update(request.env)
    program = parse(request.argv)
    assert program is not None  # why_not_warm said so
    processes.set_title([sys.executable, *request.argv])
    sys.orig_argv[:] = [sys.executable, *request.argv]
    _fresh_streams()
    _fresh_libraries(request.env, blas)
    _skip_inherited_destructors()
    run(program, baseline, worker)


def _execute(request: SpawnRequest, worker: dict[str, Any] | None) -> NoReturn:
    environment = dict(request.env)
    if worker is not None:
        environment[WORKER_ENV] = json.dumps({**worker, "pid": os.getpid()})
    for descriptor in request.fds.values():
        os.set_inheritable(descriptor, True)
    os.execve(sys.executable, [sys.executable, *request.argv], environment)


def _keep_only(wanted: tuple[int, ...]) -> None:
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


def _fresh_streams() -> None:
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


def _fresh_libraries(environment: dict[str, str], blas: dict[str, int]) -> None:
    """Random states of a new process, and thread pools of the size that the environment asks for."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    wanted = environment.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None
    if torch is not None and threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    for library, usual in blas.items():
        if (threads or usual) > 1:
            _blas_call(library, "set", threads or usual)
    finalizers = sys.modules.get("multiprocessing.util")
    if finalizers is not None:
        finalizers._finalizer_registry.clear()


def _skip_inherited_destructors() -> None:
    """End exit() after the handlers of what this worker itself has loaded, and the flush of C streams.

    The static destructors of torch free memory that is shared with the forkserver, page by page:
    0.2 s per worker for nothing. Handlers run last in, first out: these stand between the worker's
    own and the inherited ones.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # _exit(status, NULL)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)  # fflush(NULL)


def quiet_blas() -> dict[str, int]:
    """Set numpy's OpenBLAS to one thread, so that no worker begins with a pool.

    Returns what each library had.

    It read OMP_NUM_THREADS when it was loaded. Called in the forkserver; workers get the number
    that is theirs.
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


# ---------------------------------------------------------------- running the script


def run(program: Program, baseline: Baseline, worker: dict[str, Any] | None) -> NoReturn:
    """Run the program as `__main__` and end the process as an interpreter would."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing's name for it: what spawned children send back is looked up here
        sys.modules["__mp_main__"] = main
    sys.argv[:] = [program.target, *program.arguments]
    safe_path = getattr(sys.flags, "safe_path", False)
    first = os.getcwd() if program.is_module else os.path.dirname(os.path.realpath(program.target))
    sys.path[:] = [*([] if safe_path else [first]), *baseline.search_path]
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
        print(error.code, file=sys.stderr)
        return 1
    trace = _without_our_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as second:  # noqa: BLE001
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), second, _without_our_frames(second))
        print("\nOriginal exception was:", file=sys.stderr)
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
    """An interpreter that Ctrl-C ended kills itself by SIGINT at the very end, so that its parent sees why.

    glibc's on_exit() calls raise(status, NULL) inside exit(status): with status SIGINT that is it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), None)
    return int(signal.SIGINT)
