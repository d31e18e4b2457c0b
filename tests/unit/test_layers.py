"""The dependency rule: who may import what, read from the source by `ast`; and the size limit of a module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "taskd"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

SHELLS = ("taskd.manager", "taskd.agent", "taskd.worker", "taskd.torchrun")
VENEER = ("taskd.api", "taskd.python")
# For each part: what of ours it must not import.
FORBIDDEN = {
    "taskd.errors": ("taskd",),
    "taskd.clock": ("taskd",),
    "taskd.core": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.checkpoint", "taskd.native", "taskd.testing",
                   "taskd.config", "taskd.clock", "taskd.log"),
    "taskd.wire": (*SHELLS, *VENEER, "taskd.transport", "taskd.checkpoint", "taskd.native", "taskd.testing"),
    "taskd.transport": (*SHELLS, *VENEER, "taskd.core", "taskd.wire", "taskd.checkpoint", "taskd.native", "taskd.testing"),
    "taskd.checkpoint": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.testing"),
    "taskd.native": (*SHELLS, *VENEER, "taskd.core", "taskd.wire", "taskd.transport", "taskd.checkpoint", "taskd.testing"),
    "taskd.manager": ("taskd.agent", "taskd.worker", "taskd.torchrun", *VENEER, "taskd.testing"),
    "taskd.agent": ("taskd.manager", "taskd.torchrun", *VENEER, "taskd.testing"),
    "taskd.worker": ("taskd.manager", "taskd.agent", "taskd.torchrun", *VENEER, "taskd.testing"),
    "taskd.torchrun": ("taskd.manager", *VENEER, "taskd.testing"),
    "taskd.testing": (*SHELLS, *VENEER, "taskd.config", "taskd.log"),
    "taskd.replay": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.native", "taskd.testing"),
}  # fmt: skip
# The forkserver's child becomes a worker: it imports the runtime, lazily, in its last function.
EXCEPTIONS = {("taskd.agent", "taskd.worker"): {"taskd/agent/forkserver.py", "taskd/agent/spawn.py"}}

IMPURE = {
    "time", "datetime", "os", "random", "secrets", "socket", "select", "selectors", "threading", "multiprocessing", "queue",
    "logging", "asyncio", "uuid", "subprocess", "signal", "pathlib", "io", "tempfile", "sys",
}  # fmt: skip
# taskd.run is torchrun itself, with the patch: it hands over to torch.distributed.run.
TORCH_ALLOWED = (
    "taskd/torchrun/", "taskd/checkpoint/", "taskd/worker/", "taskd/agent/forkserver.py", "taskd/agent/spawn.py", "taskd/run.py",
)  # fmt: skip
PROCESSES_ALLOWED = ("taskd/agent/", "taskd/torchrun/")
PROCESS_CALLS = {"fork", "forkpty", "kill", "killpg", "posix_spawn", "posix_spawnp", "system"}
# Ends itself, when its agent is gone: not a process that it started.
OWN_END = {"taskd/native/death_alarm.py", "taskd/worker/runtime.py"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def typing_only(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which are never imported at run time."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for child in node.body:
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def imports_of(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Full names of everything imported anywhere in the file, `from a import b` as both a and a.b."""
    tree = tree_of(path)
    skipped = typing_only(tree) if at_run_time else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in skipped:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.lineno not in skipped:
            assert node.level == 0, f"{short(path)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 20


@pytest.mark.parametrize("part", sorted(FORBIDDEN))
def test_parts_import_only_what_lies_below(part: str) -> None:
    wrong = []
    for path in MODULES:
        if not is_within(name_of(path), part):
            continue
        for imported in imports_of(path):
            for forbidden in FORBIDDEN[part]:
                allowed = short(path) in EXCEPTIONS.get((part, forbidden), set())
                if is_within(imported, forbidden) and not is_within(imported, part) and not allowed:
                    wrong.append(f"{short(path)} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("part", ["taskd.core", "taskd.wire"])
def test_core_and_wire_know_no_clock_no_chance_and_no_outside(part: str) -> None:
    wrong = [
        f"{short(path)} imports {imported}"
        for path in MODULES
        if is_within(name_of(path), part)
        for imported in imports_of(path)
        if imported.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_core_imports_nothing_but_the_standard_library_and_our_errors() -> None:
    allowed = sys.stdlib_module_names
    wrong = [
        f"{short(path)} imports {imported}"
        for path in MODULES
        if is_within(name_of(path), "taskd.core")
        for imported in imports_of(path)
        if imported.split(".")[0] not in allowed
        and not is_within(imported, "taskd.core")
        and not is_within(imported, "taskd.errors")
    ]
    assert not wrong


def test_only_one_module_imports_zmq() -> None:
    found = {short(path) for path in MODULES for name in imports_of(path) if name.split(".")[0] == "zmq"}
    assert found <= {"taskd/transport/zeromq.py"}


def test_torch_stays_where_it_belongs() -> None:
    found = {short(path) for path in MODULES for name in imports_of(path, at_run_time=True) if name.split(".")[0] == "torch"}
    assert not {path for path in found if not path.startswith(TORCH_ALLOWED)}


def test_only_the_agent_makes_and_ends_processes() -> None:
    wrong = []
    for path in MODULES:
        if short(path).startswith(PROCESSES_ALLOWED):
            continue
        if any(name.split(".")[0] == "subprocess" for name in imports_of(path)):
            wrong.append(f"{short(path)} imports subprocess")
        for node in ast.walk(tree_of(path)):
            is_call = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
            if is_call and node.attr in PROCESS_CALLS and short(path) not in OWN_END:
                wrong.append(f"{short(path)}:{node.lineno} uses os.{node.attr}")
    assert not wrong


def test_time_is_read_by_the_clock_alone() -> None:
    """In the shells that have a clock. A worker's own threads and the C library's helpers measure themselves."""
    wrong = [
        short(path)
        for path in MODULES
        if name_of(path).startswith(("taskd.manager", "taskd.agent", "taskd.testing"))
        and any(name in {"time.monotonic", "time.time"} for name in imports_of(path))
    ]
    assert not wrong


def test_no_module_is_too_long() -> None:
    lengths = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_every_module_says_what_it_is() -> None:
    empty = [short(path) for path in MODULES if path.stat().st_size and not ast.get_docstring(tree_of(path))]
    assert not empty


@pytest.mark.parametrize("module", ["taskd", "taskd.core", "taskd.core.recovery", "taskd.core.node", "taskd.replay"])
def test_importing_it_loads_neither_torch_nor_zmq(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'zmq'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
