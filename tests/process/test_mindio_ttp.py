"""A loop of Megatron's kind, written with mindio_ttp, on real processes: kills, repairs, dumps.

The script trains as its users write it; taskd's manager and agent are those of any job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

PACKAGE = str(harness.ROOT / "packages" / "mindio_ttp")
PATHS = {"PYTHONPATH": f"{harness.ROOT}:{PACKAGE}"}
RANKS = range(4)


@pytest.fixture(scope="session")
def digest(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path
) -> Callable[[str], str]:
    """Of the parameters after a training without taskd, by layout; the same on all ranks."""

    def digest_of(layout: str) -> str:
        def train() -> list[str]:
            directory = tmp_path_factory.mktemp("reference")
            harness.run_plainly(
                directory,
                str(harness.SCRIPTS / "megatron.py"),
                nproc=4,
                FACTS=str(directory),
                LAYOUT=layout,
                **PATHS,
            )
            facts = harness.facts_in(directory)
            return [fact["digest"] for fact in facts if fact["what"] == "returned"]

        digests = harness.once(shared_folder, f"megatron {layout}", train)
        assert len(digests) == 4
        assert len(set(digests)) == 1
        return digests[0]

    return digest_of


def run(job: harness.Job, *, faults: int, returncode: int = 0) -> harness.Finished:
    """The job ended like this, every fault happened, nothing is left."""
    before = len(job.facts("fault"))
    finished = job.run("megatron.py")
    assert finished.returncode == returncode, finished.output[-6000:]
    assert len(job.facts("fault")) == before + faults
    assert job.manager is not None
    job.manager.wait(20)
    assert job.leftovers() == set()
    return finished


def calls(job: harness.Job, name: str) -> list[dict]:
    return [fact for fact in job.facts("handler") if fact["handler"] == name]


def replaced(job: harness.Job) -> set[int]:
    """Ranks of which more than one process has entered the function."""
    seen = {(fact["rank"], fact["pid"]) for fact in job.facts("entered")}
    return {rank for rank in RANKS if len([1 for other, _ in seen if other == rank]) > 1}


@pytest.mark.parametrize(("layout", "fault", "source", "steps"), [
    ("whole", "2@5:forward:kill", 0, {5}),
    ("parts", "1@5:gather:kill", 3, {5}),  # behind its step, before a collective
    ("parts", "2@8:optimizer:kill", 0, {8, 9}),  # whoever has heard the vote ends the step
])  # fmt: skip
def test_a_rank_that_is_killed_is_repaired_in_place_by_the_handlers(
    tmp_path: pathlib.Path,
    digest: Callable[[str], str],
    layout: str,
    fault: str,
    source: int,
    steps: set[int],
) -> None:
    victim = int(fault[0])
    with harness.job(tmp_path, FAULTS=fault, LAYOUT=layout, **PATHS) as job:
        run(job, faults=1)
        assert job.digests() == dict.fromkeys(RANKS, digest(layout))
        assert replaced(job) == {victim}
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
        step = record["version"]
        assert step in steps
        # who was called, for what, in which order
        survivors = set(RANKS) - {victim}
        for name, ranks in (
            ("stop", survivors), ("clean", survivors), ("rebuild", set(RANKS)),
            ("repair", {source, victim}), ("rollback", set(RANKS)),
        ):  # fmt: skip
            assert {fact["rank"] for fact in calls(job, name)} == ranks, name
        for rank in survivors:
            done = [fact["handler"] for fact in job.facts("handler") if fact["rank"] == rank]
            assert [one for one in done if one != "repair"] == [
                "stop", "clean", "rebuild", "rollback",
            ]  # fmt: skip
        assert all(fact["is_default_there"] for fact in calls(job, "rebuild"))
        assert all(fact["ranks"] == [victim] for fact in calls(job, "rebuild"))
        infos = {fact["rank"]: fact["info"] for fact in calls(job, "repair")}
        common = {"type": [0], "src": [source], "dst": [victim],
                  "rank_list": sorted((source, victim))}  # fmt: skip
        assert infos == {
            source: common | {"repair_type": "RT_SEND"},
            victim: common | {"repair_type": "RT_RECV_REPAIR"},
        }
        assert all(fact["is_given"] and fact["step"] == step for fact in calls(job, "repair"))
        (rebooted,) = job.facts("rebooted")
        assert (rebooted["rank"], rebooted["type"]) == (victim, "arf")


@pytest.mark.parametrize(("layout", "savers"), [("parts", [0, 3]), ("whole", [0])])
def test_the_dump_is_made_by_the_handlers_and_the_next_start_goes_on_from_it(
    tmp_path: pathlib.Path, layout: str, savers: list[int]
) -> None:
    with harness.job(
        tmp_path, FAULTS="1@5:forward:kill", LAYOUT=layout, TASKD_RECOVER_STRATEGY="dump", **PATHS
    ) as job:
        finished = run(job, faults=1, returncode=2)
        assert finished.last_line.endswith(
            "rank 1 ended with SIGKILL at step 5; step 5 was saved in the checkpoint that the "
            "script's rename handler has named"
        )
        assert {fact["rank"] for fact in calls(job, "save")} == set(savers)
        # the ranks that save have met in a group of their own
        assert [fact["count"] for fact in job.facts("saved")] == [len(savers)] * len(savers)
        assert all(fact["info"] == [{"type": 0, "ranks": savers}] for fact in calls(job, "save"))
        (named,) = calls(job, "rename")
        assert named["time"] > max(fact["time"] for fact in job.facts("saved"))
        whole = tmp_path / "checkpoints" / "iter_0000005"
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [whole.name]
        assert len(list(whole.iterdir())) == len(savers)
        assert not (tmp_path / "taskd_checkpoints").exists()
        entries = len(job.facts("entered"))
        run(job, faults=0)
        assert {fact["step"] for fact in job.facts("entered")[entries:]} == {5}
        steps = {fact["step"] for fact in job.facts("committed") if fact["rank"] == 0}
        assert steps == set(range(1, 13))


def test_what_cannot_be_repaired_in_place_is_saved_where_that_is_allowed(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(
        tmp_path,
        FAULTS="1@5:forward:kill",
        WITHOUT="repair",
        TASKD_RECOVER_STRATEGY="recover-in-place,dump",
        **PATHS,
    ) as job:
        finished = run(job, faults=1, returncode=2)
        assert "no repair handler" in finished.output
        assert "step 5 was saved in the checkpoint" in finished.last_line
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000005"]


def test_a_dump_that_a_handler_cannot_write_is_none(tmp_path: pathlib.Path) -> None:
    with harness.job(
        tmp_path,
        FAULTS="1@5:forward:kill;0@5:save:raise",
        TASKD_RECOVER_STRATEGY="dump",
        **PATHS,
    ) as job:
        finished = run(job, faults=2, returncode=1)
        assert "and no dump: rank 0: ValueError: a bad sample" in finished.last_line
        assert calls(job, "rename") == []
        assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_memory_is_repaired_in_the_same_process(
    tmp_path: pathlib.Path, digest: Callable[[str], str]
) -> None:
    with harness.job(tmp_path, FAULTS="1@5:forward:uce", **PATHS) as job:
        run(job, faults=1)
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert replaced(job) == set()
        assert [record["strategy"] for record in job.recoveries()] == ["retry"]
        assert {fact["rank"] for fact in calls(job, "clean") if fact["is_uce"]} == {1}
        told = {fact["rank"]: fact for fact in calls(job, "repair")}
        assert told[1]["info"]["repair_type"] == "RT_UCE_HIGHLEVEL"
        assert (told[1]["need_rebuild"], told[0]["need_rebuild"]) == (True, False)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"BAD": "another group"}, "has not declared the same group"),
    ({"BAD": "another rank"}, "tft_init_processor was told rank 3 of 4, and this is rank 0 of 4"),
    ({"BAD": "no processor"}, "rank 0 has no processor"),
    ({"WITHOUT": "repair"}, "no repair handler"),
])  # fmt: skip
def test_where_nothing_can_be_repaired_all_start_anew_and_the_log_says_why(
    tmp_path: pathlib.Path, digest: Callable[[str], str], wrong: dict[str, str], said: str
) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill", **wrong, **PATHS) as job:
        finished = run(job, faults=1)
        assert said in finished.output
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert replaced(job) == set(RANKS)
        assert job.recoveries()[-1]["strategy"] == "restart"


def test_handlers_that_fail_again_and_again_cost_a_restart_and_not_the_job(
    tmp_path: pathlib.Path, digest: Callable[[str], str]
) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill;0@5:repair:always-raise", **PATHS) as job:
        run(job, faults=3)
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert job.recoveries()[-1]["strategy"] == "restart"


def test_a_handler_that_hangs_costs_its_process_alone(
    tmp_path: pathlib.Path, digest: Callable[[str], str]
) -> None:
    """The others wait for it in a collective of the same handler, and have the same limit."""
    with harness.job(
        tmp_path,
        FAULTS="2@5:forward:kill;3@5:rollback:hang",
        LAYOUT="parts",
        TTP_NORMAL_ACTION_TIME_LIMIT="30",
        TASKD_FAULT_TIMEOUT="6",
        **PATHS,
    ) as job:
        finished = run(job, faults=2)
        assert "the rollback handler has not returned after 30 s" in finished.output
        assert job.digests() == dict.fromkeys(RANKS, digest("parts"))
        assert replaced(job) == {2, 3}
        assert {record["strategy"] for record in job.recoveries()} <= {"recover-in-place", "retry"}


def test_a_process_whose_clean_handler_fails_is_replaced(
    tmp_path: pathlib.Path, digest: Callable[[str], str]
) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill;0@5:clean:raise", **PATHS) as job:
        finished = run(job, faults=2)
        assert "the clean handler has failed" in finished.output
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert replaced(job) == {0, 2}


@pytest.mark.parametrize(("bad", "said", "anew"), [
    ("start twice", "it was called twice", {2}),
    # an interrupt could meet the optimizer while it writes: nobody's copy is gone on from
    ("end without start", "and not begun", set(RANKS)),
])  # fmt: skip
def test_steps_that_are_counted_wrongly_are_named_and_end_well(
    tmp_path: pathlib.Path,
    digest: Callable[[str], str],
    bad: str,
    said: str,
    anew: set[int],
) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill", BAD=bad, **PATHS) as job:
        finished = run(job, faults=1)
        assert said in finished.output
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert replaced(job) == anew


def test_without_a_manager_training_goes_on_and_a_fault_restarts_all(
    tmp_path: pathlib.Path, digest: Callable[[str], str]
) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill", TASKD_FAULT_TIMEOUT="6", **PATHS) as job:
        finished = job.run("megatron.py", manager=False)
        assert finished.returncode == 0, finished.output[-6000:]
        assert len(job.facts("fault")) == 1
        assert job.digests() == dict.fromkeys(RANKS, digest("whole"))
        assert job.leftovers() == set()


def test_a_script_that_asks_for_its_dump_gets_it_at_the_end_of_a_step(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(
        tmp_path,
        FAULTS="3@6:step:notify",
        TASKD_RECOVER_STRATEGY="recover-in-place,dump",
        STEPS="200",
        **PATHS,
    ) as job:
        finished = run(job, faults=1, returncode=2)
        (named,) = calls(job, "rename")
        # All train on until they hear of it, and end their step. That of the last one is told to
        # nobody: the interrupt that it held off leaves the function.
        newest = {fact["rank"]: fact["step"] for fact in job.facts("committed")}
        assert newest == dict.fromkeys(RANKS, named["step"] - 1)
        assert 6 <= named["step"] < 200
        assert f"step {named['step']} was saved" in finished.last_line
        entries = len(job.facts("entered"))
        run(job, faults=0)
        assert {fact["step"] for fact in job.facts("entered")[entries:]} == {named["step"]}
        assert len(job.digests()) == 4
