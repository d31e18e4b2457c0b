"""Which modules are the script's own, and what a report may look like."""

from __future__ import annotations

import json
import os
import struct
import sys
import types
import zlib
from typing import TYPE_CHECKING

import pytest

from taskd.agent.spawning.preloading import Report, imported, told
from taskd.agent.spawning.protocol import SpawnRequest
from taskd.agent.spawning.trial import Own
from taskd.worker.process.imports import Imports

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.py", True),
        ("models/deep/layer.py", True),
        (".venv/lib/python3.11/site-packages/numpy/__init__.py", False),
        ("../other/model.py", False),
        (".", False),
    ],
)
def test_own_is_what_lies_in_the_folder_and_is_not_installed_there(
    tmp_path: pathlib.Path, path: str, expected: bool
) -> None:
    assert Own(str(tmp_path)).has(str(tmp_path / path)) is expected


def test_own_follows_links_and_knows_of_modules_without_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert Own(str(tmp_path / "link")).has(str(tmp_path / "real" / "model.py"))
    assert not Own(str(tmp_path)).has(None)


@pytest.fixture
def report() -> Iterator[Report]:
    made = Report(SpawnRequest(1, ("-u", "train.py"), {}))
    yield made
    made.close()


def test_a_report_arrives_once_after_the_first_step(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "odd", types.SimpleNamespace(__file__=None, __path__=7))
    writer = os.dup(report.writer)
    report.hand_over()
    imports = Imports(writer)
    imports.report_if_due()
    with pytest.raises(BlockingIOError):
        os.read(report.fd, 1)  # no step yet
    imports.note_step()
    imports.report_if_due()
    imports.report_if_due()
    found = report.read()
    assert found is not None
    assert found["path"] == [entry for entry in sys.path if isinstance(entry, str)]
    assert found["environment"] == dict(os.environ)
    places = dict(found["modules"])
    assert list(places) == list(sys.modules)
    assert places["json"] == json.__file__
    assert places["odd"] is None
    assert os.read(report.fd, 1) == b""  # its end is closed


def test_a_report_in_pieces_is_put_together(report: Report) -> None:
    content = zlib.compress(json.dumps({"modules": []}).encode())
    data = struct.pack(">I", len(content)) + content
    for position in range(len(data) - 1):
        os.write(report.writer, data[position : position + 1])
        assert report.read() is None
    os.write(report.writer, data[-1:])
    assert report.read() == {"modules": []}


@pytest.mark.parametrize("content", [b"no zlib", zlib.compress(b"no JSON")])
def test_a_report_that_makes_no_sense_is_a_value_error(report: Report, content: bytes) -> None:
    os.write(report.writer, struct.pack(">I", len(content)) + content)
    with pytest.raises(ValueError, match=r"incorrect header|Expecting value"):
        report.read()


def test_a_worker_that_ends_before_has_said_nothing(report: Report) -> None:
    report.hand_over()
    assert report.read() == {}


def test_others_are_told_the_names_of_what_is_not_the_scripts_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of variables that differ; no value, and nothing that a forkserver has in any case."""
    monkeypatch.setenv("SAME", "1")
    request = SpawnRequest(1, ("-u", str(tmp_path / "train.py")), {}, own=("RANK",))
    modules = [("json", json.__file__), ("far.away", "/x.py"), ("mine", f"{tmp_path}/mine.py")]
    environment = {**os.environ, "MADE_BY_THE_SCRIPT": "secret"}
    found = imported(request, {"modules": modules, "path": [], "environment": environment})
    assert found.modules == ["far.away"]
    assert found.variables == ["MADE_BY_THE_SCRIPT", "RANK"]


def test_a_message_has_room_for_the_names(tmp_path: pathlib.Path) -> None:
    request = SpawnRequest(1, ("-u", str(tmp_path / "train.py")), {})
    modules = [(f"m{number}", None) for number in range(100_000)]
    found = imported(request, {"modules": modules, "path": [], "environment": dict(os.environ)})
    assert found.modules == [f"m{number}" for number in range(len(found.modules))]
    assert 10_000 < len(found.modules) < 30_000


def test_what_another_node_told_is_imported_from_where_a_worker_begins(
    tmp_path: pathlib.Path,
) -> None:
    names = ["far.away", "../odd", "a..b", "", "near"]
    argv = ("-u", str(tmp_path / "train.py"))
    request = SpawnRequest(1, argv, {"A": "1"}, worker={"modules": names})
    report = told(request, ("/behind",))
    assert report is not None
    assert [name for name, _ in report["modules"]] == ["far.away", "near"]
    assert report["path"] == [str(tmp_path), "/behind"]
    assert report["environment"] == {"A": "1"}
    assert told(SpawnRequest(1, ("-c", "pass"), {}, worker={"modules": names}), ()) is None
    assert told(SpawnRequest(1, argv, {}), ()) is None
