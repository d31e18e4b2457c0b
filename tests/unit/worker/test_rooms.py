"""Which room of taskd/worker may know which: imports go downwards, and nowhere in a circle.

Read from the source by `ast`; imports for annotations count as any other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKER = ROOT / "taskd" / "worker"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(WORKER.rglob("*.py"))
}
# From the lowest up: a room imports itself and those before it. Some are one module.
ROOMS = (
    "internals",
    "exceptions",
    "profiling",
    "objects",
    "life",
    "state",
    "saving",
    "restore",
    "process",
    "train_state",
    "carried_state",
    "recoverable",
)


def imports_of(path: Path) -> Iterator[str]:
    """The modules of taskd.worker that a file names in its imports, wherever these stand."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        yield from (name for name in found if name in MODULES)


def room_of(module: str) -> str:
    return module.split(".")[2]


IMPORTS = {
    module: {name for name in imports_of(path) if name != module}
    for module, path in MODULES.items()
}


def test_every_module_is_in_a_room_that_has_its_place() -> None:
    assert {room_of(module) for module in MODULES if module != "taskd.worker"} == set(ROOMS)
    assert sum(map(len, IMPORTS.values())) > 100  # else the reading above sees nothing


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    upward = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        if module != "taskd.worker" and room_of(module) == room
        for name in sorted(names)
        if name == "taskd.worker" or room_of(name) not in allowed
    ]
    assert not upward


def test_no_modules_import_each_other() -> None:
    """Take away what imports nothing of the rest, until only circles are left."""
    left = {module: set(names) for module, names in IMPORTS.items()}
    while lowest := [module for module, names in left.items() if not names & left.keys()]:
        for module in lowest:
            del left[module]
    assert not left


def test_a_function_fits_on_a_screen_and_a_file_has_one_noun() -> None:
    long = [
        f"{module}:{node.lineno} {node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    lines = {
        module: len(path.read_text(encoding="utf-8").splitlines())
        for module, path in MODULES.items()
    }
    assert not long
    assert not {module: count for module, count in lines.items() if count > 500}


def test_a_process_has_one_singleton() -> None:
    """Besides it, modules only remember that something was said, installed, or found for forks."""
    written = {
        f"{module}.{name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Global)
        for name in node.names
    }
    assert written == {
        "taskd.worker.life._life",
        "taskd.worker.process.replaced._ahead",
        "taskd.worker.state.buckets._original_init",
        "taskd.worker.state.data_order._is_said",
    }
