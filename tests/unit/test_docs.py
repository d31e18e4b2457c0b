"""The documentation says what the code does: variables, log lines, records, timeouts, names, links.

And it can be read in a window of 100 columns.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
from typing import TYPE_CHECKING

import pytest

from taskd.core.commands import RecoveryRecord
from taskd.core.faults import Fault
from taskd.core.timeouts import Timeouts
from taskd.errors import MissingMindSporeError
from taskd.testing import diagram

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
MANUAL = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# Files of other projects that a page names.
ELSEWHERE = {
    "torch/distributed/run.py",
    "examples/fault_tolerance/deployment/README.md",
    "docs/blogs/flash_checkpoint.md",
}
# Passed between taskd's own processes: nobody sets it by hand.
INTERNAL = {"TASKD_WORKER", "TASKD_DOOR"}


@functools.cache
def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    """The text under one heading, up to the next heading of the same or a higher level."""
    found = re.search(rf"(?m)^(#+) {re.escape(title)}\n", page(name))
    assert found, f"{name} has no section {title!r}"
    rest = page(name)[found.end() :]
    end = re.search(rf"(?m)^#{{1,{len(found[1])}}} ", rest)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The rows of tables, without headings, and the items of lists, `- term: meaning`."""
    found: list[list[str]] = []
    in_body = False
    for line in re.sub(r"\n  (?=\S)", " ", text).splitlines():
        item = re.match(r"- ((?:`[^`]*`|[^`])*?): (.*)", line)
        if item:
            found.append([item[1], item[2]])
        elif not line.startswith("|"):
            in_body = False
        elif re.fullmatch(r"[|\s:-]+", line):
            in_body = True
        elif in_body:
            found.append(
                [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            )
    return found


def lines_of_trouble() -> list[tuple[str, str]]:
    """(level, text) of each line that docs/operations.md explains."""
    found = re.findall(
        r"(?m)^- (WARNING|ERROR) `([^`]+)`", section("docs/operations.md", "Log lines")
    )
    assert len(found) > 100
    return found


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@functools.cache
def sources() -> tuple[tuple[pathlib.Path, ast.Module], ...]:
    paths = [*sorted(ROOT.glob("taskd/**/*.py")), ROOT / "manager.py", ROOT / "setup.py"]
    return tuple((path, ast.parse(path.read_text())) for path in paths if path.exists())


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def text_of(node: ast.expr) -> str:
    """A literal, an f-string or a sum of them, with "…" for whatever is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+#0 ]*\d*(?:\.\d+)?[a-zA-Z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def log_calls() -> Iterator[tuple[str, str, str]]:
    """(level, text, place) of every log call whose level users see as trouble."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            ):
                continue
            owner = node.func.value
            is_logger = (isinstance(owner, ast.Name) and owner.id in {"log", "logger", "_log"}) or (
                isinstance(owner, ast.Call) and ast.unparse(owner.func).endswith("getLogger")
            )
            level = {
                "warning": "WARNING",
                "error": "ERROR",
                "exception": "ERROR",
                "critical": "ERROR",
            }.get(node.func.attr)
            text = text_of(node.args[0])
            if (
                is_logger and level and re.search(r"[a-z]{2}", text)
            ):  # "%s: %s" is somebody else's text
                yield level, text, f"{path.relative_to(ROOT)}:{node.lineno}"


# ---------------------------------------------------------------------- operations.md


def test_every_variable_that_the_code_knows_is_documented_and_the_other_way_round() -> None:
    known = {
        text
        for _, tree in sources()
        for text in strings(tree)
        if re.fullmatch(r"TASKD_[A-Z_]+", text)
    } - INTERNAL
    documented = {
        name
        for row in rows(section("docs/operations.md", "Environment"))
        for name in code_spans(row[0])
        if name.startswith("TASKD_")
    }
    assert documented == known


def test_every_line_of_trouble_is_documented_with_its_level() -> None:
    documented = lines_of_trouble()
    missing = [
        f"{place} {level} {text}"
        for level, text, place in log_calls()
        if not any(level == known_level and known in text for known_level, known in documented)
    ]
    assert not missing, "\n".join(missing)


def test_every_documented_line_of_trouble_is_in_the_code() -> None:
    existing = [(level, text) for level, text, _ in log_calls()]
    stale = [
        (level, known)
        for level, known in lines_of_trouble()
        if not any(level == existing_level and known in text for existing_level, text in existing)
    ]
    assert not stale


def test_the_symptoms_quote_what_the_code_says() -> None:
    nodes = (node for _, tree in sources() for node in ast.walk(tree))
    said = [
        text_of(node)
        for node in nodes
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    ]
    quoted = {
        span.replace("REASON", "").strip("… ")
        for symptom, *_ in rows(section("docs/operations.md", "Symptoms"))
        for span in code_spans(symptom)
    }
    assert len(quoted) > 20
    assert [text for text in quoted if not any(text in line for line in said)] == []


def test_the_reasons_for_an_end_are_those_of_the_code() -> None:
    texts = [
        text_of(node)
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    ]
    for row in rows(section("docs/operations.md", "Why a job ends")):
        reason = code_spans(row[0])[0]
        assert any(reason in text for text in texts), reason


def test_the_record_is_described_field_by_field() -> None:
    documented = {
        name
        for row in rows(section("docs/operations.md", "The record of a recovery"))
        for name in code_spans(row[0])
    }
    assert {field.name for field in dataclasses.fields(RecoveryRecord)} <= documented
    described = {
        name
        for row in rows(section("docs/operations.md", "A fault in the record"))
        for name in code_spans(row[0])
    }
    assert {field.name for field in dataclasses.fields(Fault)} == described


def test_the_timeouts_are_those_that_are_derived() -> None:
    derived = dataclasses.asdict(Timeouts.derive())
    documented = {
        code_spans(row[0])[0]: row[2] for row in rows(section("docs/operations.md", "Timeouts"))
    }
    assert {f"{name}_s" for name in documented} == set(derived)
    for name, value in documented.items():
        assert value == f"{derived[f'{name}_s']:g} s", name


# ---------------------------------------------------------------------- compat.md


def promised() -> list[str]:
    names = [
        name for row in rows(section("docs/compat.md", "Names")) for name in code_spans(row[0])
    ]
    assert len(names) >= 20
    return names


@pytest.mark.parametrize("name", promised())
def test_every_promised_name_can_be_imported(name: str) -> None:
    if name.endswith(".so"):
        assert importlib.import_module(name.rpartition("/")[0].replace("/", ".")).__path__
        return
    path = name.removesuffix("()").split(".")
    for length in range(len(path), 0, -1):
        try:
            thing = importlib.import_module(".".join(path[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in path[length:]:
            with contextlib.suppress(MissingMindSporeError):  # there is one in its own lane alone
                thing = getattr(thing, attribute)
        return
    pytest.fail(f"{name} cannot be imported")


def test_the_torch_versions_are_those_of_the_seams() -> None:
    from taskd.torchrun.seams import KNOWN_TORCH, TESTED_TORCH

    text = section("docs/compat.md", "torch")
    rows = dict(re.findall(r"^\| (\d+\.\d+\.\d+) \| ([^|]+) ", text, re.MULTILINE))
    assert tuple(rows) == KNOWN_TORCH
    assert [name for name, passed in rows.items() if passed.strip() != "seams"] == [*TESTED_TORCH]
    pages = {path.stem for path in (ROOT / "docs/measured/torch").glob("*.txt")}
    assert pages == set(TESTED_TORCH) - {"2.13.0"}, "2.13.0 is what all other tests run on"


# ---------------------------------------------------------------------- all pages


@pytest.mark.parametrize("path", MANUAL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(path: pathlib.Path) -> None:
    named = {
        span
        for span in code_spans(path.read_text())
        if re.fullmatch(r"[\w./-]*/[\w.-]+\.(py|c|h|def|md|json|yaml|sh)", span)
    }
    places = (ROOT, ROOT / "taskd", ROOT / "tests", path.parent)
    gone = [name for name in named if not any((place / name).exists() for place in places)]
    assert set(gone) <= ELSEWHERE
    modules = re.findall(r"`python -m (taskd[\w.]*)", path.read_text())
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_pictures_of_the_ways_name_files_that_are_there() -> None:
    named = re.findall(
        r"(?m)^[ \w()]*?((?:csrc|agent|core|manager|native|worker)/[\w/]+\.(?:py|c))\b",
        page("docs/design.md").partition("## 4.")[2],
    )
    assert {"core/job/settle.py", "worker/state/step.py"} <= set(named)
    places = (ROOT, ROOT / "taskd")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", there.read_text())
            assert anchor in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings
            }, target


def visible(line: str) -> str:
    """A line without what cannot be broken: targets of links, and names in backquotes in tables."""
    shown = re.sub(r"\]\([^)\s]+\)", "]", line)
    return re.sub(r"`[^`]*`", "", shown) if line.startswith("|") else shown


@pytest.mark.parametrize("path", MANUAL, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_have_at_most_100_characters(path: pathlib.Path) -> None:
    copied = {"sed -i '/import os/i import taskd.python.adaptor.patch'"}  # a command of one line
    drawn = set(diagram.mermaid().splitlines())  # by a program
    long = [
        f"{number}: {line}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(visible(line)) > 100
        and line not in drawn
        and not any(line.startswith(text) for text in copied)
    ]
    assert not long, "\n".join(long)


def test_the_contents_of_operations_are_its_sections() -> None:
    listed = re.findall(r"(?m)^- \[(.*)\]\(#", page("docs/operations.md").partition("\n## ")[0])
    assert listed == re.findall(r"(?m)^## (.*)$", page("docs/operations.md"))


def test_the_diff_in_the_readme_is_the_minimal_example() -> None:
    diff = page("README.md").partition("```diff\n")[2].partition("```")[0].splitlines()
    with_taskd = [line[1:].rstrip() for line in diff if not line.startswith("-")]
    example = [
        re.sub(r"\s*# \+ \d.*$", "", line) for line in page("examples/minimal_ddp.py").splitlines()
    ]
    start = example.index("import torch")
    shown = [line for line in example[start : start + len(example)] if line]
    assert [line for line in with_taskd if line] == shown[
        : len([line for line in with_taskd if line])
    ]


def test_every_example_is_in_the_list() -> None:
    examples = ROOT / "examples"
    files = {
        str(path.relative_to(examples))
        for path in examples.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    listed = set(re.findall(r"\]\(([^)\s]+)\)", page("examples/README.md").partition("\n## ")[0]))
    assert files - {"README.md", "digits_resnet.py"} == listed


def test_no_path_of_somebody_s_machine_is_mentioned() -> None:
    home = re.compile(r"(?<![\w.*$}/])/(?:root|home|work|Users)/\w")
    suffixes = {".md", ".py", ".pyx", ".c", ".h", ".sh", ".toml", ".in", ".map", ""}
    folders = ("docs", "examples", "taskd", "csrc", "benchmarks", "testbed", "tests", ".ci")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))] + sorted(
        ROOT.iterdir()
    )
    guilty = [
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file()
        and path.name != ".git"
        and path.suffix in suffixes
        and home.search(path.read_text(errors="replace"))
    ]
    assert not guilty


def test_the_picture_of_the_phases_is_that_of_the_tables() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{diagram.mermaid()}\n```" in text, (
        "put there what `python -m taskd.testing.diagram` prints"
    )


def test_each_attack_of_the_page_on_security_has_its_test() -> None:
    attacks = rows(section("docs/security.md", "Each attack has a test"))
    assert {number for number, _, _ in attacks} == {
        "S1",
        "S2",
        *(f"S{row}" for row in range(5, 11)),
    }
    for number, attack, named in attacks:
        (path, word) = code_spans(named)[0].split(" -k ")
        names = re.findall(r"def (test_\w+)", (ROOT / "tests" / f"{path}.py").read_text())
        assert [name for name in names if word in name], f"{number}, {attack}: no {named}"
