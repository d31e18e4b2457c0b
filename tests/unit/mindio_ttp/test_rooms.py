"""What the package may import of taskd, how large its parts are, that its pages name all of it."""

import ast
import re
from pathlib import Path

import pytest
from mindio_ttp import controller_ttp, framework_ttp, utils

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "packages" / "mindio_ttp" / "mindio_ttp"
MODULES = sorted(PACKAGE.rglob("*.py"))
# The face for libraries that carry a state, and what tells a process who it is.
ALLOWED = {
    "taskd", "taskd.worker.carried_state", "taskd.worker.life", "taskd.worker.process.runtime",
    "taskd.core.events", "taskd.core.commands", "taskd.errors",
}  # fmt: skip
# Importing these must need no torch: only the decorator, when it is used, loads the rest.
WITHOUT_TORCH = {path for path in MODULES if path.name != "training.py"}


def imports_of(path, *, at_run_time):
    tree = ast.parse(path.read_text())
    for node in tree.body if at_run_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & ALLOWED) or {node.module}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_little_of_taskd_is_known_and_torch_only_where_it_is_needed(path):
    known = {name for name in imports_of(path, at_run_time=False) if name.startswith("taskd")}
    assert known <= ALLOWED
    if path in WITHOUT_TORCH:
        loaded = {name.split(".")[0] for name in imports_of(path, at_run_time=True)}
        assert not loaded & {"torch", "taskd"}


def test_functions_fit_on_a_screen():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 500
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}:{node.name}"


def test_every_name_is_in_the_table_of_its_page():
    page = (ROOT / "docs" / "compat.md").read_text().partition("## MindIO TTP\n")[2]
    page = page.partition("\n## ")[0]
    names = {*framework_ttp.__all__, *controller_ttp.__all__, *utils.__all__}
    assert len(names) > 50
    described = set(re.findall(r"`(\w+)(?:\(\))?`", page))
    assert names - described == set()
    variables = {
        node.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"(TTP|MINDIO)_[A-Z_]+", node.value)
    }
    assert len(variables) == 2
    assert variables - described == set()
