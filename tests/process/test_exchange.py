"""State and bucket layout across a recovery, with real gloo groups of 2 to 4 processes.

The ranks are forked from a helper process (scripts/exchanging.py). A fault is an agreed stop of all
ranks; the victim then plays its own replacement: it forgets everything but its black box.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.process import harness

SCRIPT = str(Path(__file__).parent / "scripts" / "exchanging.py")


def launch(world, scenario, **options):
    """Run `scenario` on `world` processes. Returns what each rank said."""
    return launch_and_read(world, scenario, **options)[0]


def launch_and_read(world, scenario, **options):
    """The same, and what was written to the terminal."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, SCRIPT, str(world), scenario, name, json.dumps(options)]
        run = harness.Output(
            command, harness.environment(), directory / "output", directory, warm=harness.TORCHRUNS
        )
        try:
            done = run.wait(120)
        finally:
            run.end()
        assert done.returncode == 0, done.output[-6000:]
        results = [Path(directory, f"rank{rank}").read_text() for rank in range(world)]
        return [json.loads(result) for result in results], done.output


_plain_runs = {}


def plain(world, **options):
    key = json.dumps([world, options], sort_keys=True)
    if key not in _plain_runs:
        _plain_runs[key] = launch(world, "train", **options)
    return _plain_runs[key]


def digests(results):
    return [(r["digest"], r["random"]) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 1, 2, 5])
def test_a_replaced_rank_leaves_no_trace_in_the_result(version):
    for victim in (0, 2):
        got = launch(3, "train", faults=[{"version": version, "victims": [victim]}])
        assert digests(got) == digests(plain(3))
        assert got[victim]["restored"] == [
            f"received version {version} from rank {1 if victim == 0 else 0}"
        ]
        assert got[1]["restored"] == [f"kept in memory at version {version}"]


@pytest.mark.slow
def test_many_faults_in_a_row_and_two_victims_at_once():
    faults = [
        {"version": 1, "victims": [0]},
        {"version": 1, "victims": [1]},
        {"version": 2, "victims": [0, 1]},
        {"version": 4, "victims": []},
    ]
    assert digests(launch(3, "train", faults=faults)) == digests(plain(3))


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 1, 3])
def test_ranks_that_are_one_version_behind_receive_the_newest(version):
    """Rank 1 (killed) and rank 2 (alive) had not stepped when rank 0 had committed."""
    got = launch(3, "train", faults=[{"version": version, "victims": [1], "behind": [1, 2]}])
    assert digests(got) == digests(plain(3))
    assert got[2]["restored"] == [f"received version {version + 1} from rank 0"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["assigned", "through data", "in place"])
def test_averages_in_the_model_are_those_of_the_version(variant):
    """One is written in each forward pass, one behind each optimizer step.

    Ranks are replaced, are behind, and are stopped again in the step after that.
    """
    faults = [
        {"version": 2, "victims": [1]},
        {"version": 3, "victims": [1], "behind": [1, 2]},
        {"version": 4, "victims": [0]},
        {"version": 4, "victims": []},
        {"version": 6, "victims": [], "torn": [0]},
    ]
    got = launch(3, "train", variant=variant, faults=faults)
    assert digests(got) == digests(plain(3, variant=variant))


@pytest.mark.slow
def test_a_torn_copy_is_replaced():
    got = launch(2, "train", faults=[{"version": 3, "victims": [], "torn": [1]}])
    assert digests(got) == digests(plain(2))
    assert got[1]["restored"] == ["received version 4 from rank 0"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [
    {"victims": [1], "behind": [1, 2]}, {"victims": [1], "torn": [1, 2]}, {"victims": [1]},
])  # fmt: skip
def test_values_that_differ_between_ranks_stay_with_their_rank(fault):
    """Others have completed a step in which this rank was stopped, and send it their state.

    What it had changed before the optimizer began is there; what it had still to change is not, and
    a warning says so.
    """
    results, output = launch_and_read(3, "train", faults=[{"version": 3, **fault}])
    behind = fault.get("behind") or fault.get("torn") or ()
    # with `seen`, a schedule and a generator, all of which are the same on all ranks
    assert digests(results) == digests(plain(3))
    assert [result["cursor"] for result in results] == [8, 1008, 2008]
    lost = [1 if rank in behind else 0 for rank in range(3)]
    assert [result["spent"] for result in results] == [8 - lost[0], 1008 - lost[1], 2008 - lost[2]]
    for rank in range(3):
        told = f"rank {rank}: TrainState 'train': what differs between ranks is as" in output
        assert told == bool(lost[rank])
        assert "missing for that step in spent\n" in output or not any(lost)


@pytest.mark.slow
@pytest.mark.parametrize("first", [
    {"victims": [], "behind": [0, 1]}, {"victims": [1], "behind": [1]},
])  # fmt: skip
def test_what_a_rank_got_at_a_fault_is_its_own_at_the_next(first):
    """Rank 1 is behind, and killed before its next commit; rank 0, its source, may be behind."""
    faults = [{"version": 3, **first}, {"version": 4, "victims": [1]}]
    results, output = launch_and_read(3, "train", faults=faults)
    assert results[1]["restored"][1] == "received version 4 from rank 0"
    assert digests(results) == digests(plain(3))
    assert [result["cursor"] for result in results] == [8, 1008, 2008]
    lost = [1 if rank in first["behind"] else 0 for rank in range(3)]
    assert [result["spent"] for result in results] == [8 - lost[0], 1008 - lost[1], 2008]
    assert output.count("as this rank had it before it was") == sum(lost)  # at the first


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[], [1]])
def test_a_rank_that_had_no_state_yet_begins_with_its_own(victims):
    fault = {"version": 0, "victims": victims, "unborn": [1, 2]}
    results, output = launch_and_read(3, "train", faults=[fault])
    assert results[2]["restored"] == ["received version 0 from rank 0"]
    assert [result["cursor"] for result in results] == [8, 1008, 2008]
    assert [result["spent"] for result in results] == [8, 1008, 2008]
    assert digests(results) == digests(plain(3))
    assert "no RNG and sampler state" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    ["outside", "accumulate", "sgd", "adamw", "late_ddp", "static", "unused", "default_cap"],
)
def test_variants_of_the_script_end_with_the_same_bits(variant):
    got = launch(
        2,
        "train",
        variant=variant,
        faults=[{"version": 2, "victims": [0]}, {"version": 4, "victims": [1], "behind": [1]}],
    )
    assert digests(got) == digests(plain(2, variant=variant))


@pytest.mark.slow
def test_ranks_without_a_layout_take_that_of_another():
    got = launch(3, "train", faults=[{"version": 2, "victims": [2]}], forgetful=[0, 2])
    assert digests(got) == digests(plain(3))


@pytest.mark.slow
def test_without_the_layout_the_bits_differ():
    """The premise of taskd.worker.state.buckets: if this fails, torch no longer needs it."""
    got = launch(3, "train", faults=[{"version": 2, "victims": [2]}], keep_layout=False)
    assert digests(got) != digests(plain(3))


@pytest.mark.slow
def test_a_shape_mismatch_is_an_error_on_both_sides_and_no_hang():
    got = launch(2, "mismatch")
    for result in got:
        assert "model.0.weight has shape (3, 2) on rank 0 and (4, 2) on rank 1" in result["error"]


@pytest.mark.slow
def test_large_and_odd_tensors_arrive_whole():
    assert all(result["equal"] for result in launch(3, "odd"))
