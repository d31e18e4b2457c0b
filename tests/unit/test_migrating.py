"""docs/migrating.md: every name, file, command and variable that it prints is there.

Read from the sources, so that neither torch nor MindSpore nor TensorFlow is needed.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import shlex

import pytest

from tests.unit.test_docs import section

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", TEXT)
PROSE = re.sub(r"(?ms)^```.*?^```$", "", TEXT)
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PROSE)]
# Where the packages lie that a name may begin with.
PACKAGES = {
    "taskd": ROOT / "taskd",
    "mindx_elastic": ROOT / "packages" / "mindx_elastic" / "mindx_elastic",
    "mindio_ttp": ROOT / "packages" / "mindio_ttp" / "mindio_ttp",
}
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
# Variables whose meaning is that of the platform, of MindSpore or of CANN.
ELSEWHERE = {
    "GLOG_v", "LD_PRELOAD", "MS_ENABLE_TFT", "RANK_ID", "RANK_SIZE", "TTP_PORT", "TASKD_WHL",
    "MINDIO_TTP_PKG", "RANK_TABLE_FILE",
}  # fmt: skip


def module_of(name: str) -> tuple[pathlib.Path, list[str]]:
    """The file of the longest part of a dotted name that is a module, and the rest."""
    first, *rest = name.split(".")
    path = PACKAGES[first]
    while rest:
        if (path / rest[0]).is_dir():
            path = path / rest.pop(0)
        elif (path / f"{rest[0]}.py").exists():
            return path / f"{rest[0]}.py", rest[1:]
        else:
            break
    return path / "__init__.py", rest


@functools.cache
def bound_in(path: pathlib.Path) -> set[str]:
    """What a module or one of its classes defines, imports or, as a text, promises."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def dotted_names() -> list[str]:
    """All of them, and those that a block of code imports."""
    code = "\n".join(text for _, text in BLOCKS)
    found = {name for text in (*SPANS, code) for name in DOTTED.findall(text)}
    imports = rf"from ((?:{'|'.join(PACKAGES)})[\w.]*) import ([\w, ]+)"
    for module, names in re.findall(imports, code):
        found.update(f"{module}.{name.strip()}" for name in names.split(","))
    return sorted(name for name in found if not name.endswith((".so", ".whl")))


def test_there_is_something_to_look_at() -> None:
    assert {
        "mindio_ttp.framework_ttp",
        "mindx_elastic.restore_module.RestoreStrategyGenerator",
        "mindx_elastic.torch_exception_module.exception_checkpoint",
        "mindx_elastic.terminating_message.ExceptionCheckpoint",
        "taskd.TrainState",
        "taskd.api.init_taskd_manager",
        "taskd.mindspore.TrainState",
        "taskd.rerun",
    } <= set(dotted_names())


@pytest.mark.parametrize("name", dotted_names())
def test_every_name_is_there(name: str) -> None:
    path, rest = module_of(name)
    assert path.exists()
    assert not rest or rest[0] in bound_in(path), f"{name}: not in {path.relative_to(ROOT)}"
    assert len(rest) < 2


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "mindx_elastic.torch_exception_module",
            "set_config check_resumable_model _get_fault_npus _group_info _save_func _replicas",
        ),
        ("mindx_elastic.restore_module", "gen_fault_tolerance_strategy"),
        ("taskd.mindspore.train_state", "restore callback epoch"),
    ],
)
def test_methods_and_attributes_of_the_page_are_there(module: str, names: str) -> None:
    path, rest = module_of(module)
    assert not rest
    for name in names.split():
        assert re.search(rf"\b{name}\b", TEXT), f"the page no longer names {name}"
    assert set(names.split()) - bound_in(path) == set()


def test_every_file_and_folder_is_there() -> None:
    commands = " ".join([*SPANS, *(text for language, text in BLOCKS if not language)])
    named = set(re.findall(r"(?<![\w/.])(?:examples|packages|docs)/[\w./-]*\w", commands))
    assert {"examples/tensorflow/resnet.py", "packages/mindx_elastic"} <= named
    assert not {name for name in named if not (ROOT / name).exists()}
    scripts = re.findall(r"`(\w+\.py)` in the folder `(examples/\w+)`", re.sub(r"\s+", " ", TEXT))
    assert len(scripts) == 2
    assert not [script for script, folder in scripts if not (ROOT / folder / script).exists()]


def test_the_commands_have_the_options_that_are_theirs() -> None:
    commands = [
        shlex.split(line)
        for language, text in BLOCKS
        if not language
        for line in text.replace("\\\n", " ").splitlines()
        if " -m taskd." in line
    ]
    assert commands
    for words in commands:
        module = words[words.index("-m") + 1].replace(".", "/")
        source = (ROOT / f"{module}.py").read_text(encoding="utf-8")
        for word in words[words.index("-m") + 2 : words.index("--")]:
            assert not word.startswith("--") or f'"{word}"' in source, word
        script = next(word for word in words[words.index("--") :] if word.endswith(".py"))
        options = {word for word in words[words.index(script) :] if word.startswith("--")}
        source = (ROOT / script).read_text(encoding="utf-8")
        assert not {option for option in options if f'"{option}"' not in source}


def test_every_variable_is_documented_or_of_the_platform() -> None:
    named = {
        word
        for text in (*SPANS, *(text for _, text in BLOCKS))
        for word in re.findall(r"\b(?:TASKD|MINDX|MINDIO|TTP|MS|RANK|GLOG|LD)_\w+", text)
        if word == word.upper() or word == "GLOG_v"
    }
    assert "TASKD_RECOVER_STRATEGY" in named
    ours = set(re.findall(r"`([A-Z_]+)`", section("docs/operations.md", "Environment")))
    others = named - ours - ELSEWHERE
    sources = [
        path.read_text(encoding="utf-8")
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
    ]
    assert not {name for name in others if not any(f'"{name}"' in text for text in sources)}
