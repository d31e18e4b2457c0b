"""The switch file.

What the manager makes of it, what it tells to whom, and the command that writes it.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from taskd import profiling
from taskd.config import LogConfig, ManagerConfig, profiling_base, profiling_switch
from taskd.core import events
from taskd.manager.profiling_switch import (
    MAX_FILE_BYTES,
    ProfilingSwitch,
    parse_switches,
    read_switches,
)
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer

if TYPE_CHECKING:
    import pathlib

COMMUNICATION_ON = (
    b'{"CommunicationOperator": "on", "Step": "off", "SaveCheckpoint": "off", '
    b'"FP": '
    b'"off", "DataLoader": "off"}'
)
STEP_ON = b'{"Step": "on"}'
ALL_OFF = b"{}"


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "profilingSwitch"


@pytest.fixture
def switch(path: pathlib.Path) -> ProfilingSwitch:
    return ProfilingSwitch(path, 0.0, lambda: [0, 1])


@pytest.fixture(autouse=True)
def log_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("taskd"), "propagate", True)
    caplog.set_level(logging.INFO, "taskd")
    return caplog


def test_it_looks_once_a_second_and_tells_changes(
    switch: ProfilingSwitch, path: pathlib.Path
) -> None:
    assert switch.turn(0.0) is None
    path.write_bytes(STEP_ON)
    assert switch.turn(0.9) is None
    assert switch.next_deadline == 1.0
    assert switch.turn(1.0) == 710
    assert switch.turn(2.0) is None
    path.write_bytes(COMMUNICATION_ON)
    assert switch.turn(3.0) == 711
    path.write_bytes(ALL_OFF)
    assert switch.turn(4.0) == 700


def test_a_file_that_vanishes_switches_off_and_one_that_never_was_asks_for_nothing(
    switch, path
) -> None:
    assert [switch.turn(float(second)) for second in range(100)] == [None] * 100
    assert switch.wanted is None
    path.write_bytes(STEP_ON)
    assert switch.turn(100.0) == 710
    path.unlink()
    assert switch.turn(101.0) == 700


def test_a_link_is_followed_as_a_cluster_mounts_files_so(switch, path, tmp_path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / path.name).write_bytes(STEP_ON)
    path.symlink_to(tmp_path / "..data" / path.name)
    assert switch.turn(0.0) == 710


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"on",
        b"[]",
        b'{"Step": "yes"}',
        b'{"Step": 1}',
        b'{"Step": ["on"]}',
        b"\xff\xfe",
        pytest.param(b"[" * 50_000, id="deep"),
        pytest.param(b'{"Step": "on"}' + b" " * MAX_FILE_BYTES, id="long"),
    ],
)
def test_what_is_no_switch_changes_nothing_and_is_said_once(
    switch, path, caplog, content: bytes
) -> None:
    path.write_bytes(STEP_ON)
    assert switch.turn(0.0) == 710
    path.write_bytes(content)
    for second in range(1, 20):
        assert switch.turn(float(second)) is None
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == 1
    assert switch.wanted == 710
    path.write_bytes(COMMUNICATION_ON)
    assert switch.turn(20.0) == 711


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_what_is_no_file_is_neither_read_nor_waited_for(path: pathlib.Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="no regular file"):
        read_switches(path)


def test_names_that_are_not_known_are_passed_over() -> None:
    assert parse_switches(b'{"Step": "on", "New": {"deep": 1}}')["Step"]


def test_who_does_not_answer_is_asked_again_and_an_exception_is_said_once(
    switch, path, caplog
) -> None:
    path.write_bytes(COMMUNICATION_ON)
    assert switch.turn(0.0) == 711
    switch.heard(0, 0, 1411)
    assert [second for second in range(1, 70) if switch.turn(float(second)) == 711] == [30, 60]
    switch.heard(1, 0, 1412)
    assert [second for second in range(70, 130) if switch.turn(float(second)) == 711] == [90, 120]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        (
            "profiling does not work everywhere: default on, communication exception; exception on "
            "ranks 1. The log lines of those ranks "
            "say why; training goes on"
        )
    ]
    switch.heard(1, 0, 1411)
    assert [second for second in range(130, 230) if switch.turn(float(second)) is not None] == []
    assert caplog.records[-1].message == "profiling of 2 ranks: default on, communication on"


# ---------------------------------------------------------------- the manager's loop


@pytest.fixture
def service(network, clock, tmp_path, path) -> Service:
    config = ManagerConfig(
        "job", "unused", 30.0, None, LogConfig(tmp_path / "log"), profiling_switch=path
    )
    return Service(config, MemoryRouter(network, "manager"), clock)


def asked(peer: Peer) -> list[int]:
    return [
        message.wanted for message in peer.heard() if isinstance(message, messages.SetProfiling)
    ]


def test_all_agents_are_told_and_one_that_comes_later_is_told_when_it_registers(
    service, network, clock, path
) -> None:
    first = Peer(network)
    first.register(range(1), nodes=2, world=2)
    service.turn()
    assert asked(first) == []
    path.write_bytes(STEP_ON)
    clock.advance(1.0)
    service.turn()
    assert asked(first) == [710]
    second = Peer(network, node_rank=1, incarnation="b0")
    second.register(range(1, 2), nodes=2, world=2)
    service.turn()
    assert asked(second) == [710]
    for peer, rank in ((first, 0), (second, 1)):
        peer.report(events.WorkerProfiling, rank, 0, 1410)
    clock.advance(1.0)
    service.turn()
    for _ in range(100):
        clock.advance(1.0)
        first.say(messages.Heartbeat())
        second.say(messages.Heartbeat())
        service.turn()
    assert (asked(first), asked(second)) == ([], [])


def test_answers_of_others_and_answers_that_make_no_sense_are_refused(
    service, network, clock, path, caplog
) -> None:
    path.write_bytes(STEP_ON)
    peer = Peer(network)
    peer.register()
    service.turn()
    peer.report(events.WorkerProfiling, 7, 0, 1410)
    peer.report(events.WorkerProfiling, 0, 0, 99)
    service.turn()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        (
            "refused a message of agent-0-None-a0: foreign: node 0 spoke of rank 7, which is not "
            "its own"
        ),
        "refused a message of agent-0-None-a0: malformed: 99 is no profiling status",
    ]


# ---------------------------------------------------------------- the command


def run(path: pathlib.Path, *arguments: str) -> int:
    return profiling.main([*arguments, "--path", str(path)])


def test_the_command_makes_folders_and_a_file_that_the_manager_understands(
    tmp_path, capsys
) -> None:
    path = tmp_path / "a" / "b" / "switch"
    switch = ProfilingSwitch(path, 0.0, list)
    assert run(path, "on") == 0
    assert "710: default on, communication off" in capsys.readouterr().out
    assert switch.turn(0.0) == 710
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert json.loads(path.read_text()) == {
        "CommunicationOperator": "off",
        "Step": "on",
        "SaveCheckpoint": "on",
        "FP": "on",
        "DataLoader": "on",
    }
    assert run(path, "on", "CommunicationOperator") == 0
    assert switch.turn(1.0) == 711
    assert run(path, "off", "CommunicationOperator") == 0
    assert switch.turn(2.0) == 710
    capsys.readouterr()
    assert run(path, "off", "Step") == 0
    assert "The default domain is on as long as any switch is." in capsys.readouterr().out
    assert run(path, "status") == 0
    assert "Step off" in capsys.readouterr().out
    assert run(path, "off") == 0
    assert switch.turn(3.0) == 700
    assert os.listdir(path.parent) == ["switch"]


def test_the_command_says_what_is_wrong(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "switch", "on", "Everything")
    assert (
        "'Everything' is not accepted: expected CommunicationOperator, Step"
    ) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path / "switch", "status", "Step")
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "switch", "on") == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    (tmp_path / "switch").write_text("damaged")
    assert run(tmp_path / "switch", "status") == 1
    assert run(tmp_path / "switch", "on") == 0, "what is damaged is replaced"


def test_the_manager_never_sees_half_a_file(path: pathlib.Path) -> None:
    run(path, "on")
    over = threading.Event()

    def write() -> None:
        for _ in range(300):
            profiling.write_switches(path, dict.fromkeys(("Step", "FP"), True))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        content = read_switches(path)
        assert content is not None
        assert parse_switches(content)["Step"]
    writer.join()


# ---------------------------------------------------------------- settings


def test_where_the_switch_is(tmp_path) -> None:
    assert str(profiling_switch({})) == "/user/cluster-info/datatrace-config/profilingSwitch"
    assert str(profiling_switch({"TASKD_PROFILING_SWITCH": "/a"})) == "/a"
    assert str(profiling_switch({"TASKD_PROFILING_SWITCH": "/a"}, "/b")) == "/b"
    assert str(ManagerConfig.load({"profiling_switch": "/c"}, {}).profiling_switch) == "/c"


def test_where_profiles_go(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("taskd.config.paths.CLUSTER_INFO", tmp_path / "cluster-info")
    assert profiling_base({}, "/somewhere") == tmp_path.__class__("/somewhere/taskd_profiling")
    (tmp_path / "cluster-info").mkdir()
    assert profiling_base({}, "/somewhere") == tmp_path / "cluster-info" / "profiling"
    assert str(profiling_base({"GROUP_BASE_DIR": "/g"})) == "/g"
    assert (
        str(profiling_base({"GROUP_BASE_DIR": "/g", "TASKD_PROFILING_PATH": "p"}, "/somewhere"))
        == "/somewhere/p"
    )
