"""How a worker obeys `Interrupt`: whether it leaves its step at once, or ends it first."""

from enum import Enum


class Course(Enum):
    """What a rank does that is interrupted."""

    LEAVE = "leave"  # at once
    FINISH = "finish"  # its step, and waits at the end for `Advance`; groups stay as they are
    CATCH_UP = "catch up"  # its step, if it can before groups are aborted


def course_of(
    *, is_inside: bool, is_voting: bool, version: int | None, reach: int | None, finish_step: bool
) -> Course:
    """What the rank does.

    Args:
        is_inside: its main thread runs the recoverable function.
        is_voting: it is in the vote before an optimizer step.
        version: the last one that it committed; None: the state is not restored, or in part.
        reach: of the `Interrupt`: the newest version that anybody committed.
        finish_step: of the `Interrupt`: nothing is broken, everybody ends the step.
    """
    if not is_inside or version is None:
        return Course.LEAVE
    if finish_step:
        return Course.FINISH
    # Others may have what this rank misses; in a vote it is told so when that breaks.
    is_behind = reach is not None and version < reach
    return Course.CATCH_UP if is_behind and not is_voting else Course.LEAVE
