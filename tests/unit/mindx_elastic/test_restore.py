"""`RestoreStrategyGenerator` on files as two lives of a job leave them."""

import json
import os

import pytest

from mindx_elastic import place, record, restore_module
from mindx_elastic.restore_module import RestoreStrategyGenerator
from tests.unit.mindx_elastic.group_bytes import group_map

WORLD = 4
GROUPS = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
NO = ("-1", None)


class Job:
    """The folders of a job of 4 ranks, tensor parallel in pairs: 0 and 2, 1 and 3 are replicas."""

    def __init__(self, folder) -> None:
        self.folder = folder
        for rank, group in GROUPS.items():
            self.group_file(rank).parent.mkdir(parents=True)
            self.group_file(rank).write_bytes(group_map(group, others=[("world", range(WORLD))]))

    def group_file(self, rank):
        return self.folder / f"device{rank}" / "group_info.pb"

    def breakpoint_file(self, rank):
        return self.folder / f"rank_{rank}" / f"pangu{rank}-1_7_breakpoint.ckpt"

    def leave(self, rank, step=7, **changes) -> None:
        path = self.breakpoint_file(rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"parameters of %d " % step + bytes(range(200)))
        values = {
            "job": place.job(), "framework": "mindspore", "rank": rank, "world_size": WORLD,
            "epoch": 1, "step": step, "state": record.SAVED,
            "files": (record.saved_file(str(path)),), "groups": (tuple(GROUPS[rank]),),
            "fault_ranks": (), "prefix": f"pangu{rank}", "cause": "SIGTERM",
            "began_at": "2026-01-01T00:00:00.000000+00:00",
            "saved_at": "2026-01-01T00:01:00.000000+00:00",
        }  # fmt: skip
        record.write(place.record_path(rank), record.Record(**{**values, **changes}))

    def faults(self, *ranks) -> None:
        (self.folder / "fault-npus").write_text(json.dumps({"FaultRankIds": [*map(str, ranks)]}))


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "GROUP_INFO_FILE", "MINDX_ELASTIC_DIR"):
        monkeypatch.delenv(name, raising=False)
    found = Job(tmp_path)
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("RANK_SIZE", str(WORLD))
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    monkeypatch.setenv("GROUP_INFO_FILE_REFLECT", str(found.group_file(3)))
    monkeypatch.setenv("MINDX_FAULT_NPUS", str(tmp_path / "fault-npus"))
    for name in ("RESTORE_RANKS", "RESTORE_RANKS_MAP"):
        monkeypatch.setenv(name, "before")
    return found


def generate():
    answer = RestoreStrategyGenerator().gen_fault_tolerance_strategy()
    ranks, by_group = answer
    assert os.environ["RESTORE_RANKS"] == ranks
    assert os.environ.get("RESTORE_RANKS_MAP") == by_group
    return answer


def test_all_have_saved(job) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    assert generate() == ("0,1", '{"0,2": 0, "1,3": 1}')


def test_a_faulty_chip_and_a_lost_node_are_not_loaded_from(job) -> None:
    for rank in (0, 2, 3):  # rank 1 was lost before it could save
        job.leave(rank)
    job.faults(0)
    assert generate() == ("2,3", '{"0,2": 2, "1,3": 3}')


def test_each_rank_hears_the_same(job, monkeypatch) -> None:
    for rank in range(WORLD):
        job.leave(rank, step=7 + (rank == 0))
    answers = set()
    for rank in range(WORLD):
        monkeypatch.setenv("RANK_ID", str(rank))
        monkeypatch.setenv("GROUP_INFO_FILE_REFLECT", str(job.group_file(rank)))
        answers.add(generate())
    assert answers == {("1,2", '{"0,2": 2, "1,3": 1}')}


def test_the_paths_come_from_the_environment_file_where_no_variable_is_set(
    job, monkeypatch
) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    own = os.environ.pop("GROUP_INFO_FILE_REFLECT")
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(job.folder / "mindx_elastic"))
    environment = job.folder / "group_info_env"
    monkeypatch.setattr(restore_module, "GROUP_ENVIRONMENT", str(environment))
    environment.write_text(f"export GROUP_INFO_FILE_REFLECT={own}\n")
    assert generate() == ("0,1", '{"0,2": 0, "1,3": 1}')


def test_data_parallel_needs_no_group_files(job, monkeypatch) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(job.folder / "mindx_elastic"))
    monkeypatch.delenv("GROUP_INFO_FILE_REFLECT")
    for rank in (1, 2):
        job.leave(rank, groups=(tuple(range(WORLD)),))
    assert generate() == ("1", '{"0,1,2,3": 1}')


def test_a_first_start_has_nothing(job, caplog) -> None:
    for rank in range(WORLD):
        job.group_file(rank).unlink()
    assert generate() == NO
    assert "no breakpoint files are loaded" in caplog.text


def break_group_file(job, how):
    path = job.group_file(2)
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else data[: len(data) // 2])


@pytest.mark.parametrize("how", ["missing", "empty", "damaged"])
def test_a_group_file_that_cannot_be_read_is_made_good_by_a_replica_or_a_record(job, how) -> None:
    for rank in (0, 1, 2, 3):
        job.leave(rank, groups=())
    break_group_file(job, how)
    assert generate() == ("0,1", '{"0,2": 0, "1,3": 1}')  # rank 0's file names rank 2
    job.group_file(0).unlink()
    assert generate() == NO
    job.leave(2)  # a record that names its group
    assert generate() == ("0,1", '{"0,2": 0, "1,3": 1}')


def test_group_files_of_another_layout_are_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank)
        job.group_file(rank).write_bytes(group_map(range(WORLD)))
    assert generate() == NO
    assert "the model was split in another way" in caplog.text


def test_a_group_file_of_another_rank_is_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank, groups=())
    for rank in (1, 3):
        job.group_file(rank).write_bytes(group_map([0, 2]))
    assert generate() == NO
    assert "and not its own rank" in caplog.text


def test_breakpoint_files_of_another_job_are_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank, job="job-2")
    assert generate() == NO
    assert "it is of job 'job-2', this is 'job-1'" in caplog.text


def test_breakpoint_files_of_another_world_are_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank, world_size=8)
    assert generate() == NO
    assert "a world of 8 ranks, this one has 4" in caplog.text


def test_a_smaller_world_on_the_old_files_is_no_way(job, monkeypatch, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank, world_size=2)
    monkeypatch.setenv("RANK_SIZE", "2")
    assert generate() == NO
    assert "do not fit a world of 2 ranks" in caplog.text


def test_two_groups_that_saved_different_steps_are_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank, step=7 + rank % 2)
    assert generate() == NO
    assert "the ranks have saved different steps" in caplog.text


def test_a_rank_that_is_a_step_behind_is_left_out(job) -> None:
    for rank in range(WORLD):
        job.leave(rank, step=6 if rank == 0 else 7)
    assert generate() == ("1,2", '{"0,2": 2, "1,3": 1}')


def test_a_breakpoint_file_that_is_cut_off_is_not_loaded_from(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    os.truncate(job.breakpoint_file(0), 40)
    assert generate() == ("1,2", '{"0,2": 2, "1,3": 1}')
    os.truncate(job.breakpoint_file(2), 40)
    assert generate() == NO
    assert "none of the ranks 0, 2 has a checkpoint that can be used" in caplog.text


def test_a_group_without_a_live_source_is_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    job.faults(1, 3)
    assert generate() == NO
    assert "none of the ranks 1, 3" in caplog.text


def test_a_list_of_faults_that_cannot_be_read_is_no_way(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    (job.folder / "fault-npus").write_text('{"FaultRankIds": [')
    assert generate() == NO
    assert "fault-npus" in caplog.text


def test_ordinary_checkpoints_that_are_newer_are_preferred(job, caplog) -> None:
    for rank in range(WORLD):
        job.leave(rank)

    def periodic(rank):
        path = job.folder / f"rank_{rank}" / f"pangu{rank}-2_5.ckpt"
        path.write_bytes(b"newer")
        os.utime(path, ns=(0, os.stat(job.breakpoint_file(rank)).st_mtime_ns + 1))

    periodic(0)
    assert generate()[0] == "0,1"  # rank 1 has none: the breakpoint is what all have
    periodic(1)
    assert generate() == NO
    assert "ordinary checkpoints are newer" in caplog.text


def test_the_record_of_an_earlier_life_is_not_mixed_in(job) -> None:
    for rank in range(WORLD):
        job.leave(rank)
    later = {
        "began_at": "2026-01-01T00:02:00.000000+00:00",
        "saved_at": "2026-01-01T00:03:00.000000+00:00",
    }
    job.leave(0, **later)
    assert generate() == NO  # the same step by number, of a training that went on differently
    job.leave(1, **later)
    assert generate() == ("0,1", '{"0,2": 0, "1,3": 1}')
