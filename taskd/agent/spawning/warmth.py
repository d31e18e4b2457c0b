"""Whether a fork of the warm process looks to a script as a fresh interpreter would.

Owns the rule, with its reason: what a script can observe is what a fresh interpreter would show
it, or a fresh interpreter is started instead.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import zipimport
from contextlib import suppress
from typing import TYPE_CHECKING

from taskd.agent.spawning import processes
from taskd.agent.spawning.program import Program, parse
from taskd.imported import namespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.agent.spawning.protocol import SpawnRequest

# Variables that an interpreter or a library reads once, when it starts: a warm process has read
# them already.
READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "MALLOC_",
    "GLIBC_",
    "TORCH",
    "PYTORCH_",
)
# ... except those that torchrun itself writes for each worker, and those of torch's recorder of
# collectives (written by `config.launcher.keep_collectives`), which are read when the first group
# is created; and the one applied by hand below.
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "OMP_NUM_THREADS")


_COERCED_TO = ("C.UTF-8", "C.utf8", "UTF-8")


def initial_environment() -> dict[str, str]:
    """The environment as it was when this process was executed."""
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    initial = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
    # Where no locale is set, Python sets this one as it starts, for itself and its children
    # (PEP 538): so would a fresh interpreter.
    own = os.environ.get("LC_CTYPE")
    if own in _COERCED_TO:
        initial.setdefault("LC_CTYPE", own)
    return initial


def why_not_warm(request: SpawnRequest, environment: Mapping[str, str]) -> str | None:
    """Why this worker needs a fresh interpreter; None: a fork of this one looks the same.

    `environment`: what this process was executed with.
    """
    try:
        return _difference(request, environment)
    except OSError as error:  # who knows what is there: an interpreter sees for itself
        return str(error)


def _difference(request: SpawnRequest, environment: Mapping[str, str]) -> str | None:
    """As `why_not_warm`. Raises OSError."""
    if request.kind != "python":
        return "asked for"
    if request.prefix:
        return f"its interpreter is executed by {request.prefix[0]}"
    program = parse(request.argv)
    if program is None:
        return "the command line is not a script or a module"
    path = os.path.join(request.cwd or "", program.target)
    problem = _program_problem(request, program, path) or _environment_problem(
        environment, request.env
    )
    if problem is not None:
        return problem
    directory = (
        (request.cwd or ".") if program.is_module else os.path.dirname(os.path.realpath(path))
    )
    shadowed = _shadowed(directory)
    if shadowed:
        return f"{directory} has its own {shadowed}, which is already loaded from elsewhere"
    return None


def _environment_problem(environment: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    for name in sorted(set(environment) | set(wanted)):
        if (
            name.startswith(READ_AT_START)
            and not name.startswith(_READ_LATER)
            and environment.get(name) != wanted.get(name)
        ):
            return f"{name} differs from what the warm process was started with"
    return "PYTHONINSPECT is set" if wanted.get("PYTHONINSPECT") else None


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
    """A module beside the script that is loaded from elsewhere; a fresh interpreter takes it."""
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
        origin = namespace(module).get("__file__")
        if origin is None or not os.path.realpath(origin).startswith(here + os.sep):
            return stem
    return None
