"""Handlers: what they are called with, what becomes of those that fail or do not come back."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mindio_ttp import framework_ttp as ttp
from mindio_ttp import settings
from mindio_ttp.carrier import Handover
from mindio_ttp.replicas import ReplicaGroup

from taskd.core.commands import Move
from taskd.errors import Interrupted, StateError

ROOT = Path(__file__).resolve().parents[3]
ARGS = ["what the script hands over"]


@pytest.fixture
def called():
    return []


WHOLE = (ReplicaGroup((0, 1, 2, 3), 4),)


def handover(record, rank, groups=WHOLE):
    return Handover(record, rank, groups, lambda: ARGS)


MOVES = {0: Move(0), 1: Move(1, source=2), 2: Move(2), 3: Move(3)}


@pytest.mark.parametrize(("rank", "repair_type"), [(1, "RT_RECV_REPAIR"), (2, "RT_SEND")])
def test_the_repair_handler_is_told_who_sends_what(record, called, rank, repair_type):
    ttp.tft_register_repair_handler(lambda *given: called.append(given), "context")
    handover(record, rank).move(7, MOVES)
    info = {
        "type": [0], "repair_type": ttp.RepairType[repair_type], "src": [2], "dst": [1],
        "rank_list": [1, 2],
    }  # fmt: skip
    assert called == [(7, False, [1], info, ARGS, "context")]
    assert ttp.tft_get_repair_step() == 7


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_neither_sends_nor_receives_is_not_asked(record, called, rank):
    ttp.tft_register_repair_handler(lambda *given: called.append(given))
    handover(record, rank).move(7, MOVES)
    assert called == []


def test_a_damaged_memory_is_to_be_built_anew(record, called):
    ttp.tft_register_repair_handler(lambda *given: called.append(given))
    record.damage = "RS_UCE: reported by the script"
    handover(record, 1).move(7, MOVES)
    ((_, need_rebuild, _, info, _, _),) = called
    assert need_rebuild is True
    assert info["repair_type"] == ttp.RepairType.RT_UCE_HIGHLEVEL.value


def test_one_rank_of_each_part_saves_and_one_names_it(record, called):
    ttp.tft_register_save_ckpt_handler(lambda *given: called.append(("save", *given)), "context")
    ttp.tft_register_rename_handler(lambda *given: called.append(("rename", *given)))
    groups = (ReplicaGroup((0, 1, 2, 3), 2),)
    for rank in (1, 2, 3):
        handover(record, rank, groups).write(9, (1, 2, 3))
    info = [{"type": 0, "ranks": [2, 1]}]
    assert called == [("save", 9, info, ARGS, "context")] * 2
    assert (ttp.tft_get_repair_type(), ttp.tft_get_repair_step()) == ("dump", 9)
    where = handover(record, 1, groups).publish(9)
    assert called[2:] == [("rename", 9, ARGS)]
    assert "rename handler" in where


def test_what_is_not_registered_is_said_where_it_is_missed(record, caplog, monkeypatch):
    carrier = handover(record, 0)
    with pytest.raises(StateError, match="tft_register_save_ckpt_handler"):
        carrier.write(9, (0,))
    with caplog.at_level(logging.WARNING):
        assert "save handler" in carrier.publish(9)
    assert "tft_register_rename_handler" in caplog.text
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "True")
    called = []
    ttp.tft_register_rename_handler(lambda *given: called.append(given), "context")
    carrier.publish(9)
    assert called == [(9, "context")]


def test_what_a_handler_raises_is_raised(record):
    def fail(*_):
        raise OSError("no space left on device")

    ttp.tft_register_save_ckpt_handler(fail)
    with pytest.raises(OSError, match="no space left"):
        handover(record, 0).write(9, (0,))


def test_the_arguments_are_those_that_were_set_last(record):
    ttp.tft_set_step_args([1])
    assert record.step_args == [1]
    ttp.tft_set_step_args(None)
    assert record.step_args == [1]


def test_a_framework_hands_over_the_functions_arguments_whatever_was_set(record, caplog):
    ttp.tft_set_step_args([1])
    ttp.set_mindio_export_version("MindSpeed")
    assert record.step_args is None
    ttp.tft_set_step_args([2])
    assert record.step_args is None
    assert "MindSpeed hands over the function's arguments" in caplog.text


@pytest.mark.slow
def test_one_that_does_not_come_back_ends_its_process_and_says_where_it_was():
    code = """
import time
from mindio_ttp.handlers import Handlers

def stuck():
    time.sleep(600)

handlers = Handlers()
handlers.on_overdue = lambda detail: print("told:", detail, flush=True)
handlers.register("repair", stuck, None)
handlers.call("repair", limit_s=0.2)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/packages/mindio_ttp"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1
    told = ended.stdout.split("\n")
    assert told[0].startswith("told: the repair handler has not returned after 0.2 s")
    assert ended.stderr.index("in stuck") < ended.stderr.index("and cannot be called")


def test_one_that_comes_back_in_time_leaves_no_thread(record):
    ttp.tft_register_rollback_handler(lambda: "done")
    assert record.handlers.call_limited("rollback") == "done"
    assert "mindio-rollback" not in {thread.name for thread in threading.enumerate()}


def test_one_that_leaves_when_it_was_told_of_does_not_end_its_process(record, monkeypatch):
    """As an interrupt makes it leave, which comes because of that."""
    told, left = threading.Event(), threading.Event()
    disarm = record.handlers.disarm
    monkeypatch.setattr(record.handlers, "disarm", lambda: (disarm(), left.set()))
    # its second limit begins when it has left: this process ends if that runs out
    record.handlers.on_overdue = lambda _: (told.set(), left.wait(60))
    ttp.tft_register_rollback_handler(lambda: told.wait(60))
    assert record.handlers.call("rollback", limit_s=0.3) is True


def test_an_interrupt_while_its_watch_is_begun_leaves_none_behind(record, monkeypatch):
    """What it watched for is over then; it would end a healthy process."""
    told, start = [], threading.Thread.start
    record.handlers.on_overdue = told.append

    def start_and_be_interrupted(thread):
        start(thread)
        raise Interrupted("a fault elsewhere")

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    ttp.tft_register_rollback_handler(lambda: "done")
    with pytest.raises(Interrupted):
        record.handlers.call("rollback", limit_s=20)
    for thread in threading.enumerate():
        if thread.name == "mindio-rollback":
            thread.join(30)
    assert told == []


@pytest.mark.parametrize(("text", "limit_s", "is_said"), [
    (None, 180, False), ("30", 30, False), ("1800", 1800, False), ("29", 180, True),
    ("1801", 180, True), ("-5", 180, True), ("soon", 180, True), ("", 180, True),
])  # fmt: skip
def test_the_limit_is_in_its_range(monkeypatch, caplog, text, limit_s, is_said):
    if text is None:
        monkeypatch.delenv("TTP_NORMAL_ACTION_TIME_LIMIT", raising=False)
    else:
        monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", text)
    with caplog.at_level(logging.WARNING):
        assert settings.action_limit_s() == limit_s
    assert ("TTP_NORMAL_ACTION_TIME_LIMIT" in caplog.text) is is_said
