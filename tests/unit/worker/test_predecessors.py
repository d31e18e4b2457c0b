"""What a replacement takes over from the black box of the process before it, if that is one."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from taskd.native import box_layout
from taskd.native.black_box import BlackBox
from taskd.torchrun.context import LocalWorker
from taskd.transport.silence import is_open
from taskd.worker.process.bootstrap import Bootstrap, _inherit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskd.worker.life import Life

DAMAGES = {
    "magic": (b"\xff" * 8, box_layout.OFFSET_MAGIC),
    "layout": (b"\xff" * 4, box_layout.OFFSET_LAYOUT_VERSION),
    "head": (b"\xa7" * 64, 0),
    "all": (b"\x5a" * box_layout.BOX_BYTES, 0),
}


@pytest.fixture
def box() -> Iterator[BlackBox]:
    """As the agent holds it: two versions and a layout are in it."""
    made = filled(BlackBox.create(), 8, 9)
    yield made
    made.close()


def filled(box: BlackBox, *versions: int) -> BlackBox:
    box.write_layout(b"buckets")
    for version in versions:
        box.write_extras(version, b"extras %d" % version)
    return box


@pytest.fixture
def replacement() -> Iterator[Callable[[BlackBox], tuple[Life, int]]]:
    """Of rank 2: its life, and the descriptor that it had of the box before."""
    own, lives = BlackBox.create(), []

    def begin(previous: BlackBox) -> tuple[Life, int]:
        given: dict[str, Any] = {
            "job_id": "job", "node_rank": 0, "local_rank": 2, "rank": 2, "world_size": 4,
            "incarnation": 3, "generation": 1, "plain": False, "gated": True,
            "store_generation": 0, "life_fd": -1,
            "box_fd": os.dup(own.fd), "previous_fd": os.dup(previous.fd),
        }  # fmt: skip
        lives.append(Bootstrap.of(given).life())
        return lives[-1], given["previous_fd"]

    yield begin
    for life in lives:
        assert life.box is not None
        life.box.close()
    own.close()


def test_what_the_predecessor_left_goes_into_the_own_box_too(
    box: BlackBox, replacement: Callable[[BlackBox], tuple[Life, int]]
) -> None:
    life, descriptor = replacement(box)
    assert life.records.inherited_extras == {8: b"extras 8", 9: b"extras 9"}
    assert life.records.inherited_layout == b"buckets"
    assert life.box is not None
    assert life.box.read_extras() == life.records.inherited_extras
    assert not is_open(descriptor)


def test_what_is_pending_of_a_predecessor_gives_way_to_what_is_written_of_the_step_anew(
    box: BlackBox, replacement: Callable[[BlackBox], tuple[Life, int]]
) -> None:
    """It died early in step 10, which is done again; its successor dies at the end of that."""
    box.write_extras(10, b"the first micro-batch", pending=True)
    life, _ = replacement(box)
    assert life.records.inherited_extras == {
        8: b"extras 8", 9: b"extras 9", 10: b"the first micro-batch",
    }  # fmt: skip
    own = life.box
    assert own is not None
    assert own.read_extras() == {9: b"extras 9", 10: b"the first micro-batch"}
    own.write_extras(9, b"restored 9")
    for written in (b"the first micro-batch again", b"the last micro-batch"):
        own.write_extras(10, written, pending=True)
    third = BlackBox.create()
    records = _inherit(BlackBox.attach(os.dup(own.fd)), third)
    assert records.inherited_extras == {9: b"restored 9", 10: b"the last micro-batch"}
    assert third.read_extras() == records.inherited_extras
    third.close()


def test_what_a_predecessor_was_moved_to_is_still_settled_by_the_commit_before(
    box: BlackBox, replacement: Callable[[BlackBox], tuple[Life, int]]
) -> None:
    """The others have completed step 10: what is settled is written over neither of the two."""
    box.write_extras(10, b"pending 10", pending=True)
    life, _ = replacement(box)
    assert life.box is not None
    life.box.write_extras(10, b"settled 10")
    assert life.box.read_extras() == {9: b"extras 9", 10: b"settled 10"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_predecessor_whose_box_cannot_be_known_as_one_has_left_nothing(
    box: BlackBox,
    replacement: Callable[[BlackBox], tuple[Life, int]],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    os.pwrite(box.fd, *DAMAGES[damage])
    with caplog.at_level(logging.INFO, "taskd"):
        life, descriptor = replacement(box)
    assert (life.records.inherited_extras, life.records.inherited_layout) == ({}, None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "rank 2: nothing is used of what its predecessor left in its black box"
    )
    assert "is no black box of layout 2" in record.getMessage()
    assert not is_open(descriptor)
    assert life.box is not None
    assert (life.box.pid, life.box.incarnation, life.box.generation) == (os.getpid(), 3, 1)


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_box_that_cannot_be_known_as_one_is_not_handed_on(
    box: BlackBox, damage: str | None
) -> None:
    """One version is not all that an intact box before has; of a damaged one there is nothing."""
    own = filled(BlackBox.create(), 10)
    if damage is not None:
        os.pwrite(box.fd, *DAMAGES[damage])
    arenas: Any = None
    worker = LocalWorker(2, 3, 1, {}, own, arenas, arenas, previous=box)
    assert worker.left is (box if damage is None else own)
    own.close()
