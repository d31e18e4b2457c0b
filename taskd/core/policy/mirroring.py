"""Which snapshots may be copied into the memory of a peer node now.

Owns the rule, for both sides: the node that sends and the node that keeps. Plain data, so that the
threads of an agent can hand it to each other.
"""

from dataclasses import dataclass, replace

from taskd.core import commands
from taskd.core.commands import Command


@dataclass(frozen=True, slots=True)
class MirrorPermission:
    """What a node may mirror.

    While `is_frozen` no copy is begun, as a plan of recovery may count on the older copy, which the
    new one would overwrite; one that is under way is completed. A snapshot that was made before
    `generation` and is newer than `version` is void: the job has gone on from `version`.
    """

    is_frozen: bool = False
    generation: int = 0
    version: int = 0

    def after(self, command: Command) -> "MirrorPermission":
        """What holds when the manager has given this command."""
        match command:
            case commands.Interrupt():
                return replace(self, is_frozen=True)
            case commands.Resume():
                version = -1 if command.version is None else command.version
                return MirrorPermission(generation=command.generation, version=version)
            case commands.RestartGroup():
                return MirrorPermission(generation=command.generation, version=-1)
        return self

    def is_void(self, generation: int, version: int) -> bool:
        """Whether a snapshot of this version, made in this generation, is of no use any more."""
        return generation < self.generation and version > self.version

    def may_begin(self, generation: int, version: int) -> bool:
        """Whether a copy of this snapshot may be begun."""
        return not (self.is_frozen or self.is_void(generation, version))
