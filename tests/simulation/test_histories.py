"""Random histories, other ones in each run.

What the fixed examples beside do not hold is found sooner or later.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from taskd.core.node.lives import Lives
from taskd.testing import FaultScript, NetworkQuality, SimulatedJob, Stuck, Trouble, histories

SEED = int(os.environ["TASKD_TEST_SEED"])
PARTS = 4  # so that several processes share them
SECONDS = 2.5  # of processor time, for each part; .ci/run plays some thousand more
# A cut takes Resume along; node 1 registers while its ranks wait with their offers, and nobody has
# set a deadline.
LOST_RESUME = FaultScript((
    Trouble(0.24318637815135638, "cut", 0, 0.1), Trouble(0.28454576024194606, "raise", 1, 0.1),
    Trouble(0.369204313894234, "kill", 0, 1.0),
    Trouble(0.8420036170408796, "cut", 1, 0.1),
))  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_histories_that_nobody_has_seen(part: int) -> None:
    tally = histories.play_many(SEED + part, seconds=SECONDS)
    for outcome in tally.bad:
        print(
            f"{outcome.kind}: {outcome.detail}\n    "
            f"{histories.replay_command(tally.seed, outcome.number)}"
        )
    assert not tally.bad, (
        f"{tally}; replay with: {histories.replay_command(tally.seed, tally.bad[0].number)}"
    )
    assert tally.succeeded > 10, tally


def lost_resume() -> SimulatedJob:
    quality = NetworkQuality(jitter_s=0.05, loss=0.1, duplicate=0.2)
    return SimulatedJob(
        nodes=3,
        ranks_per_node=2,
        steps=30,
        script=LOST_RESUME,
        seed=2841643,
        quality=quality,
        is_sharded=True,
    )


def test_a_resume_that_is_lost_while_ranks_offer_a_step() -> None:
    assert lost_resume().run().succeeded


def test_a_node_that_keeps_to_itself_who_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lives.reports
    monkeypatch.setattr(
        Lives,
        "reports",
        lambda self, now: tuple(
            replace(report, state="running", may_advance=False) if report.may_advance else report
            for report in honest(self, now)
        ),
    )
    with pytest.raises(
        Stuck,
        match=r"rank 2 is in asking; rank 3 is in asking; .* the manager is "
        r"resumed",
    ):
        lost_resume().run()


def test_a_history_follows_from_its_two_numbers() -> None:
    for number in range(5):
        one, other = histories.make(7, number), histories.make(7, number)
        assert one.script == other.script
        assert repr(one.run()).split("stories")[0] == repr(other.run()).split("stories")[0]


def test_the_command_replays_what_it_names() -> None:
    command = histories.replay_command(7, 3).split()[1:]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("ended: ")
    assert "AgentRegistered" in done.stdout
