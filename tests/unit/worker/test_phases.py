"""What the main thread does, as the black box tells it."""

import io
import threading

import pytest
import torch

import taskd
from taskd.native import box_layout
from taskd.native.black_box import Phase
from taskd.worker import life as life_module
from taskd.worker.state import phases


@pytest.fixture
def box():
    from taskd.native.black_box import BlackBox

    box = BlackBox.create()
    life_module.set_current(life_module.Life(rank=0, world_size=1, incarnation=0, box=box))
    phases.install()
    box.mark_phase(Phase.STEP)
    yield box
    life_module.set_current(None)
    box.close()


class Noting(torch.utils.data.Dataset):
    def __init__(self, box):
        self.box, self.seen = box, []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.seen.append(self.box.phase)
        return index


def test_waiting_for_a_batch_is_data(box) -> None:
    noting = Noting(box)
    assert [int(batch) for batch in torch.utils.data.DataLoader(noting)] == [0, 1, 2, 3]
    assert noting.seen == [Phase.DATA] * 4
    assert box.phase is Phase.STEP
    assert box.phase_times()["data"][0] == 5


def test_saving_and_loading_is_a_checkpoint(box) -> None:
    class Stream(io.BytesIO):
        seen: Phase | None = None

        def write(self, data) -> int:
            self.seen = box.phase
            return super().write(data)

    stream = Stream()
    torch.save({"a": torch.ones(3)}, stream)
    assert stream.seen is Phase.CHECKPOINT
    assert box.phase is Phase.STEP
    stream.seek(0)
    assert torch.load(stream)["a"].sum() == 3
    assert box.phase_times()["checkpoint"][0] == 2


def test_what_torch_does_not_know_can_be_said(box) -> None:
    with taskd.checkpointing():
        assert box.phase is Phase.CHECKPOINT
        torch.save({}, io.BytesIO())  # within it: the same, not another one
        assert box.phase is Phase.CHECKPOINT
    with taskd.evaluating():
        assert box.phase is Phase.EVALUATION
    assert box.phase is Phase.STEP
    assert box.phase_times()["checkpoint"][0] == 1


def test_an_exception_ends_it(box) -> None:
    with pytest.raises(ValueError, match="full"), taskd.checkpointing():
        raise ValueError("full")
    assert box.phase is Phase.STEP


def test_another_thread_says_nothing_about_the_main_one(box) -> None:
    seen = []

    def save() -> None:
        with taskd.checkpointing():
            seen.append(box.phase)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert seen == [Phase.STEP]


def test_outside_a_job_nothing_happens() -> None:
    with taskd.checkpointing(), taskd.evaluating():
        assert life_module.current() is None


def test_wrapping_twice_is_wrapping_once(box) -> None:
    phases.install()
    torch.save({}, io.BytesIO())
    assert box.phase_times()["checkpoint"][0] == 1


@pytest.mark.parametrize("damaged", [Phase.CHECKPOINT, 100, -7, 10**12])
def test_other_code_that_writes_into_the_box_does_not_change_what_a_block_returns_to(
    box, damaged: int
) -> None:
    box.write_word(box_layout.OFFSET_PHASE, damaged)
    with taskd.checkpointing():
        assert box.phase is Phase.CHECKPOINT
        box.write_word(box_layout.OFFSET_PHASE, damaged)
    assert box.phase is Phase.STEP
    assert box.phase_times()["checkpoint"][0] == 1
