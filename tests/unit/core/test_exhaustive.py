"""Every (JobPhase x Event) is in exactly one table, and the tables know no others."""

import itertools

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job import machine as recovery
from taskd.core.node import machine as node
from taskd.core.node.orders import ORDERS
from taskd.core.phase import JobPhase
from taskd.core.story import Story
from taskd.core.transitions import TransitionTable
from taskd.errors import InvalidTransition

WORKER_TO_AGENT_ONLY = {ev.WorkerReady, ev.WorkerUncaught, ev.WorkerMirrors}
# see taskd.core.profiling, taskd.agent.mirrors.mirroring
BESIDE_THE_MACHINES = {
    ev.WorkerProfiling,
    ev.SpareRegistered,
    ev.SpareLeft,
    ev.RosterKept,
    ev.ImportsKnown,
    do.SetProfiling,
    do.Pair,
    do.ReturnMirrors,
    do.OfferPlace,
    do.Dismiss,
    do.Proceed,
    do.KeepRoster,
    do.Preload,
}


def all_events() -> set[type[ev.Event]]:
    found: set[type[ev.Event]] = set()
    todo: list[type[ev.Event]] = [ev.Event]
    while todo:
        kind = todo.pop()
        children = [child for child in kind.__subclasses__() if child.__module__ == ev.__name__]
        todo += children
        if not children and kind.__name__ in vars(ev) and vars(ev)[kind.__name__] is kind:
            found.add(kind)
    return found


@pytest.mark.parametrize(("phases", "module"), [(JobPhase, recovery), (node.NodePhase, node)])
def test_every_phase_and_event_is_in_exactly_one_table(phases, module) -> None:
    for key in itertools.product(phases, module.EVENTS):
        assert (key in module.TRANSITIONS) != (key in module.IGNORED), key


@pytest.mark.parametrize(("phases", "module"), [(JobPhase, recovery), (node.NodePhase, node)])
def test_tables_know_no_other_keys(phases, module) -> None:
    expected = set(itertools.product(phases, module.EVENTS))
    assert set(module.TRANSITIONS) | set(module.IGNORED) == expected


def test_every_event_is_met_by_a_machine() -> None:
    assert (
        {*recovery.EVENTS, *node.EVENTS, ev.SharedReport}  # which is met as the reports in it
        == all_events() - WORKER_TO_AGENT_ONLY - BESIDE_THE_MACHINES
    )


def test_every_ignored_event_has_a_reason() -> None:
    assert all([*recovery.IGNORED.values(), *node.IGNORED.values()])


def test_agents_obey_every_command_that_the_manager_sends_them() -> None:
    own = {do.RecordRecovery, do.ReportStraggler, do.ReportNoProgress, do.ReportNoBuddy, do.EndJob}
    own |= {do.ReportWorld, do.ReportNotJoined, do.RepeatOrder}
    agents = {
        do.OpenStore,
        do.SpawnWorker,
        do.Drain,
        do.SignalWorker,
        do.ExamineWorker,
        do.TellWorker,
        do.TellManager,
        do.FinishRun,
        do.FallBack,
    }
    every = {kind for kind in do.Command.__subclasses__() if vars(do).get(kind.__name__) is kind}
    assert set(ORDERS) == every - own - agents - BESIDE_THE_MACHINES


def test_an_event_without_a_rule_is_a_bug_and_brings_the_story() -> None:
    story = Story()
    story.note(1.0, "what happened before")
    with pytest.raises(
        InvalidTransition,
        match=r"no rule for Tick while running(.|\n)*what "
        r"happened before",
    ):
        TransitionTable({}, {}).rule(JobPhase.RUNNING, ev.Tick(0.0, ""), story)
