"""The phases of a job as a picture, drawn from the tables that the manager goes by.

    python -m taskd.testing.diagram      # Mermaid, as it stands in docs/design.md

Owns the form of the picture alone. An arrow is named after what takes it: an event
(`taskd.core.job.machine`), something that follows from the state (`settle.FOLLOW_UPS`), or a
deadline that has come (`clock.OVERDUE`). `OrderDropped` is not drawn: it ends a job in every phase.
"""

from taskd.core.events import AgentLeft, OrderDropped
from taskd.core.job.clock import OVERDUE
from taskd.core.job.machine import TRANSITIONS
from taskd.core.job.settle import FOLLOW_UPS
from taskd.core.phase import DUMPING, OVER, TRAINING, JobPhase

Arrows = dict[tuple[str, str], list[str]]

# Drawn in one box. An arrow that leaves each of them is drawn once, from the box.
_BOXES = {"training": TRAINING, "emergency_checkpoint": DUMPING}


def mermaid() -> str:
    """The picture."""
    lines = ["stateDiagram-v2", f"    [*] --> {JobPhase.JOINING.value}"]
    for box, phases in _BOXES.items():
        within = [f"        {phase.value}" for phase in JobPhase if phase in phases]
        lines += [f"    state {box} {{", *within, "    }"]
    for (source, to), names in _joined(_arrows()).items():
        lines.append(f"    {source} --> {to}: {', '.join(names)}")
    return "\n".join([*lines, f"    {JobPhase.ENDED.value} --> [*]"])


def _arrows() -> Arrows:
    """(phase, phase) -> what may lead from one to the other."""
    found: Arrows = {}
    for source in JobPhase:
        for to in JobPhase:
            events = [
                event
                for (phase, event), rule in TRANSITIONS.items()
                if phase is source and to in rule.to and event is not OrderDropped
            ]
            names = sorted(
                "a node is gone" if event is AgentLeft else event.__name__ for event in events
            )
            names += [
                due.name for due in (*FOLLOW_UPS, *OVERDUE) if source in due.phases and to in due.to
            ]
            # That a job which was given up has ended when no agent is left is drawn from `ending`.
            is_both = to is JobPhase.ENDED and source is not JobPhase.ENDING
            if names and source is not to and not (is_both and _targets(source) >= OVER):
                found[source.value, to.value] = list(dict.fromkeys(names))
    return found


def _targets(source: JobPhase) -> set[JobPhase]:
    found = {to for (phase, _), rule in TRANSITIONS.items() if phase is source for to in rule.to}
    return found | {to for due in (*FOLLOW_UPS, *OVERDUE) if source in due.phases for to in due.to}


def _joined(arrows: Arrows) -> Arrows:
    """The same, with what each phase of a box has drawn from the box."""
    left = dict(arrows)
    for box, phases in _BOXES.items():
        inner = [phase.value for phase in JobPhase if phase in phases]
        for to in [phase.value for phase in JobPhase if phase not in phases]:
            named = [set(left.get((source, to), ())) for source in inner]
            common = set.intersection(*named)
            if not common:
                continue
            for source in inner:
                rest = [name for name in left.pop((source, to)) if name not in common]
                if rest:
                    left[source, to] = rest
            left[box, to] = sorted(common)
    return left


if __name__ == "__main__":
    print(mermaid())  # noqa: T201
