"""The mutation run changes what it should, keeps to Python, and says what a change was."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests import mutants

if TYPE_CHECKING:
    import pathlib

PATH = next(mutants.ROOT.glob("taskd/core/**/start_delay.py"))
MODULE = PATH.relative_to(mutants.ROOT).as_posix()
IMPORT = f"import {MODULE.removesuffix('.py').replace('/', '.')}"


def changes(source: str) -> set[str]:
    found = mutants.mutants_of("module.py", source.encode())
    for mutant in found:
        ast.parse(mutant.apply(source.encode()))
    return {mutant.what for mutant in found}


@pytest.mark.parametrize(("source", "expected"), [
    ("x = a < b", {"a < b  ->  (a <= b)"}),
    ("x = a and b", {"a and b  ->  (a or b)", "a and b  ->  (a)", "a and b  ->  (b)"}),
    ("x = not a", {"not a  ->  (a)"}),
    ("x = a + 1", {"a + 1  ->  (a - 1)", "1  ->  2"}),
    ("x = min(a, b)", {"min  ->  max"}),
    ("x = [a for a in b if a]", {"a  ->  True"}),
    ("x = a if b else c", {"b  ->  True", "b  ->  False"}),
    ("if a:\n    f()", {"a  ->  True", "a  ->  False", "f()  ->  pass"}),
    ("a.b = c", {"a.b = c  ->  pass"}),
    ("def f() -> bool:\n    return a", {"a  ->  (not (a))"}),
    ("def f() -> Commands:\n    return [a]", {"[a]  ->  []"}),
    ("def f() -> int | None:\n    return a", {"a  ->  None"}),
    ("def f(a=True): pass", {"True  ->  False"}),
    ("x = 'ä' + f'{a}'; y = 1", {"1  ->  2"}),
])  # fmt: skip
def test_each_kind_of_change(source: str, expected: set[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize("source", [
    '"""Words."""', "def f(a: int | None) -> list[int]: ...", "assert a < 1", "import a",
    "x = f'{a + 1}'",
    "@dataclass(slots=True)\nclass A: ...", "if TYPE_CHECKING:\n    f(1)", "x: Literal[1] = a",
])  # fmt: skip
def test_what_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_the_same_seed_chooses_the_same_changes() -> None:
    chosen = mutants.choose([MODULE], 5, 1)
    assert chosen == mutants.choose([MODULE], 5, 1) != mutants.choose([MODULE], 5, 2)
    assert len(chosen) == 5
    assert len(mutants.choose([MODULE], 10_000, 1)) < 200


def test_a_change_is_made_in_a_copy_and_taken_back(tmp_path: pathlib.Path) -> None:
    copy = mutants.Copy(tmp_path, "0")
    mutant = mutants.choose([MODULE], 1, 1)[0]
    source = (mutants.ROOT / MODULE).read_bytes()
    show = ("-c", f"print(open({MODULE!r}).read())")
    with copy.changed(MODULE, mutant.apply(source)):
        code, output = copy.run(show, 60.0)
        assert (code, output.strip()) == (0, mutant.apply(source).decode().strip())
        assert (mutants.ROOT / MODULE).read_bytes() == source
    assert copy.run(show, 60.0)[1].strip() == source.decode().strip()


def test_a_test_that_fails_kills_and_one_that_does_not_end_is_noticed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = mutants.Copy(tmp_path, "0")
    source = (mutants.ROOT / MODULE).read_bytes()
    passed = ("-c", IMPORT)
    failed = ("-c", f"{IMPORT}; assert 'FIRST_S = 4.0' in open({MODULE!r}).read()")
    endless = ("-c", f"{IMPORT}; import signal; signal.pause()")
    mutant = next(one for one in mutants.mutants_of(MODULE, source) if one.what == "4.0  ->  5.0")
    limits_s = {passed: 60.0, failed: 60.0, endless: 0.5}
    for killers, outcome in (
        ((passed,), "survived"),
        ((passed, failed), "killed"),
        ((passed, endless), "timeout"),
    ):
        monkeypatch.setattr(mutants, "KILLERS", ((MODULE, killers),))
        assert mutants.judge(copy, mutant, limits_s).outcome == outcome


def test_every_module_that_has_its_killers_exists() -> None:
    for start, commands in mutants.KILLERS:
        assert list(mutants.ROOT.glob(f"{start}*")), start
        paths = [part for command in commands for part in command if part.startswith("tests/")]
        assert all((mutants.ROOT / path).exists() for path in paths)
