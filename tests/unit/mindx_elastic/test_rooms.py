"""The modules of mindx_elastic: who imports what, how long they are; the README is true."""

import ast
import importlib
import pathlib
import re

import pytest

from tests.unit.test_docs import rows, section, text_of, visible
from tests.unit.test_layers import MAX_LINES, long_functions

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "packages" / "mindx_elastic"
MODULES = sorted((FOLDER / "mindx_elastic").glob("*.py"))
README = (FOLDER / "README.md").read_text()
# Who may import a framework, or taskd: within a function, when it is needed.
FRAMEWORKS = {
    "terminating_message": {"mindspore"},
    "breakpoint_files": {"mindspore"},
    "optimizer_steps": {"torch"},
}
# Decide, and know nothing of files, clocks and variables.
PURE = {"errors", "strategy", "groups_of_ranks"}
# What each module may import of ours, apart from `errors`. A module is above those that it imports.
ALLOWED = {
    "files": set(),
    "place": set(),
    "strategy": set(),
    "termination": set(),
    "progress": set(),
    "written": set(),
    "optimizer_steps": set(),
    "api": set(),
    "record": {"files"},
    "faults": {"files", "record"},
    "groups": {"files", "record"},
    "groups_of_ranks": {"strategy"},
    "records": {"place", "record"},
    "calls": {"files", "place", "record"},
    "gasp": {"files", "place", "record", "written"},
    "breakpoint_files": {"faults", "files", "groups", "place", "progress", "record"},
    "terminating_message": {"breakpoint_files", "calls", "place", "progress", "termination"},
    "restore_module": {"faults", "groups", "place", "record", "records", "strategy"},
    "torch_exception_module": {
        "faults", "gasp", "groups_of_ranks", "optimizer_steps", "place", "record", "records",
        "strategy", "termination",
    },
}  # fmt: skip


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_import_what_lies_below_and_frameworks_where_they_may(path) -> None:
    found = imports(path)
    own = {name.split(".")[1] for name in found if name.startswith("mindx_elastic.")}
    assert own - {"errors"} <= ALLOWED.get(path.stem, set())
    others = {name.split(".")[0] for name in found} & {"mindspore", "torch", "taskd", "numpy"}
    assert others <= FRAMEWORKS.get(path.stem, set())
    if path.stem in PURE:
        known = {name.split(".")[0] for name in found}
        assert known <= {"__future__", "collections", "json", "mindx_elastic", "typing"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_and_functions_are_short_and_described(path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert len(text.splitlines()) <= MAX_LINES
    assert [node.name for node in long_functions(tree)] == []


def test_every_variable_is_in_the_readme_and_the_other_way_round() -> None:
    known = {
        node.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"MINDX_[A-Z_]+", node.value)
    }
    documented = set(re.findall(r"MINDX_[A-Z_]+", README))
    assert documented == known


def said() -> list[tuple[str, str]]:
    levels = {"warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
    return [
        (levels[node.func.attr], text_of(node.args[0]))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in levels
        and ast.unparse(node.func.value) == "_log"
    ]


def test_every_line_of_trouble_is_in_the_readme_and_the_other_way_round() -> None:
    documented = re.findall(r"(WARNING|ERROR) `([^`]+)`", README.partition("## Log lines")[2])
    lines = said()
    assert len(lines) > 25
    assert [
        one
        for one in lines
        if not any(one[0] == level and text in one[1] for level, text in documented)
    ] == []
    assert [
        (level, text)
        for level, text in documented
        if not any(level == known and text in line for known, line in lines)
    ] == []


def test_the_readme_can_be_read_in_100_columns_and_names_the_default_place() -> None:
    long = [line for line in README.splitlines() if len(visible(line)) > 100]
    assert long == []
    defaults = {row[0].strip("`"): row[1] for row in rows(README.partition("## Settings")[2])}
    assert defaults["MINDX_FAULT_NPUS"] == "`/user/restore/fault/config/fault-npus`"
    assert defaults["MINDX_ELASTIC_HANDOVER_S"] == "120"


def test_every_promised_name_is_there_and_every_documented_module_is_promised() -> None:
    promised = section("docs/compat.md", "Elastic Agent").partition("promised")[2]
    names = [row for row in rows(promised) if row[0].startswith("`mindx_elastic.") and row[1]]
    assert names
    modules = set()
    for name, meaning in names:
        module, _, attribute = name.strip("`").rpartition(".")
        modules.add(module)
        owner = getattr(importlib.import_module(module), attribute)
        for own in re.findall(r"`(\w+)(?:\(\))?`", meaning):
            assert hasattr(owner, own), f"{name}: {own}"
    documented = re.findall(r"(?m)^from (mindx_elastic\S*) import", README)
    assert set(documented) <= modules
