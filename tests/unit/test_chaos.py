"""The schedule of `python -m taskd.chaos`, its verdict, and what its command line refuses."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.chaos import __main__ as program
from taskd.chaos import command, run, schedule, target, verdict
from taskd.chaos.run import Injected, Outcome, replaced
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        ("digest 1\ndigest 1\n", "digestdigest  11\n\n", "no", "written with its end in one call"),
        ("nothing\n", "nothing\n", "no", "matches nothing"),
    ],
)
def test_digests_are_compared_in_any_order(expected, found, equal, why) -> None:
    result = verdict.compare(expected, found, re.compile(r"digest \d"))
    assert result[0] == equal
    assert why in result[1]


# ---------------------------------------------------------------- commands for nodes and links


def test_schedules_of_kinds_that_came_later_are_theirs_alone() -> None:
    assert set(schedule.BY_COMMAND) < set(schedule.KINDS)
    assert not set(schedule.BY_COMMAND) & set(schedule.DEFAULT_KINDS)
    faults = schedule.plan(7, 2, 1.0, ("node", "link", "kill+manager"))
    assert [fault.kind for fault in faults] == ["node", "kill+manager"]
    assert all(0 <= fault.share() < 1 for fault in faults)


def test_the_page_names_all_that_a_command_is_told() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert all(f"`{name}`" in page for name in program.ENVIRONMENT)


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        ('test "$CHAOS_KIND" = node', ""),
        ("sleep 60 & exit 0", ""),
        ("echo no such host; exit 3", "ended with 3, and has said 'no such host'"),
        ("/none/power-off", r"could not be run \(127\), and has said .*not found"),
        (f"{__file__}", r"could not be run \(126\)"),
        ("echo waits; sleep 60", "had not ended after 0.5 s, and has said 'waits'"),
    ],
)
def test_the_command_of_a_fault_succeeds_or_it_is_told_why_not(tmp_path, line, trouble) -> None:
    (tmp_path / "out").write_text("of another one\n")
    limit_s = 0.5 if "waits" in line else 20.0
    environment = dict(os.environ) | {"CHAOS_KIND": "node"}
    found = command.call(line, environment, tmp_path / "out", limit_s)
    assert re.search(trouble, found) if trouble else found == "", found
    assert "of another one" not in found


class World:
    """A job of two ranks that makes a step at each look, and what a test does to it.

    What `taskd.chaos.run` asks of `target`, of a command and of a clock.
    """

    LEAVING = target.LEAVING
    pid, status = 1, None
    output = pathlib.Path("/none")

    def __init__(self, folder: pathlib.Path) -> None:
        self.pids, self.step, self.time = [10, 11], 1, 0.0
        self.stands_still, self.manager_pid = False, 3
        self.records = folder / "recoveries.jsonl"
        self.log = folder

    def now(self) -> float:
        self.time += 0.1
        return self.time

    def workers(self, root: int) -> list[target.Worker]:
        self.step += not self.stands_still
        return [target.Worker(pid, 1, self.step) for pid in self.pids]

    def agents(self, root: int) -> list[int]:
        return [5, 6]

    def manager(self, log: pathlib.Path) -> int:
        return self.manager_pid

    def registrations(self, log: pathlib.Path, pid: int) -> int:
        return 2

    def state_of(self, pid: int) -> str:
        return "S" if pid in {*self.pids, *self.agents(1)} else ""

    def read(self, path: pathlib.Path) -> str:
        return target.read(path)

    def recover(self, *pids: int, **more: object) -> None:
        with self.records.open("a") as file:
            file.write(json.dumps(record(0.3, **more)) + "\n")
        self.pids, self.stands_still = list(pids), False

    def recover_without_record(self) -> None:
        self.pids, self.manager_pid = [10, 12], 4

    def inject(self, kind: str, owner) -> Injected:
        """The job has begun; a fault befalls torchrun 1."""
        running = run.Run(self, self.log, self, start_s=30, limit_s=30, say=print, owner=owner)
        running._outcome.ranks, running._places = 2, [10, 11]
        running._inject(schedule.PlannedFault(1, 0.0, kind, 7))
        return running._outcome.injected[-1]


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    found = World(tmp_path)
    monkeypatch.setattr(run, "target", found)
    monkeypatch.setattr(run, "_LOOK_S", 0.0)
    return found


@pytest.mark.parametrize("kind", schedule.BY_COMMAND)
def test_a_command_is_told_whom_it_hits_and_its_failure_ends_the_run(world, kind) -> None:
    told = []
    found = world.inject(kind, lambda *told_now: told.append(told_now) or "ended with 3")
    assert told == [(schedule.PlannedFault(1, 0.0, kind, 7), 1, 6)]
    assert not found.has_happened
    assert found.trouble == f"fault 1 ({kind}) did not happen: ended with 3"


def test_a_link_is_ridden_through_when_all_commit_beyond_the_steps_of_then(world) -> None:
    found = world.inject("link", lambda *_: "")
    assert (found.trouble, found.strategy) == ("", run.RIDDEN_THROUGH)
    result = verdict.judge(Outcome([found], status=0), 1)
    assert result["passed"]
    assert result["recovered"] == {run.RIDDEN_THROUGH: 1}
    assert result["manager_back_s"] == {}
    assert result["ridden_through_s"]["max"] > 0


def test_a_link_after_which_nobody_commits_is_not_recovered(world) -> None:
    def cut(*_: object) -> str:
        world.stands_still = True
        return ""

    found = world.inject("link", cut)
    assert found.trouble.startswith("fault 1 (link of process 6) was not recovered within 30 s")


def test_a_rank_that_was_replaced_is_no_link_that_was_ridden_through(world) -> None:
    def cut(*_: object) -> str:
        world.pids = [10]  # one is gone; the others go on as far as they say
        return ""

    assert "was not recovered" in world.inject("link", cut).trouble


def test_a_link_that_leads_to_a_recovery_is_judged_by_its_record(world) -> None:
    def cut(*_: object) -> str:
        world.recover(10, 12, strategy="retry")
        return ""

    found = world.inject("link", cut)
    assert (found.trouble, found.strategy, found.took_s) == ("", "retry", None)


def test_a_node_needs_a_record_whoever_was_hit(world) -> None:
    def lose(*_: object) -> str:
        world.recover(12, 13, strategy="recover")
        return ""

    found = world.inject("node", lose)
    assert (found.trouble, found.strategy) == ("", "recover")
    assert "was not recovered" in world.inject("node", lambda *_: "").trouble


def test_a_rank_that_is_replaced_while_the_manager_dies_needs_no_record(world, monkeypatch) -> None:
    """A manager that dies between the order to go on and the first step has written none."""
    monkeypatch.setattr(command, "hit", lambda *_: world.recover_without_record() or True)
    found = world.inject("kill+manager", None)
    assert (found.trouble, found.strategy) == ("", run.UNRECORDED)
    assert found.took_s is not None
    monkeypatch.setattr(command, "hit", lambda *_: True)
    assert "was not recovered" in world.inject("kill", None).trouble


# ---------------------------------------------------------------- the command line


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """The command is a program of its own, and does not put back the handler of SIGTERM."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


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
        (["--kinds", "kill,node", "--", "true"], "--kinds node needs --node COMMAND"),
        (["--kinds", "link", "--link", " ", "--", "true"], "--kinds link needs --link COMMAND"),
        (["--node", "off", "--", "true"], "--node is given, but node is none of --kinds kill"),
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
