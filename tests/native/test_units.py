"""The shape of the C code: no circle among its files, headers that say where a name is defined,
lines and functions of limited size."""

from __future__ import annotations

import graphlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
UNITS = sorted(CSRC.rglob("*.c"))
HEADERS = sorted(CSRC.rglob("*.h"))
SOURCES = [
    path
    for folder in (CSRC, ROOT / "tests/native")
    for path in sorted(folder.rglob("*"))
    if path.suffix in {".c", ".cpp", ".h", ".def", ".map", ".sh"}
]
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60

Symbols = dict[
    str, tuple[set[str], set[str]]
]  # by unit: what it defines, what it takes from others


@pytest.fixture(scope="module")
def symbols(tmp_path_factory) -> Symbols:
    if shutil.which("cc") is None or shutil.which("nm") is None:
        pytest.skip("no C compiler, or no nm")
    folder = tmp_path_factory.mktemp("objects")
    found = {}
    for unit in UNITS:
        target = folder / f"{unit.stem}.o"
        flags = ["-std=c11", "-fPIC", "-fvisibility=hidden", "-pthread"]
        subprocess.run(["cc", *flags, "-c", str(unit), "-o", str(target)], check=True)
        listing = subprocess.run(
            ["nm", "-P", "-g", str(target)], capture_output=True, text=True, check=True
        ).stdout
        kinds = [line.split()[:2] for line in listing.splitlines()]
        found[unit.stem] = (
            {name for name, kind in kinds if kind not in "Uwv"},
            {name for name, kind in kinds if kind == "U"},
        )
    return found


def dependencies(symbols: Symbols) -> dict[str, set[str]]:
    """By unit, the units that define what it uses."""
    owner = {name: unit for unit, (defined, _) in symbols.items() for name in defined}
    return {
        unit: {owner[name] for name in used if name in owner} - {unit}
        for unit, (_, used) in symbols.items()
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The units of one circle, the first one twice; [] if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_a_circle_would_be_found():
    made_up: Symbols = {
        "record": ({"write"}, {"find_exits", "strlen"}),
        "exits": ({"find_exits", "exit"}, {"tell"}),
        "tell": ({"tell"}, {"write"}),
    }
    graph = dependencies(made_up)
    assert graph == {"record": {"exits"}, "exits": {"tell"}, "tell": {"record"}}
    assert set(circle(graph)) == {"record", "exits", "tell"}
    assert circle(graph | {"tell": set()}) == []


def test_no_c_files_depend_on_each_other(symbols):
    graph = dependencies(symbols)
    assert graph["guard"] >= {"black_box", "threads"}, "the graph has edges"
    assert len(graph) == len(UNITS), "one name per file"
    assert circle(graph) == []


def test_private_headers_say_in_which_unit_a_name_is_defined(symbols):
    section = re.compile(r"---- (\w+)\.c -|[Dd]efined in (\w+)\.c")
    declaration = re.compile(r"(?!static|typedef|[#/ _]|.*\{$).*?\b(taskd_\w+)(?:\(|\[\w*\];|;)")
    stated = {}
    for header in HEADERS:
        if header.name == "taskd.h":
            continue
        unit = None
        for line in header.read_text().splitlines():
            if named := section.search(line):
                unit = named[1] or named[2]
            elif declared := declaration.match(line):
                stated[declared[1]] = unit
    assert len(stated) > 20
    wrong = {
        name: unit for name, unit in stated.items() if unit is None or name not in symbols[unit][0]
    }
    assert not wrong


def functions(text: str) -> dict[str, int]:
    """Lines of each function, signature to closing brace, in the style that .clang-format sets."""
    lines = text.splitlines()
    found = {}
    for at, line in enumerate(lines):
        if line != "{":
            continue
        start = at
        while start > 0 and re.match(r"[\w ]", lines[start - 1]):
            start -= 1
        name = re.search(r"(\w+)\(", " ".join(lines[start:at]))
        assert name is not None, lines[start:at]
        found[name[1]] = lines.index("}", at) - start + 1
    return found


def test_a_long_function_would_be_found():
    body = "    call();\n" * 58
    assert functions(f"int a;\n\nstatic int\nlong_one(int x)\n{{\n{body}}}\n") == {"long_one": 62}


def test_no_c_function_is_too_long():
    found = {
        f"{path.name}: {name}": count
        for path in SOURCES
        if path.suffix in {".c", ".h"}
        for name, count in functions(path.read_text()).items()
    }
    assert len(found) > 100
    assert not {name: count for name, count in found.items() if count > MAX_FUNCTION_LINES}


def test_no_line_of_c_is_too_wide():
    wide = [
        f"{path.name}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not wide
