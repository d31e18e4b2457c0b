"""ExceptionCheckpoint in real MindSpore: what is saved when, and what the next start does."""

import importlib.util
import os
import pathlib
import signal

import pytest

from mindx_elastic import files, groups, record
from tests import disks
from tests.mindspore.mindx.training import Training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="needs MindSpore: make test-mindspore"
)
ENDED = -signal.SIGTERM


@pytest.fixture
def training(tmp_path):
    found = Training(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By number of ranks: what a run without a fault says last."""
    known: dict[int, str] = {}

    def digest(world: int) -> str:
        if world not in known:
            known[world] = Training(tmp_path_factory.mktemp("undisturbed")).run(world)
        return known[world]

    return digest


def record_of(training: Training, rank: int = 0) -> record.Record:
    one = record.read(str(training.folder / "state" / "job-1" / f"rank_{rank}.json"))
    record.check_files(one)
    (saved,) = one.files
    assert record.read(saved.path + ".json") == one
    assert pathlib.Path(saved.path) == training.breakpoint_files(rank)[-1]
    return one


# Graph mode, PyNative mode, and a checkpoint that is being written in the background meanwhile.
@pytest.mark.parametrize("mode", [{}, {"PYNATIVE": 1}, {"ASYNC": 1}])
def test_sigterm_leaves_a_breakpoint_file_and_the_next_start_ends_with_the_same_weights(
    training, undisturbed, mode
) -> None:
    training.start(**mode)
    training.until(0, "step 30")
    training.terminate(0)
    assert training.wait() == [ENDED]
    (path,) = training.breakpoint_files()
    one = record_of(training)
    assert one.step >= 30
    assert one.cause == "SIGTERM"
    assert path.name == f"net-1_{one.step}_breakpoint.ckpt"
    assert training.drafts() == []
    assert training.run(**mode) == undisturbed(1)
    assert f"loaded {path.name} {one.step}" in training.text()


def test_an_exception_is_saved_once_if_the_config_says_so(training, undisturbed) -> None:
    training.start(RAISE="0@30")
    assert training.wait() == [1]
    (path,) = training.breakpoint_files()  # MindSpore has not saved one more
    assert path.name == "net-1_30_breakpoint.ckpt"
    assert record_of(training).cause == "RuntimeError: injected into a call-back"
    assert training.run() == undisturbed(1)


def test_an_exception_is_not_saved_if_the_config_does_not_say_so(training) -> None:
    training.start(RAISE="0@30", EXCEPTION_SAVE=0)
    assert training.wait() == [1]
    assert training.breakpoint_files() == []
    assert "nothing is saved: the config has no exception_save=True" in training.text()


def test_an_exception_within_a_step_saves_the_step_before(training, undisturbed) -> None:
    training.start(PYNATIVE=1, FAIL_LOSS=1)
    assert training.wait() == [1]
    assert "injected into the loss" in training.text()
    assert record_of(training).step == 29
    assert training.run(PYNATIVE=1) == undisturbed(1)


def test_parameters_of_half_a_step_are_not_saved(training) -> None:
    training.start(PYNATIVE=1, TORN=1)
    assert training.wait() == [1]
    assert "injected into the optimizer" in training.text()
    assert training.breakpoint_files() == []
    assert "step 30 was under way, and the optimizer has begun" in training.text()


def test_a_second_sigterm_within_the_save_changes_nothing(training, undisturbed) -> None:
    gate = training.folder / "gate"
    os.mkfifo(gate)
    training.start(GATE=gate)
    training.until(0, "step 30")
    training.terminate(0)
    training.until(0, "saving")
    training.terminate(0)
    gate.write_text("go")
    assert training.wait() == [ENDED]
    assert training.text().count("saving") == 1
    assert record_of(training).step >= 30
    assert training.run() == undisturbed(1)


def test_a_process_that_is_killed_within_the_save_leaves_no_file_under_the_name(
    training, undisturbed
) -> None:
    gate = training.folder / "gate"
    os.mkfifo(gate)
    training.start(GATE=gate)
    training.until(0, "step 30")
    training.terminate(0)
    training.until(0, "saving")
    training.ranks[0].kill()
    assert training.wait() == [-signal.SIGKILL]
    assert training.breakpoint_files() == []
    assert len(training.drafts()) == 1
    assert training.run() == undisturbed(1)
    assert "loaded" not in training.text()
    assert training.drafts() == []  # the next start has cleaned up


def test_what_a_broken_file_would_do_to_the_next_start(tmp_path, record_property) -> None:
    """MindSpore loads what is left of it, without a word, or raises: so none may be left behind."""
    import mindspore as ms

    from tests.mindspore.mindx import net

    whole = str(tmp_path / "whole.ckpt")
    ms.save_checkpoint(net.model()._train_network, whole, append_dict={"step_num": 7})
    names = set(ms.load_checkpoint(whole))
    one = record.saved_file(whole)
    outcomes = {"less": 0, "raises": 0}
    for kept in range(0, one.size_bytes, 97):
        cut = tmp_path / "cut.ckpt"
        cut.write_bytes(pathlib.Path(whole).read_bytes()[:kept])
        try:
            outcomes["less"] += set(ms.load_checkpoint(str(cut))) < names
        except ValueError:
            outcomes["raises"] += 1
        assert files.fingerprint(str(cut)) != (one.size_bytes, one.fingerprint)
    assert sum(outcomes.values()) == len(range(0, one.size_bytes, 97))
    assert outcomes["raises"] > 0
    record_property("cut files", outcomes)


def test_sigterm_before_the_first_step_leaves_the_old_file(training, undisturbed) -> None:
    training.start()
    training.until(0, "step 30")
    training.terminate(0)
    training.wait()
    before = record_of(training)
    training.start(WAIT_BEFORE=f"0@{before.step + 1}", MINDX_ELASTIC_STEP_WAIT_S=0)
    training.until(0, "before")
    training.terminate(0)
    assert training.wait() == [ENDED]
    assert "no step has been completed" in training.text()
    assert record_of(training) == before
    assert training.run() == undisturbed(1)


def test_a_full_disk_leaves_the_old_file_and_says_so(training) -> None:
    with disks.small_disk(training.checkpoints, 256):
        training.start()
        training.until(0, "step 30")
        training.terminate(0)
        training.wait()
        before = training.breakpoint_files()
        training.start(WAIT_BEFORE="0@50")
        training.until(0, "step 45")
        filler = disks.fill(training.checkpoints)
        training.terminate(0)
        assert training.wait() == [ENDED]
        assert "the breakpoint file could not be saved (SIGTERM)" in training.text()
        assert training.breakpoint_files() == before
        assert training.drafts() == []
        filler.unlink()
        training.run()
        assert f"loaded {before[0].name}" in training.text()


def test_a_main_thread_that_is_stuck_is_saved_by_the_other_one(training, undisturbed) -> None:
    training.start(HANG="0@30", MINDX_ELASTIC_STEP_WAIT_S=0.5)
    training.until(0, "hangs")
    training.terminate(0)
    assert training.wait() == [ENDED]
    assert record_of(training).step == 30
    assert training.run() == undisturbed(1)


def test_a_long_step_that_ends_while_the_one_before_it_is_saved_is_saved_in_its_place(
    training, undisturbed
) -> None:
    gate, step_gate = training.folder / "gate", training.folder / "step-gate"
    for one in (gate, step_gate):
        os.mkfifo(one)
    training.start(GATE=gate, STEP_GATE=step_gate, SLOW="0@31", MINDX_ELASTIC_STEP_WAIT_S=2)
    training.until(0, "slow")
    training.terminate(0)
    training.until(0, "saving")  # step 30, by the other thread
    step_gate.write_text("go")
    training.until(0, "step 31")
    gate.write_text("go")
    training.until(0, "saving")
    gate.write_text("go")
    assert training.wait() == [ENDED]
    assert [path.name for path in training.breakpoint_files()] == ["net-1_31_breakpoint.ckpt"]
    assert record_of(training).step == 31
    assert training.run() == undisturbed(1)


def test_an_evaluation_within_the_training_disarms_nothing(training) -> None:
    training.start(FIT=1)
    training.until(0, "step 30")
    training.terminate(0)
    assert training.wait() == [ENDED]
    assert record_of(training).step >= 30
    assert training.text().count("evaluated") >= 1


def test_the_wrong_order_of_call_backs_is_named(training) -> None:
    training.start(WRONG_ORDER=1, RAISE="0@2")
    training.wait()
    assert "put ExceptionCheckpoint behind ModelCheckpoint" in training.text()


def test_the_exception_of_a_peer_is_saved_by_all_at_the_same_step(training, undisturbed) -> None:
    training.start(2, RAISE="1@30")
    # Rank 0 waits for it in a collective. Nobody kills it here: the collective fails some time.
    training.ranks[1].wait()
    assert training.ranks[1].returncode == 1
    assert record_of(training, 1).step == 30
    assert record_of(training, 0).step == 30
    training.ranks[0].kill()
    training.wait()
    assert "a call of another rank" in record_of(training, 0).cause
    assert training.run(2) == undisturbed(2)


def test_sigterm_to_ranks_that_wait_for_a_dead_one(training, undisturbed) -> None:
    training.start(2, HANG="1@30", MINDX_ELASTIC_STEP_WAIT_S=2)
    training.until(1, "hangs")
    training.until(0, "step 30")
    training.terminate(0, 1)
    assert training.wait() == [ENDED, ENDED]
    assert [record_of(training, rank).step for rank in (0, 1)] == [30, 30]
    assert training.run(2) == undisturbed(2)


def test_sigterm_to_both_ranks_at_a_step_of_their_own(training, undisturbed) -> None:
    training.start(2)
    training.until(0, "step 20")
    training.terminate(0)
    training.until(1, "step 20")
    training.terminate(1)
    assert training.wait() == [ENDED, ENDED]
    assert record_of(training, 0).step == record_of(training, 1).step
    assert training.run(2) == undisturbed(2)


def test_group_files_are_read_as_mindspore_reads_them(tmp_path) -> None:
    import mindspore as ms
    from mindspore.train import node_strategy_pb2

    for members in ([0], [3, 1, 2], list(range(0, 4096, 8))):
        message = node_strategy_pb2.ParallelGroupMap()
        item = message.parallel_group_item.add()
        item.group_name = "8-123456"
        item.parallel_group_ranks.dim.extend(range(16))
        message.ckpt_restore_rank_list.dim.extend(members)
        path = tmp_path / "group_info.pb"
        path.write_bytes(message.SerializeToString())
        assert list(groups.read(str(path))) == members
        assert ms.restore_group_info_list(str(path)) == members
