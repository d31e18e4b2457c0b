"""What this process was told, and where its main thread is: what its two threads share.

Owns the condition under which all of it is written. Decides nothing.
"""

import enum
import threading
import time

from taskd.core import commands


class Where(enum.Enum):
    """Where the main thread is, as far as an interrupt is concerned."""

    OUTSIDE = "outside"  # before, between or after recoverable functions
    INSIDE = "inside"  # running the function
    WAITING = "waiting"  # in one of our own waits


class Orders:
    """One per runtime. Everything is written under `condition`."""

    def __init__(self, generation: int, *, must_gate: bool) -> None:
        self.condition = threading.Condition()
        self.generation = generation  # the newest that an Interrupt or a Resume named
        self.must_gate = must_gate  # a recovery is going on
        self.where = Where.OUTSIDE
        self.resume: commands.Resume | None = None
        self.resumed_at = 0.0
        self.released = False
        self.gave_up: commands.GiveUp | None = None
        self.save: commands.Dump | commands.Publish | None = None  # for the gate
        self.goal: commands.Advance | None = None
        self.may_finish = False  # the newest interrupt lets this rank finish its step
        self.agent_gone = False

    def take(self, command: commands.Command) -> bool:
        """Note a command for the main thread. False: it is for nobody here."""
        with self.condition:
            match command:
                case commands.Advance():
                    self.goal = command
                case commands.Resume():
                    if command.generation >= self.generation:
                        self.generation = command.generation
                        self.resume, self.resumed_at = command, time.monotonic()
                case commands.Release():
                    self.released = True
                case commands.Dump() | commands.Publish():
                    self.save = command
                case commands.GiveUp():
                    self.gave_up = command
                case _:
                    return False
            self.condition.notify_all()
        return True

    def lose_agent(self) -> None:
        """The agent is gone: nothing more will be said."""
        with self.condition:
            self.agent_gone = True
            self.condition.notify_all()

    @property
    def present_generation(self) -> int:
        """`generation`, read under the condition."""
        with self.condition:
            return self.generation

    @property
    def is_inside(self) -> bool:
        """Whether the main thread runs the function."""
        return self.where is Where.INSIDE

    def raise_if_over(self, rank: int) -> None:
        """Under the condition.

        Raises:
            SystemExit: the agent is gone, or the job was given up: nobody will ever resume us.
        """
        if self.agent_gone:
            message = f"rank {rank}: the agent is gone; this process ends"
            raise SystemExit(message)
        if self.gave_up is not None and self.gave_up.culprit != rank:
            message = f"rank {rank}: the job was given up: {self.gave_up.reason}"
            raise SystemExit(message)

    def await_goal(self, generation: int) -> int | None:
        """The version to go on to. None: this rank is to leave, or a newer interrupt came.

        Under the condition.
        """
        while self.generation == generation and not self.is_leaving():
            if self.goal is not None and self.goal.generation == generation:
                return self.goal.version
            self.condition.wait()
        return None

    def is_leaving(self) -> bool:
        """Whether what came means that this rank leaves its function."""
        return self.agent_gone or any(
            command is not None for command in (self.resume, self.save, self.gave_up)
        )
