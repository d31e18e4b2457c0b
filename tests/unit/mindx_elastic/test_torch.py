"""`exception_checkpoint` on real processes: who saves what when, and how the next start goes on."""

import dataclasses
import json
import os
import pathlib
import signal
import sys

import pytest

from mindx_elastic import record, torch_exception_module
from mindx_elastic.errors import DamagedFileError
from testbed.processes import TORCHRUNS, Output, environment, free_port
from tests.disks import fill, small_disk

JOB = pathlib.Path(__file__).with_name("torch_job.py")
LIMIT_S = 120.0  # each rank imports torch where it is no fork of the warm parent
SLOW = pytest.mark.slow


class Job:
    """The ranks of one training, each a process; its folder outlives it.

    No rank comes to its end before it is signalled or waited for.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.ranks: list[Output] = []
        self.started = 0
        self._go = folder / "go"

    def start(self, world: int = 1, **settings: object) -> None:
        self._go.unlink(missing_ok=True)
        common = environment(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            GO=str(self._go),
            WORLD_SIZE=str(world),
            MINDX_ELASTIC_DIR=str(self.folder / "state"),
            MINDX_FAULT_NPUS=str(self.folder / "fault-npus"),
            **{"MINDX_TASK_ID": "job-1"} | {name: str(value) for name, value in settings.items()},
        )
        self.started += 1
        self.ranks = [
            Output(
                [sys.executable, str(JOB), str(self.checkpoints)],
                {**common, "RANK": str(rank)},
                self.folder / f"output-{self.started}-{rank}",
                self.folder,
                warm=TORCHRUNS,
            )
            for rank in range(world)
        ]

    def until(self, rank: int, line: str) -> None:
        self.ranks[rank].wait_text(line, LIMIT_S)

    def signal(self, *ranks: int, number: signal.Signals = signal.SIGTERM) -> None:
        """To all of these before any of them goes on, and then to their end."""
        numbers = (number,) if len(ranks) == 1 else (signal.SIGSTOP, number, signal.SIGCONT)
        for one in numbers:
            for rank in ranks:
                self.ranks[rank].process.send_signal(one)
        self._go.touch()

    def wait(self) -> list[int]:
        self._go.touch()
        return [one.wait(LIMIT_S).returncode for one in self.ranks]

    def text(self, rank: int = 0) -> str:
        return self.ranks[rank].text

    def close(self) -> None:
        for one in self.ranks:
            one.end()

    def run(self, world: int = 1, **settings: object) -> str:
        """To the end, all of it well. The digests of all ranks."""
        self.start(world, **settings)
        codes = self.wait()
        assert codes == [0] * world, self.text()
        return " ".join(
            line.split()[1]
            for rank in range(world)
            for line in self.text(rank).splitlines()
            if line.startswith("digest")
        )

    def record(self, rank: int = 0) -> record.Record:
        return record.read(str(self.folder / "state" / "job-1" / f"rank_{rank}.json"))

    def files(self) -> list[str]:
        return sorted(
            str(one.relative_to(self.checkpoints)) for one in self.checkpoints.rglob("*.pt")
        )


@pytest.fixture
def job(tmp_path):
    found = Job(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By number of ranks: the digests of a run without a fault."""
    known: dict[int, str] = {}

    def digest(world: int) -> str:
        if world not in known:
            one = Job(tmp_path_factory.mktemp("undisturbed"))
            known[world] = one.run(world)
            one.close()
        return known[world]

    return digest


@SLOW
@pytest.mark.parametrize("how", ["each", "once"])
def test_sigterm_saves_a_whole_step_and_the_next_start_goes_on_with_it(
    job, undisturbed, how
) -> None:
    # Once: the script's function gets the number that it was given at the beginning.
    job.start(HOW=how)
    job.until(0, "step 6")
    job.signal(0)
    assert job.wait() == [-signal.SIGTERM]
    one = job.record()
    assert one.state == record.SAVED
    assert one.cause == "SIGTERM"
    record.check_files(one)
    (saved,) = one.files
    assert saved.path.endswith("model_optim_rng_0.pt")
    assert record.read(saved.path + ".json") == one
    if how == "each":
        assert one.step >= 6
        assert job.run() == undisturbed(1)
        assert f"loaded iter_{one.step:07d}" in job.text()


@SLOW
def test_a_second_sigterm_within_the_save_changes_nothing(job, tmp_path) -> None:
    os.mkfifo(tmp_path / "gate")
    job.start(GATE=tmp_path / "gate")
    job.until(0, "step 2")
    job.signal(0)
    job.until(0, "saving")
    job.signal(0)
    (tmp_path / "gate").write_text("go")
    assert job.wait() == [-signal.SIGTERM]
    assert job.text().count("saving") == 1
    record.check_files(job.record())


@SLOW
def test_a_rank_that_fails_because_others_have_ended_ends_by_the_same_signal(job, tmp_path) -> None:
    """SIGTERM reaches all ranks, one after the other: the last one may miss the first before it."""
    os.mkfifo(tmp_path / "gate")
    job.start(2, GATE=tmp_path / "gate")
    job.until(0, "step 2")
    job.signal(1, number=signal.SIGKILL)
    job.until(0, "saving")
    job.signal(0)
    (tmp_path / "gate").write_text("go")
    assert job.wait() == [-signal.SIGTERM, -signal.SIGKILL]
    assert "RuntimeError" in job.text()
    record.check_files(job.record())


@SLOW
def test_sigterm_before_the_first_step_saves_nothing(job) -> None:
    job.start(HANG="0@0", MINDX_ELASTIC_STEP_WAIT_S=0)
    job.until(0, "hangs")
    job.signal(0)
    assert job.wait() == [-signal.SIGTERM]
    assert "no step has been completed" in job.text()
    assert job.files() == []
    with pytest.raises(DamagedFileError):
        job.record()


@SLOW
def test_a_main_thread_that_is_stuck_is_saved_by_the_other_one(job) -> None:
    job.start(HANG="0@4", MINDX_ELASTIC_STEP_WAIT_S=0.5)
    job.until(0, "hangs")
    job.signal(0)
    assert job.wait() == [-signal.SIGTERM]
    assert job.record().step == 4
    record.check_files(job.record())


@SLOW
def test_an_exception_saves_the_step_before(job, undisturbed) -> None:
    job.start(RAISE="0@7")
    assert job.wait() == [1]
    assert job.record().cause == "RuntimeError: injected"
    assert job.record().step == 7
    assert job.run() == undisturbed(1)


@SLOW
def test_a_full_disk_leaves_a_record_that_says_so_and_the_next_start_goes_on_without(job) -> None:
    with small_disk(job.checkpoints, 64):
        filler = fill(job.checkpoints)
        job.start()
        job.until(0, "step 6")
        job.signal(0)
        assert job.wait() == [-signal.SIGTERM]
        assert "the checkpoint could not be saved (SIGTERM)" in job.text()
        assert job.record().state == record.FAILED
        filler.unlink()
        job.run()
        assert "loaded" not in job.text()


@SLOW
@pytest.mark.extended("test_records.py: test_files_that_were_cut_*, test_who_can_be_loaded_from")
def test_a_file_that_is_cut_off_is_not_gone_on_from(job) -> None:
    job.start(PERIODIC=1)
    job.until(0, "step 6")
    job.signal(0)
    job.wait()
    step = job.record().step
    os.truncate(job.record().files[0].path, 100)
    job.run()
    assert "were written" in job.text()
    assert f"loaded iter_{step // 5 * 5:07d}" in job.text()  # set back, as the document says


@SLOW
@pytest.mark.extended(
    "test_records.py: test_a_damaged_record_is_named_and_not_used, "
    "test_the_record_of_another_job_or_world_is_not_used"
)
def test_a_record_that_is_damaged_or_of_another_world_is_not_gone_on_from(job) -> None:
    job.start(PERIODIC=1)
    job.until(0, "step 6")
    job.signal(0)
    job.wait()
    path = job.folder / "state" / "job-1" / "rank_0.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    job.run(GROUPS_ONLY=1)
    assert "the record of rank 0 is not used" in job.text()
    assert "loaded iter_0000005/" in job.text()
    path.write_bytes(whole)
    job.run(GROUPS_ONLY=1, MINDX_TASK_ID="job-2")
    assert "no rank has left a record" in job.text()


@SLOW
def test_the_document_partial_save_with_a_faulty_chip_to_the_last_bit(job, undisturbed) -> None:
    """Ranks 0, 2 and 1, 3 are replicas; chip 0 becomes faulty, the platform ends all."""
    job.start(4, PARTIAL=1)
    for rank in range(4):
        job.until(rank, "step 6")
    (job.folder / "fault-npus").write_text(json.dumps({"FaultRankIds": ["0"], "CreatTime": 1}))
    job.signal(0, 1, 2, 3)
    assert job.wait() == [-signal.SIGTERM] * 4
    step = job.record(1).step
    assert [job.record(rank).state for rank in range(4)] == [
        record.LEFT, record.SAVED, record.SAVED, record.LEFT,
    ]  # fmt: skip
    assert {job.record(rank).step for rank in range(4)} == {step}
    assert job.files() == [
        f"iter_{step:07d}/model_optim_rng_1.pt",
        f"iter_{step:07d}/model_optim_rng_2.pt",
    ]
    assert job.run(4) == undisturbed(4)
    for rank, source in enumerate((2, 1, 2, 1)):
        assert f"loaded iter_{step:07d}/model_optim_rng_{source}.pt" in job.text(rank)


@SLOW
@pytest.mark.extended(
    "test_strategy.py: test_every_group_has_a_live_source_*; "
    "test_the_document_partial_save_with_a_faulty_chip_to_the_last_bit"
)
def test_without_a_mounted_list_the_records_tell_who_loads_whose_file(job, undisturbed) -> None:
    job.start(4, PARTIAL=1)
    for rank in range(4):
        job.until(rank, "step 6")
    job.signal(3, 2, 1, 0)
    assert job.wait() == [-signal.SIGTERM] * 4
    assert [job.record(rank).state for rank in range(4)] == [
        record.SAVED, record.SAVED, record.LEFT, record.LEFT,
    ]  # fmt: skip
    assert job.run(4) == undisturbed(4)
    assert "model_optim_rng_1.pt" in job.text(3)


@SLOW
def test_a_replica_saves_where_the_one_before_it_cannot(job) -> None:
    job.start(2, PARTIAL=1, FAIL_SAVE=0)
    for rank in range(2):
        job.until(rank, "step 4")
    job.signal(0, 1)
    job.wait()
    assert [job.record(rank).state for rank in range(2)] == [record.FAILED, record.SAVED]


@SLOW
def test_a_replica_saves_where_the_one_before_it_is_dead(job) -> None:
    """Rank 0 is killed; rank 1 waits for it in a collective when SIGTERM comes."""
    job.start(2, PARTIAL=1, MINDX_ELASTIC_STEP_WAIT_S=1)
    job.until(0, "step 4")
    job.until(1, "step 3")
    job.ranks[0].process.send_signal(signal.SIGSTOP)
    job.signal(1)
    job.ranks[1].wait(LIMIT_S)
    job.ranks[0].process.send_signal(signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL, -signal.SIGTERM]
    assert job.record(1).state == record.SAVED
    record.check_files(job.record(1))


@SLOW
def test_more_replicas_than_ranks_is_all_of_them(job) -> None:
    job.start(2, PARTIAL=1, REPLICAS=9)
    for rank in range(2):
        job.until(rank, "step 3")
    job.signal(0, 1)
    job.wait()
    assert [job.record(rank).state for rank in range(2)] == [record.SAVED, record.SAVED]
    assert "replicas is 9, and the smallest group has 2 ranks" in job.text()


@SLOW
@pytest.mark.extended(
    "test_strategy.py: test_every_group_has_a_live_source_*; "
    "test_set_config_once_records_how_many_steps_each_rank_has_done"
)
def test_two_ranks_that_saved_different_steps_are_not_gone_on_from(job) -> None:
    job.start(2, PERIODIC=1)
    for rank in range(2):
        job.until(rank, "step 6")
    job.signal(0, 1)
    job.wait()
    path = job.folder / "state" / "job-1" / "rank_1.json"
    one = record.read(str(path))
    record.write(str(path), dataclasses.replace(one, step=one.step + 1))
    job.run(2, GROUPS_ONLY=1)
    # They are replicas: the newest step that one of each group has is that of rank 1.
    assert f"goes on from step {one.step + 1} of ranks 1" in job.text(1)


@SLOW
@pytest.mark.parametrize(
    ("hangs", "steps", "said"),
    [
        ("0@6 1@7", [6, 7], "no dying gasp is loaded"),
        ("0@6 1@6", [6, 6], "goes on from step 6 of ranks 0,1"),
    ],
)
def test_set_config_once_records_how_many_steps_each_rank_has_done(job, hangs, steps, said) -> None:
    job.start(2, HOW="once", ALONE=1, HANG=hangs, MINDX_ELASTIC_STEP_WAIT_S=0.2)
    for rank in (0, 1):
        job.until(rank, "hangs")
    job.signal(0, 1)
    assert job.wait() == [-signal.SIGTERM] * 2
    assert [job.record(rank).step for rank in (0, 1)] == steps
    job.run(2, ALONE=1, GROUPS_ONLY=1)
    for rank in (0, 1):
        assert said in job.text(rank)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": -1}, "replicas is -1"),
        ({"replicas": True}, "replicas is True"),
        ({"replicas": "2"}, "replicas is '2'"),
        ({"group_info": [[0, 1]]}, "group_info is wrong"),
        ({"group_info": [[0], [0]]}, "group_info is wrong"),
        ({"group_info": []}, "expected lists of ranks"),
        ({"group_info": 3}, "expected a list of lists"),
        ({"group_info": [["0"]]}, "expected lists of ranks"),
        ({"save_func": 3}, "cannot be called"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(options, said, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    handler = torch_exception_module.ExceptionHandler()
    with pytest.raises(ValueError, match=said):
        handler.set_config(**options)
    assert handler._replicas == 1
    assert handler._group_info is None


def test_wrong_replicas_that_were_assigned_count_as_one(caplog) -> None:
    assert torch_exception_module._at_least_one(0) == 1
    assert torch_exception_module._at_least_one("3") == 1
    assert torch_exception_module._at_least_one(3) == 3
    assert "_replicas is 0" in caplog.text


def test_the_documented_attributes_can_be_read_and_assigned(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    handler = torch_exception_module.ExceptionHandler()
    handler._args = (1, 2)
    handler._save_func = None
    handler._partial_save = True
    handler._replicas = 2
    handler._group_info = [[0], [1]]
    assert handler._args == (1, 2)
    assert handler._group_info == [[0], [1]]
    handler.set_config()
    assert handler._group_info == [[0, 1]]  # data parallel
    assert (handler._save_func, handler._args) == (None, ())
    assert (handler._partial_save, handler._replicas) == (False, 1)
