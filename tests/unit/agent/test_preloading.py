"""Which modules are the script's own, and what a report may look like."""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib.util
import json
import os
import socket
import struct
import sys
import termios
import threading
import time
import types
import zlib
from typing import TYPE_CHECKING

import pytest

from taskd.agent.spawning import child, preloading, processes, server
from taskd.agent.spawning.preloading import Preloaded, Report, imported, told
from taskd.agent.spawning.protocol import (
    Forked,
    Note,
    SpawnRequest,
    Started,
    StartFailed,
    Wire,
    Word,
    reply_from,
    reply_message,
)
from taskd.agent.spawning.trial import Own, Trial
from taskd.worker.process.imports import Imports
from tests.descriptors import one_in_garbage

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator


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


# A library whose part is executed when it is first used, if ever.
LAZILY = """
import importlib.util, sys
spec = importlib.util.find_spec("optional")
spec.loader = importlib.util.LazyLoader(spec.loader)
optional = sys.modules["optional"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(optional)
"""
OPTIONAL = "raise OSError('a library of the system is missing')\n"


def imports_lazily(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import lazily` works, and executes no `optional`."""
    for name, text in (("lazily", LAZILY), ("optional", OPTIONAL)):
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.delitem(sys.modules, name)  # so that it is as before in the end
    monkeypatch.syspath_prepend(str(folder))


def test_a_trial_executes_none_either(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which library has it was left out: `ends its process (exit 1)`."""
    imports_lazily(tmp_path, monkeypatch)

    def tell(connection: socket.socket) -> None:
        Trial(connection, (), Own(str(tmp_path / "elsewhere"))).run(["lazily"])

    assert preloading._throw_away(1, tell) == (1, None)


def test_a_trial_blames_no_import_for_what_was_left_before_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection within it closed that: `closes a descriptor`."""
    (tmp_path / "collecting.py").write_text("import gc\ngc.collect()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def tell(connection: socket.socket) -> None:
        one_in_garbage()
        Trial(connection, (), Own(str(tmp_path / "elsewhere"))).run(["collecting"])

    assert preloading._throw_away(1, tell) == (1, None)


def test_a_report_executes_no_module_that_waits_for_its_first_use(
    report: Report, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an optional one raised was the end of the report."""
    imports_lazily(tmp_path, monkeypatch)
    module = importlib.import_module("lazily").optional
    imports = Imports(os.dup(report.writer))
    report.hand_over()
    imports.note_step()
    imports.report_if_due()
    found = report.read()
    assert found
    assert dict(found["modules"])["optional"] == str(tmp_path / "optional.py")
    with pytest.raises(OSError, match="is missing"):
        _ = module.anything


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


REQUEST = SpawnRequest(7, ("-u", "train.py"), {})
IMPORTED = Note("10 modules of train.py are preloaded after 0.8 s")
NONE_BEFOREHAND = Note("no process can be forked beforehand: no memory")


class Pair:
    """The forkserver's handle on a preloaded process, and the other end, which a test has."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ours = ours
        self.handle = Preloaded.__new__(Preloaded)
        self.handle.pid, self.handle.is_ready, self.handle._wire = 0, True, Wire(ours)
        self.process = Wire(theirs)

    def say(self, *words: Word) -> None:
        for word in words:
            self.process.send(*reply_message(word))

    def say_once_read(self, word: Word) -> None:
        """When the forkserver has read all that was said before."""
        deadline, unread = time.monotonic() + 20, array.array("i", [1])
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(self._ours, termios.FIONREAD, unread)
        self.say(word)

    def close(self) -> None:
        self.handle._wire.close()
        self.process.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[int]:
    reader, writer = os.pipe()
    yield reader
    processes.close_all((reader, writer))


@pytest.mark.parametrize("note", [IMPORTED, NONE_BEFOREHAND])
@pytest.mark.parametrize("answer", [Forked(7, 4321), StartFailed(7, "no memory")])
def test_a_note_that_comes_when_a_worker_is_asked_for_is_a_note(
    pair: Pair, gate: int, note: Note, answer: Forked | StartFailed
) -> None:
    heard: list[Word] = []
    pair.say(note)
    with contextlib.closing(Talking(lambda: pair.say_once_read(answer))):
        found = pair.handle.fork(REQUEST, gate, heard.append)
    assert found == (4321 if isinstance(answer, Forked) else "no memory")
    assert heard == [note]


class Talking(threading.Thread):
    """Says something beside the test, which waits for its end."""

    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__(target=say)
        self.start()

    def close(self) -> None:
        self.join()


@pytest.mark.parametrize("note_first", [True, False])
def test_a_note_that_is_read_together_with_the_answer_is_not_lost(
    pair: Pair, gate: int, note_first: bool
) -> None:
    heard: list[Word] = []
    words = (IMPORTED, Forked(7, 4321))
    pair.say(*(words if note_first else reversed(words)))
    assert pair.handle.fork(REQUEST, gate, heard.append) == 4321
    assert heard == [IMPORTED]


def test_a_preloaded_process_that_ends_while_it_is_asked_has_ended(pair: Pair, gate: int) -> None:
    heard: list[Word] = []
    pair.say(IMPORTED)
    pair.process._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="has ended"):
        pair.handle.fork(REQUEST, gate, heard.append)
    assert heard == [IMPORTED]


def test_one_that_only_notes_something_has_not_answered(
    pair: Pair, gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.agent.spawning.preloading._ANSWER_S", 0.1)
    pair.say(IMPORTED)
    with pytest.raises(TimeoutError, match="has not answered for 0 s"):
        pair.handle.fork(REQUEST, gate, lambda _: None)


class LostTooLate:
    """A preloaded process that has forked the worker, and cannot say so any more."""

    is_ready, pid, fd = True, 0, -1

    def __init__(self) -> None:
        self.worker = 0

    def fork(self, _request: SpawnRequest, gate: int, *_: object) -> int:
        self.worker = os.fork()
        if self.worker == 0:
            with contextlib.suppress(BaseException):
                close_but(gate)
                os._exit(0 if os.read(gate, 1) else 7)
            os._exit(1)
        await_wait_in_pipe(self.worker)
        raise TimeoutError("has not answered for 3 s")

    def close(self) -> int:
        return -9


def close_but(gate: int) -> None:
    """As a fork of the preloaded process: it has what it was sent, and no other end of the gate."""
    for descriptor in processes.open_descriptors():
        if descriptor > 2 and descriptor != gate:
            processes.close_all((descriptor,))


def await_wait_in_pipe(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "S":
                return
    raise AssertionError(f"process {pid} does not wait at its gate")


def test_a_worker_whose_preloaded_process_is_lost_ends_at_its_gate_and_another_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    agent, forkserver, lost = Wire(theirs), server._Server(Wire(ours), ()), LostTooLate()
    forkserver._preloaded = lost  # type: ignore[assignment]
    monkeypatch.setattr(child, "become", lambda *_, **__: os._exit(0))
    forkserver._spawn(REQUEST, None)
    said = [reply_from(*message) for message in agent.receive(wait=False) or ()]
    (started,) = (word for word in said if isinstance(word, Started))
    assert started.pid != lost.worker
    statuses = [
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (started.pid, lost.worker)
    ]
    assert statuses == [0, 7]
    os.close(started.pidfd)
    for end in (agent, forkserver._wire, forkserver._wake_read, forkserver._wake_write):
        end.close()
