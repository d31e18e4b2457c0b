"""Who hangs: marks of ranks in, verdicts out."""

import dataclasses
import random

import pytest

from taskd.core.marks import Activity, GroupMark, Mark
from taskd.core.policy.hangs import SMALL_JOB, HangDetector, Verdict
from taskd.core.timeouts import Timeouts
from tests.executed import lines_of

TIMEOUTS = Timeouts.derive()
STEP_S = 0.05
LIVES = [(rank, 0) for rank in range(4)]


def group(entered: int, left: int, number: int = 7, name: str = "0") -> GroupMark:
    return GroupMark(number, name, entered, left, "all_reduce")


def waiting(rank: int, still_s: float = 2.5, **changes) -> Mark:
    """A rank that has begun a collective which culprits have not."""
    return dataclasses.replace(
        Mark(
            rank,
            0,
            0,
            20,
            "backward",
            still_s,
            is_waiting=True,
            slowest_s=STEP_S,
            groups=(group(41, 40),),
        ),
        **changes,
    )


def standing(rank: int, still_s: float = 2.5, **changes) -> Mark:
    """A rank that should have begun it."""
    return dataclasses.replace(
        Mark(
            rank,
            0,
            0,
            20,
            "forward",
            still_s,
            activity=Activity.ASLEEP,
            slowest_s=STEP_S,
            groups=(group(40, 40),),
        ),
        **changes,
    )


def judge(*marks: Mark, after_s: float = 0.0, hangs: int = 0) -> Verdict | None:
    progress = HangDetector(TIMEOUTS)
    progress.note(99.0, [standing(2)])
    for _ in range(hangs):
        assert progress.count(2) == 20
    progress.note(100.0, marks)
    return progress.judge(100.0 + after_s, 0, [(mark.rank, mark.incarnation) for mark in marks])


def culprits(verdict: Verdict | None) -> list[int]:
    return [] if verdict is None else [culprit.rank for culprit in verdict.culprits]


def test_the_rank_that_others_wait_for_is_the_culprit() -> None:
    verdict = judge(waiting(0), waiting(1), standing(2), waiting(3))
    assert verdict is not None
    (culprit,) = verdict.culprits
    assert culprit.rank == 2
    assert culprit.detail == (
        "asleep for 2.5 s in forward; ranks 0, 1, 3 wait for it in "
        "all_reduce "
        "41 of group 0, which it has not begun"
    )


def test_nobody_is_one_before_the_floor_or_when_nobody_waits() -> None:
    assert judge(waiting(0, 1.9), waiting(1, 1.9), standing(2, 1.9), waiting(3, 1.9)) is None
    assert judge(*(standing(rank, 100.0) for rank in range(4))) is None


def test_an_agent_that_is_late_makes_nobody_stand_longer() -> None:
    """What its ranks do meanwhile is not known.

    Neither that they stand, nor that they still wait.
    """
    for late_s in (0.2, 1.5, 25.0):
        assert (
            judge(
                waiting(0, 1.9), waiting(1, 1.9), standing(2, 1.9), waiting(3, 1.9), after_s=late_s
            )
            is None
        )
    progress = HangDetector(TIMEOUTS)
    progress.note(100.0, [standing(2), standing(3)])
    progress.note(105.0, [waiting(0), waiting(1)])
    assert progress.judge(105.0, 0, LIVES) is None
    progress.note(105.1, [standing(2, 7.6), waiting(3)])
    assert culprits(progress.judge(105.1, 0, LIVES)) == [2]


def test_the_network_is_not_blamed_while_an_agent_is_late() -> None:
    progress = HangDetector(TIMEOUTS)
    progress.note(100.0, [waiting(2, 5.0), waiting(3, 5.0)])
    progress.note(131.0, [waiting(0, 31.0), waiting(1, 31.0)])
    assert progress.judge(131.0, 0, LIVES) is None


def test_a_victim_that_does_not_look_like_one_is_none() -> None:
    """Calls of NCCL come back at once.

    Rank 1 has begun what rank 2 has not, so it waits, whatever it looks like.
    """
    groups = {1: (group(40, 40),), 2: (group(39, 39),)}
    ranks = [
        standing(0, 9.0, groups=(group(41, 41),)),
        standing(1, 9.0, groups=groups[1]),
        standing(2, 9.0, groups=groups[2], phase="checkpoint"),
        standing(3, 9.0, groups=(group(41, 41),)),
    ]
    assert judge(*ranks) is None


def test_a_rank_that_waited_when_it_last_spoke_gets_time() -> None:
    """Its Python thread gets no processor.

    The machine has too much to do, with a checkpoint for example.
    """
    ranks = [
        waiting(0, 9.0),
        waiting(1, 9.0, python_s=1.5, activity=Activity.ASLEEP),
        standing(2, 9.0, phase="checkpoint"),
        waiting(3, 9.0),
    ]
    assert judge(*ranks) is None
    starved = dataclasses.replace(ranks[1], frozen_s=1.2)
    assert judge(ranks[0], starved, *ranks[2:]) is None
    assert (
        judge(
            ranks[0],
            dataclasses.replace(starved, is_waiting=False, groups=(group(40, 40),)),
            *ranks[2:],
        )
        is None
    )


def test_a_checkpoint_of_all_with_a_call_left_open_is_not_the_network() -> None:
    saving = {"phase": "checkpoint", "checkpoint_s": 60.0, "activity": Activity.ASLEEP}
    assert judge(*(waiting(rank, 31.0, **saving) for rank in range(4))) is None
    assert judge(*(waiting(rank, 301.0, **saving) for rank in range(4))) is not None


def test_a_victim_that_has_waited_only_for_a_moment_proves_nothing() -> None:
    assert judge(waiting(0, 0.1), waiting(1, 0.1), standing(2), waiting(3, 0.1)) is None


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({}, 2.0),
        ({"slowest_s": 4.0}, 12.0),
        ({"activity": Activity.BUSY}, 300.0),
        ({"activity": Activity.DISK}, 300.0),
        ({"activity": Activity.UNKNOWN}, 300.0),
        ({"activity": Activity.BUSY, "python_s": 2.0}, 2.0),  # the interpreter lock is kept
        ({"activity": Activity.DISK, "python_s": 2.0}, 300.0),  # ... by a library that reads a file
        ({"phase": "data"}, 300.0),
        ({"phase": "data", "activity": Activity.BUSY, "python_s": 2.0}, 300.0),
        ({"phase": "checkpoint"}, 1800.0),
        ({"phase": "checkpoint", "checkpoint_s": 200.0}, 600.0),
        ({"phase": "checkpoint", "checkpoint_s": 1.0}, 300.0),
        # A small file was read at the start, and a large one is written now.
        ({"phase": "checkpoint", "checkpoint_s": 1.0, "activity": Activity.BUSY}, 1800.0),
        ({"phase": "checkpoint", "checkpoint_s": 1.0, "activity": Activity.DISK}, 1800.0),
        ({"phase": "checkpoint", "checkpoint_s": 1.0, "activity": Activity.UNKNOWN}, 1800.0),
        (
            {
                "phase": "checkpoint",
                "checkpoint_s": 1.0,
                "activity": Activity.BUSY,
                "python_s": 2.0,
            },
            300.0,
        ),
        ({"phase": "evaluation"}, 1800.0),
        ({"phase": "evaluation", "evaluation_s": 1.0, "activity": Activity.BUSY}, 1800.0),
        ({"phase": "evaluation", "evaluation_s": 200.0}, 600.0),
        ({"phase": "entered"}, 600.0),
        ({"slowest_s": 0.0}, 600.0),  # it has not done two steps yet
        ({"activity": Activity.TRACED}, None),
        ({"phase": "returned"}, None),
    ],
)
def test_how_long_a_rank_may_stand_depends_on_what_it_does(
    changes: dict, limit_s: float | None
) -> None:
    def ranks(still_s: float) -> list[Mark]:
        slowest = {"slowest_s": changes["slowest_s"]} if changes.get("slowest_s") else {}
        return [
            *(waiting(rank, still_s, **slowest) for rank in (0, 1, 3)),
            standing(2, still_s, **changes),
        ]

    if limit_s is None:
        assert judge(*ranks(100_000.0)) is None
        return
    assert judge(*ranks(limit_s - 0.1)) is None
    assert culprits(judge(*ranks(limit_s + 0.1))) == [2]


def test_a_checkpoint_of_another_rank_teaches_too() -> None:
    ranks = [
        waiting(0, 400.0, checkpoint_s=60.0),
        waiting(1, 400.0),
        standing(2, 400.0, phase="checkpoint"),
        waiting(3, 400.0),
    ]
    assert culprits(judge(*ranks)) == [2]


def test_what_took_long_and_hangs_again_at_the_same_step_gets_more_time() -> None:
    ranks = [waiting(0, 15.0), waiting(1, 15.0), standing(2, 15.0), waiting(3, 15.0)]
    assert culprits(judge(*ranks)) == [2]
    assert judge(*ranks, hangs=1) is None
    longer = [dataclasses.replace(mark, still_s=17.0) for mark in ranks]
    assert culprits(judge(*longer, hangs=1)) == [2]
    assert judge(*(dataclasses.replace(mark, still_s=115.0) for mark in ranks), hangs=2) is None
    further = [dataclasses.replace(mark, version=21) for mark in ranks]
    assert culprits(judge(*further, hangs=2)) == [2]


def test_the_steps_of_those_who_waited_for_a_checkpoint_are_not_the_measure() -> None:
    slow = {"slowest_s": 60.0}
    assert culprits(
        judge(waiting(0, **slow), waiting(1), standing(2, **slow), waiting(3, **slow))
    ) == [2]


def test_a_stopped_rank_is_found_even_if_nobody_waits_yet() -> None:
    stopped = standing(2, 2.2, frozen_s=2.1, activity=Activity.STOPPED)
    moving = [waiting(rank, 0.01, is_waiting=False) for rank in (0, 1, 3)]
    assert culprits(judge(*moving, stopped)) == [2]
    assert judge(*moving, dataclasses.replace(stopped, activity=Activity.DISK)) is None
    assert culprits(
        judge(*moving, dataclasses.replace(stopped, activity=Activity.DISK, frozen_s=31.0))
    ) == [2]
    assert (
        judge(*moving, dataclasses.replace(stopped, activity=Activity.TRACED, frozen_s=1000.0))
        is None
    )


def test_a_rank_that_was_stopped_when_its_agent_last_spoke_may_run_again() -> None:
    stopped = standing(2, 2.2, frozen_s=2.1, activity=Activity.STOPPED)
    moving = [waiting(rank, 0.01, is_waiting=False) for rank in (0, 1, 3)]
    limit_s = 2 * TIMEOUTS.heartbeat_s
    assert culprits(judge(*moving, stopped, after_s=limit_s)) == [2]
    assert judge(*moving, stopped, after_s=limit_s + 0.1) is None


def test_a_rank_that_was_stopped_while_it_waited_is_still_the_culprit() -> None:
    stopped = waiting(2, 2.2, frozen_s=2.1, python_s=2.2, activity=Activity.STOPPED)
    assert culprits(judge(waiting(0), waiting(1), waiting(3), stopped)) == [2]


def test_when_all_would_be_killed_nobody_is() -> None:
    assert (
        judge(*(standing(rank, 9.0, frozen_s=9.0, activity=Activity.STOPPED) for rank in range(4)))
        is None
    )


def test_all_in_the_same_collective_is_the_network() -> None:
    verdict = judge(*(waiting(rank, 31.0) for rank in range(4)))
    assert verdict is not None
    assert verdict.culprits == ()
    assert verdict.network == (
        "all ranks wait in all_reduce 41 of group 0 for 31.0 s: the same collective"
    )
    assert judge(*(waiting(rank, 29.0) for rank in range(4))) is None
    assert (
        judge(*(waiting(rank, 31.0) for rank in range(3)), standing(3, 31.0, phase="checkpoint"))
        is None
    )


def test_who_waits_for_those_who_have_returned_waits_in_vain() -> None:
    """Two ranks, of which one makes fewer steps: nobody else is left to be compared with."""
    progress = HangDetector(TIMEOUTS)
    progress.note(100.0, [waiting(1, 31.0)])
    assert progress.judge(100.0, 0, [(1, 0)]) is None, "a job of one rank waits for nobody"
    verdict = progress.judge(100.0, 0, [(1, 0)], [0])
    assert verdict is not None
    assert verdict.culprits == ()
    assert verdict.network == (
        "rank 1 waits in all_reduce 41 of group 0 for 31.0 s, and the function of rank 0 has "
        "returned: all have to make equal steps"
    )
    progress.note(100.0, [waiting(1, 29.0)])
    assert progress.judge(100.0, 0, [(1, 0)], [0]) is None
    progress.note(100.0, [standing(1, 31.0)])
    assert progress.judge(100.0, 0, [(1, 0)], [0]) is None, "it may have something to do"


def test_ranks_in_collectives_that_do_not_fit_together_are_all_left_alone() -> None:
    theirs = (group(41, 40), group(10, 10, number=8, name="1"))
    his = (group(40, 40), group(11, 10, number=8, name="1"))
    verdict = judge(
        *(waiting(rank, 31.0, groups=theirs) for rank in (0, 1, 3)), waiting(2, 31.0, groups=his)
    )
    assert verdict is not None
    assert verdict.culprits == ()
    assert (
        "all_reduce 11 of group 1 and all_reduce 41 of group 0 for 31.0 s: collectives that do "
        "not fit together"
    ) in verdict.network


def test_nccl_calls_come_back_at_once_so_counts_decide() -> None:
    """No rank is known to be waiting; one has begun fewer collectives."""
    ahead = [standing(rank, phase="backward", groups=(group(41, 41),)) for rank in (0, 1, 3)]
    assert culprits(judge(*ahead, standing(2))) == [2]
    assert judge(*(standing(rank, groups=(group(41, 41),)) for rank in range(4))) is None


def test_marks_of_another_generation_or_life_count_for_nothing() -> None:
    ranks = [waiting(0), waiting(1), standing(2), waiting(3)]
    progress = HangDetector(TIMEOUTS)
    progress.note(100.0, ranks)
    assert culprits(progress.judge(100.0, 0, LIVES)) == [2]
    assert progress.judge(100.0, 1, LIVES) is None
    assert progress.judge(100.0, 0, [(0, 0), (1, 0), (2, 1), (3, 0)]) is None


class Model:
    """Four ranks in lockstep, in virtual time: each does its own work, then all reduce together.

    Looked at as agents do.
    """

    def __init__(self) -> None:
        self.progress = HangDetector(TIMEOUTS)
        self.now = 0.0
        self.version = 0
        self.slowest = [0.0] * 4
        self.longest_checkpoint = [0.0] * 4
        self.looked_at = 0.0
        self.verdicts: list[Verdict] = []

    def step(
        self,
        took: list[float],
        phase: str = "forward",
        activity: str = Activity.ASLEEP,
        *,
        learn: bool = True,
    ) -> None:
        """One step in which rank i works for took[i] seconds, unless a verdict comes first."""
        began, end = self.now, self.now + max(took)
        while (
            look := self.looked_at
            + (0.25 if self.now - began > 0.75 or end - began > 0.75 else 1.0)
        ) < end:
            self.looked_at = max(look, began)
            self.now = self.looked_at
            still = self.now - began
            self.progress.note(
                self.now,
                [self._mark(rank, still, took[rank], phase, activity) for rank in range(4)],
            )
            verdict = self.progress.judge(self.now, 0, LIVES)
            if verdict is not None:
                self.verdicts.append(verdict)
                return
        self.now = end
        self.version += 1
        if not learn or self.version == 1:
            return
        for rank in range(4):
            own = took[rank] if phase != "checkpoint" else STEP_S
            waited = max(took) if phase != "checkpoint" or took[rank] < max(took) else own
            self.slowest[rank] = max(self.slowest[rank], waited)
            if phase == "checkpoint":
                self.longest_checkpoint[rank] = max(
                    self.longest_checkpoint[rank], took[rank] if took[rank] == max(took) else 0.0
                )

    def _mark(self, rank: int, still: float, took: float, phase: str, activity: str) -> Mark:
        common = {"slowest_s": self.slowest[rank], "checkpoint_s": self.longest_checkpoint[rank]}
        if still >= took:
            return Mark(
                rank,
                0,
                0,
                self.version,
                "backward",
                still - took,
                is_waiting=True,
                groups=(group(self.version + 1, self.version),),
                **common,
            )
        return Mark(
            rank,
            0,
            0,
            self.version,
            phase,
            still,
            activity=activity if still > 1.5 else Activity.UNKNOWN,
            groups=(group(self.version, self.version),),
            **common,
        )


@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_in_ten_thousand_steps(seed: int) -> None:
    """1 % of the steps 20 times slower on one rank, which sleeps; a slow first step.

    A checkpoint of a minute, twice.
    """
    chance, model = random.Random(seed), Model()
    model.step([30.0, 31.0, 45.0, 30.5], activity=Activity.BUSY)
    slow = 0
    for number in range(10_000):
        took = [STEP_S * chance.uniform(0.9, 1.1) for _ in range(4)]
        if chance.random() < 0.01:
            slow += 1
            took[chance.randrange(4)] *= 20
        if number in (3000, 7000):
            model.step([60.0, STEP_S, STEP_S, STEP_S], phase="checkpoint", activity=Activity.DISK)
        model.step(took)
    assert slow > 50
    assert model.verdicts == []


def test_after_all_that_a_hang_is_still_found_at_once() -> None:
    model = Model()
    model.step([30.0] * 4, activity=Activity.BUSY)
    for _ in range(300):
        model.step([STEP_S] * 4)
    began = model.now
    model.step([STEP_S, STEP_S, 1e9, STEP_S])
    assert culprits(model.verdicts[0]) == [2]
    assert model.now - began < 2.5


def noted(ranks: int, still_s: float) -> HangDetector:
    progress = HangDetector(TIMEOUTS)
    progress.note(100.0, [standing(rank, still_s) for rank in range(ranks)])
    return progress


def test_nobody_is_judged_while_all_move() -> None:
    progress = noted(4, TIMEOUTS.hang_floor_s - 0.1)
    assert not progress.is_due(100.0)
    progress.note(101.0, [standing(2, TIMEOUTS.hang_floor_s)])
    assert progress.is_due(101.0)
    progress.note(102.0, [standing(2, 0.1)])
    assert not progress.is_due(102.0)
    progress.note(103.0, [standing(2, 0.1, frozen_s=TIMEOUTS.hang_floor_s)])
    assert progress.is_due(103.0)


@pytest.mark.parametrize(("ranks", "judged"), [(SMALL_JOB, 1000), (2048, 32), (32768, 3)])
def test_a_large_job_that_stands_is_judged_now_and_then(ranks: int, judged: int) -> None:
    progress = noted(ranks, 3.0)
    due = sum(progress.is_due(100.0 + millisecond / 1000) for millisecond in range(1000))
    assert judged == pytest.approx(due, rel=0.05)


def judge_all_that_stand(count: int) -> None:
    """All write a checkpoint; or all stand in a collective of which nobody tells who waits."""
    progress = HangDetector(TIMEOUTS)
    lives = [(rank, 0) for rank in range(count)]
    for changes in {"phase": "checkpoint"}, {"groups": (group(41, 40),)}:
        progress.note(100.0, [standing(rank, 2000.0, **changes) for rank in range(count)])
        assert progress.judge(100.0, 0, lives) is None


def test_twice_as_many_that_stand_are_twice_the_work() -> None:
    """All of them compared with all others would be minutes in a job of thousands."""
    few = lines_of(lambda: judge_all_that_stand(500), "taskd.core")
    many = lines_of(lambda: judge_all_that_stand(1000), "taskd.core")
    assert 500 < few < many < 2.1 * few
