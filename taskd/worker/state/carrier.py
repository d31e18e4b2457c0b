"""Who moves and writes a training state whose content taskd cannot see.

Another library's functions know the objects; taskd knows the steps. Its face is
`taskd.worker.carried_state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.core.commands import Move


class Carrier(Protocol):
    """All of it is called in the main thread. What it raises is told as of the training script."""

    @property
    def damage(self) -> str:
        """Why what this rank holds is no copy, whatever its steps say; "": nothing is known.

        It counts until this rank has received everything from another.
        """

    def move(self, step: int, moves: Mapping[int, Move]) -> None:
        """In a recovery, on every rank: bring this rank's content to that of `step`.

        `moves`: of each rank, by rank. The process groups of the new generation are there. Until it
        returns, a rank that receives counts as holding nothing.
        """

    def write(self, step: int, writers: tuple[int, ...]) -> None:
        """The job is saved since it must end: write this rank's part under a name for the time.

        `writers`: the ranks that hold the step, in order; it is called on all of them. Those of
        them that were there before can still make process groups among themselves.
        """

    def publish(self, step: int) -> str:
        """All have written, and this is the first of them: give the whole its name.

        Returns where it is, for people.
        """
