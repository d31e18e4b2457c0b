"""The schedule of `python -m taskd.chaos`, its verdict, and what its command line refuses."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.chaos import __main__ as program
from taskd.chaos import schedule, verdict
from taskd.chaos.run import Injected, Outcome, replaced
from taskd.errors import ConfigError

KINDS = st.lists(st.sampled_from(sorted(schedule.KINDS)), min_size=1, unique=True)


@given(st.integers(), st.integers(1, 60), st.floats(0.01, 1000), KINDS)
def test_a_schedule_is_a_function_of_what_it_is_given(seed, count, every_s, kinds) -> None:
    faults = schedule.plan(seed, count, every_s, kinds)
    assert faults == schedule.plan(seed, count, every_s, kinds)
    assert [fault.number for fault in faults] == list(range(1, count + 1))
    assert all(0 <= fault.after_s <= 4 * every_s + 0.001 for fault in faults)
    counts = Counter(dict.fromkeys(kinds, 0))
    counts.update(fault.kind for fault in faults)
    assert set(counts) == set(kinds)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(), st.integers(1, 40), st.integers(1, 40))
def test_a_longer_schedule_begins_like_a_shorter_one(seed, count, more) -> None:
    kinds = schedule.DEFAULT_KINDS
    shorter = schedule.plan(seed, count, 3.0, kinds)
    assert schedule.plan(seed, count + more, 3.0, kinds)[:count] == shorter


@given(st.integers(0, 10**6 - 1), st.integers(1, 4096))
def test_a_fault_has_a_position_among_any_number_of_processes(choice, count) -> None:
    assert 0 <= schedule.PlannedFault(1, 0.0, "kill", choice).position(count) < count


def test_a_schedule_stays_what_it_was() -> None:
    """A seed that somebody has noted down means the same in every version."""
    assert schedule.plan(7, 3, 1.0, schedule.DEFAULT_KINDS) == [
        schedule.PlannedFault(1, 3.039, "kill", 787696),
        schedule.PlannedFault(2, 4.0, "stop", 98139),
        schedule.PlannedFault(3, 1.8, "manager", 562086),
    ]


def test_seeds_differ_and_every_rank_is_hit() -> None:
    one, other = (schedule.plan(seed, 200, 3.0, ("kill",)) for seed in (1, 2))
    assert one != other
    assert {fault.position(4) for fault in one} == {0, 1, 2, 3}
    assert 2.0 < sum(fault.after_s for fault in one) / 200 < 4.0


@pytest.mark.parametrize(
    ("text", "word"),
    [("kill,fire", "'fire' is none of"), ("exception", "from outside"), ("", "''")],
)
def test_an_unknown_kind_is_named(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        schedule.kinds_of(text)


@pytest.mark.parametrize(("count", "every_s"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, math.nan)])
def test_numbers_out_of_range_are_refused(count: int, every_s: float) -> None:
    with pytest.raises(ConfigError, match=r"is needed|are needed"):
        schedule.plan(1, count, every_s, ("kill",))


@given(st.sets(st.integers(1, 100), min_size=1, max_size=8), st.data())
def test_a_replacement_has_the_place_of_the_one_that_is_gone(pids, data) -> None:
    places = data.draw(st.permutations(sorted(pids)))
    gone = data.draw(st.sets(st.sampled_from(sorted(pids))))
    now = sorted(pids - gone | {pid + 1000 for pid in gone})
    found = replaced(places, now)
    assert sorted(found) == now
    assert all(new == old for new, old in zip(found, places, strict=True) if old not in gone)


# ---------------------------------------------------------------- the verdict


def record(total_s: float, redone: int = 0, **more: object) -> dict[str, object]:
    parts = {f"{part}_s": 0.1 for part in verdict.PARTS}
    return {
        **parts, "total_s": total_s, "steps_redone": redone, "strategy": "recover-in-place",
        "not_completed": "", "faults": [{"rank": 1, "kind": "killed"}], **more,
    }  # fmt: skip


def injected(number: int, kind: str = "kill", **more) -> Injected:
    return Injected(schedule.PlannedFault(number, 1.0, kind, 0), 7, 0, 1.0, True, **more)


def test_the_figures_of_a_verdict() -> None:
    outcome = Outcome(
        [
            injected(1, records=[record(0.2)]),
            injected(2, records=[record(0.3, 1, not_completed="a fault"), record(0.4, 1)]),
            injected(3, "manager", took_s=1.5),
        ],
        status=0,
        step_s=0.1,
    )
    result = verdict.judge(outcome, 3)
    assert result["passed"]
    assert result["injected"] == {"kill": 2, "manager": 1}
    assert result["recovered"] == {"recover-in-place": 2, "next manager": 1}
    assert result["steps_redone"] == 2
    assert result["parts_s"]["total"] == {"p50": 0.2, "p95": 0.4, "p99": 0.4, "max": 0.4}
    assert result["manager_back_s"]["max"] == 1.5
    # 0.3 s and one step of 0.1 s for each fault of a rank
    assert result["shares_by_mtbf"]["10 min"] == {
        "ettr": round(600 / 600.3, 6),
        "goodput": round(600 / 600.4, 6),
    }
    assert "verdict: passed" in verdict.table(json.loads(json.dumps(result)))


def test_goodput_is_left_out_where_no_step_was_measured() -> None:
    assert "goodput" not in verdict.shares([(0.3, 2)], None)["1 h"]
    assert verdict.shares([(0.3, 0)], None)["1 h"]["goodput"] == round(3600 / 3600.3, 6)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome([injected(1, records=[record(0.2)])], status=1), "ended with 1"),
        (Outcome([injected(1, trouble="nobody came")], status=0), "nobody came"),
        (Outcome([], trouble="ended before the first fault", status=0), "before the first fault"),
    ],
)
def test_what_fails(outcome: Outcome, word: str) -> None:
    result = verdict.judge(outcome, 1)
    assert not result["passed"]
    assert word in verdict.table(result)[-1]


@pytest.mark.parametrize(
    ("expected", "found", "equal", "why"),
    [
        ("digest 1\ndigest 2\n", "noise\ndigest 2\ndigest 1\n", "yes", ""),
        ("digest 1\n", "digest 1\ndigest 1\n", "no", "only with faults ['digest 1']"),
        ("digest 1\n", "digest 3\n", "no", "only without faults ['digest 1']"),
        ("nothing\n", "nothing\n", "no", "matches nothing"),
    ],
)
def test_digests_are_compared_in_any_order(expected, found, equal, why) -> None:
    result = verdict.compare(expected, found, re.compile(r"digest \d"))
    assert result[0] == equal
    assert why in result[1]


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["torchrun", "train.py"], "no --"),
        (["--faults", "3", "--"], "nothing stands behind --"),
        (["--kinds", "fire", "--", "true"], "'fire' is none of"),
        (["--faults", "0", "--", "true"], "at least 1"),
        (["--reference", "--", "true"], "belong together"),
        (["--digest", "x", "--", "true"], "belong together"),
        (["--reference", "--digest", "(", "--", "true"], "unterminated"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments, word, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_a_dry_run_prints_the_schedule_and_starts_nothing(capsys) -> None:
    assert program.main(["--dry-run", "--seed", "7", "--faults", "3", "--", "/none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == schedule.describe(schedule.plan(7, 3, 3.0, schedule.DEFAULT_KINDS))


def test_a_command_that_cannot_be_started_is_named(tmp_path, capsys) -> None:
    given = ["--directory", str(tmp_path), "--", "/none/torchrun"]
    assert program.main(given) == 2
    assert "/none/torchrun cannot be started" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["true"], ["sleep", "60"]])
def test_a_command_without_taskd_is_said_to_have_none(tmp_path, capsys, command) -> None:
    given = ["--directory", str(tmp_path), "--start-limit", "0.3", "--", *command]
    assert program.main(given) == 2
    assert "TaskD is not on in this command" in capsys.readouterr().err
