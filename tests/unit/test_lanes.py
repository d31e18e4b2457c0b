"""Which tests run when, and why those that `make test` leaves out may be left out."""

from __future__ import annotations

import ast
import fnmatch
import pathlib
import re
from typing import TYPE_CHECKING

import pytest

from tests import lanes
from tests.extended import EXTENDED

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = pathlib.Path(lanes.__file__).parent
# A file or folder with its path, a file by its name alone, a test.
NAMED = re.compile(r"(?P<path>tests/[\w/]+(?:\.py)?)|(?P<file>test_\w+\.py)|(?P<test>test_[\w*]+)")


def is_begun(part: lanes.Slice) -> bool:
    """Whether the next test of it is run."""
    try:
        part.pytest_runtest_setup()
    except pytest.skip.Exception:
        return False
    return True


def test_the_time_of_a_slice_begins_with_its_first_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the tests took longer than that: all were left out, and the slice had passed."""
    now = 0.0
    monkeypatch.setattr(lanes.time, "monotonic", lambda: now)
    part = lanes.Slice("seed", 120.0)
    now = 314.0
    assert is_begun(part)
    now = 433.0
    assert is_begun(part)
    now = 435.0
    assert not is_begun(part)


@pytest.fixture
def item(request: pytest.FixtureRequest) -> pytest.Item:
    """A test that the lanes have not seen yet."""
    return pytest.Function.from_parent(request.node.parent, name="new", callobj=lambda: None)


@pytest.mark.parametrize(
    "marker",
    [
        pytest.mark.extended,
        pytest.mark.extended(""),
        pytest.mark.extended(" "),
        pytest.mark.extended(3),
        pytest.mark.extended("one", "another"),
        pytest.mark.extended(reason="by name"),
        pytest.mark.extended("one", reason="by name"),
    ],
    ids=lambda marker: f"{marker.args} {marker.kwargs}",
)
def test_an_extended_test_without_a_reason_is_refused(
    item: pytest.Item, marker: pytest.MarkDecorator
) -> None:
    item.add_marker(marker)
    with pytest.raises(pytest.UsageError) as refused:
        lanes.mark([item])
    assert item.nodeid in str(refused.value)
    assert '@pytest.mark.extended("' in str(refused.value)


def test_one_with_a_reason_is_taken(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.extended("[3]"))
    lanes.mark([item])


def test_one_of_the_table_has_the_reason_of_the_table(
    item: pytest.Item, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "EXTENDED", (("*::new", "[3]"), ("*::old", "[4]")))
    assert lanes.mark([item]) == {"*::old"}
    marker = item.get_closest_marker("extended")
    assert marker is not None
    assert marker.args == ("[3]",)


def test_a_promise_is_not_proved_by_an_extended_test(
    item: pytest.Item, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "PROMISES", {"words": ("*::new",)})
    assert lanes.unproved([item]) == set()
    item.add_marker(pytest.mark.extended("[3]"))
    assert lanes.unproved([item]) == {"*::new"}


def reasons() -> Iterator[tuple[str, str]]:
    """Of each extended test, or of several: where it stands, and what it is."""
    yield from EXTENDED
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if path != pathlib.Path(__file__) and "mark.extended(" in text:
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr="extended"), args=[ast.Constant(str(reason))]
                    ):
                        yield f"{path.relative_to(TESTS.parent)}:{node.lineno}", reason


def test_what_a_reason_names_is_there() -> None:
    """Files, folders and tests; of a test, which may be a pattern, in which file is not looked."""
    sources = list(TESTS.rglob("test_*.py"))
    files = {path.name for path in sources}
    tests = {
        name
        for path in sources
        for name in re.findall(r"(?m)^ *def (test_\w+)", path.read_text(encoding="utf-8"))
    }

    def is_there(found: re.Match[str]) -> bool:
        if found["path"]:
            return (TESTS.parent / found["path"]).exists()
        return found["file"] in files if found["file"] else bool(fnmatch.filter(tests, found[0]))

    named = [(where, found) for where, reason in reasons() for found in NAMED.finditer(reason)]
    missing = [f"{where}: {found[0]}" for where, found in named if not is_there(found)]
    assert not missing, "\n".join(missing)
    assert len(named) > 300, "they were not found"
