"""Looking at what a machine answered."""

from taskd.core import commands as do


def kinds(commands) -> list[str]:
    """The names of the commands, in order."""
    return [type(command).__name__ for command in commands]


def acts(commands) -> list[str]:
    """The same without what is only written down or said."""
    return kinds(
        command
        for command in commands
        if not isinstance(command, do.RecordRecovery | do.ReportNoProgress)
    )


def only(commands, kind):
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def plan(resume: do.Resume) -> dict[int, int | None]:
    """Who gets the state from whom; None: from its own snapshot."""
    return {move.rank: move.source for move in resume.moves}


def told(commands) -> list[object]:
    """What goes to the manager."""
    return [command.event for command in commands if isinstance(command, do.TellManager)]


def passed_on(commands) -> list[tuple[int, str]]:
    """What goes to workers."""
    return [
        (command.rank, type(command.command).__name__)
        for command in commands
        if isinstance(command, do.TellWorker)
    ]
