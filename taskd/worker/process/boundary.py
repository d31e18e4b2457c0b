"""How far a rank goes that is called out in the middle of its function, where others have to say so.

After a vote that broke, whether it has passed for somebody: then that rank has stepped, and this
one does so, too. And at the end of a step that it was let finish, whether that was the last: ranks
may be one step apart. The manager knows when it has heard from all (`taskd.core.job.stopped`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events
from taskd.worker.exceptions.communication import is_communication_error

if TYPE_CHECKING:
    from taskd.core.commands import Advance
    from taskd.worker.process.runtime import Runtime


class Boundary:
    """One per runtime. Its lock is the runtime's condition."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._goal: Advance | None = None
        self.may_finish = False  # the newest interrupt lets this rank finish its step

    def ask(self) -> None:
        """Tell the manager that this rank could do one step more."""
        runtime = self._runtime
        with runtime.condition:
            generation = runtime.target_generation
        runtime.send(
            events.WorkerMayAdvance(
                **runtime.identity("may-advance"),
                generation=generation,
                version=runtime.life.version or 0,
                snapshots=runtime.life.snapshot_versions(),
            )
        )

    def take(self, command: Advance) -> None:
        """The manager's answer."""
        with self._runtime.condition:
            self._goal = command
            self._runtime.condition.notify_all()

    def wants_more(self) -> bool:
        """At the end of a step of a rank that is called out: whether it does another one.

        Waits for word.
        """
        runtime = self._runtime
        with runtime.condition:
            goal = self._await_goal(runtime.target_generation) if self.may_finish else None
        return goal is not None and (runtime.life.version or 0) < goal

    def has_passed(self, error: RuntimeError) -> bool:
        """A vote ended with `error` here: whether it has passed for somebody. Waits for word.

        Raises the error if it says nothing of the vote, or if the job was given up because of it.
        """
        runtime = self._runtime
        if not runtime.must_gate and not is_communication_error(error):
            raise error
        runtime.await_verdict(error, clean=True, may_advance=True)
        while True:
            with runtime.condition:
                # word would be of the step's end; it will be called off
                while self.may_finish and not self._is_over():
                    runtime.condition.wait()
                generation = runtime.target_generation
            self.ask()
            with runtime.condition:
                goal = self._await_goal(generation)
                if runtime.target_generation == generation:
                    return goal is not None

    def _await_goal(self, generation: int) -> int | None:
        """The version to go on to. None: this rank is to leave, or a newer interrupt came.

        Under the lock.
        """
        runtime = self._runtime
        while runtime.target_generation == generation and not self._is_over():
            if self._goal is not None and self._goal.generation == generation:
                return self._goal.version
            runtime.condition.wait()
        return None

    def _is_over(self) -> bool:
        """Whether what came means that this rank leaves its function."""
        runtime = self._runtime
        return runtime.agent_gone or any(
            word is not None for word in (runtime.resume, runtime.order, runtime.gave_up)
        )
