"""msrun's call-backs: what they are given, and what their answers mean.

    START_ALL_WORKER()             starts all workers of the node; those before are killed
    START_WORKER_LIST(local ranks) starts these; never called here: a group starts as a whole
    KILL_WORKER(pids)              SIGKILL to the process groups of these; [-1]: of all
    MONITOR([-1])                  {local rank: {"pid", "status", "global_rank"}}

The first three answer 0 for "done". Owns nothing; must not know the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATORS = ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR")
_ALL = -1
NOT_STARTED = 200  # a status of MONITOR: there has never been a process


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as msrun sees it. `pid`: None while it has not been started."""

    rank: int
    pid: int | None


class Callbacks:
    """The registered functions. Raises ConfigError where an answer is not what msrun gives."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Raises ConfigError: one of them is missing."""
        missing = [name for name in OPERATORS if not callable(functions.get(name))]
        if missing:
            raise ConfigError(
                f"msrun has not registered {', '.join(missing)}: nothing can be started"
            )
        self._functions = dict(functions)

    def start_all(self) -> None:
        """Start all workers of this node. Raises what the call-back raises."""
        self._functions[
            "START_ALL_WORKER"
        ]()  # 1: one has ended already, which is seen all the same

    def kill_all(self) -> None:
        """End all workers at once, and what msrun has beside them: those who show their logs."""
        self._functions["KILL_WORKER"]([_ALL])

    @property
    def start_scheduler(self) -> Callable[[], object] | None:
        """Msrun's function that starts MindSpore's scheduler; None: it is not where it was in 2.10.

        msrun registers methods of the object that has this one as well.
        """
        owner = getattr(self._functions["START_ALL_WORKER"], "__self__", None)
        found = getattr(owner, "start_scheduler", None)
        is_here = bool(getattr(owner, "is_master", False))
        return found if is_here and callable(found) else None

    def look(self) -> dict[int, Seen]:
        """All workers of this node, by local rank. msrun reaps those that have ended."""
        answer = self._functions["MONITOR"]([_ALL])
        if not isinstance(answer, Mapping) or not answer:
            raise ConfigError(f"MONITOR([-1]) returned {answer!r}: expected the node's workers")
        return {int(local_rank): _seen(local_rank, said) for local_rank, said in answer.items()}


def _seen(local_rank: object, said: Any) -> Seen:
    try:
        rank, pid, status = said["global_rank"], said["pid"], said["status"]
    except (TypeError, LookupError) as error:
        raise ConfigError(
            f"MONITOR says {said!r} of local rank {local_rank}: expected pid, status, global_rank"
        ) from error
    is_started = isinstance(pid, int) and pid > 0 and status != NOT_STARTED
    return Seen(int(rank), pid if is_started else None)
