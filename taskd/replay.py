"""`python -m taskd.replay FILE`: a recorded story through the machine again.

Owns the file format: JSON lines, first a header with what the machine was made of, then one entry
of the story per line (`taskd.core.story.to_plain`). Imports core only, so that a story can be
looked at on any computer. A story that lost its beginning cannot be replayed, and says so.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from taskd.core.commands import Command
from taskd.core.events import Event
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.story import Entry, Note, Story, describe, from_plain, to_plain
from taskd.core.timeouts import Timeouts

FORMAT = 1
_KEPT_CHARACTERS = 4_000_000  # most entries have 300


class StoryWriter:
    """Writes the story of one machine down again and again.

    An entry is put into words once: there are thousands, and most were there last time. In a large
    job few are, and their words would take as much memory as they do: some are kept.
    """

    def __init__(self, machine: RecoveryMachine | NodeMachine) -> None:
        """`machine`: the one whose story it is."""
        self._machine = machine
        # by id(entry), which is the entry's own as long as it is kept here
        self._known: dict[int, tuple[Entry, str]] = {}

    def lines(self) -> Iterator[str]:
        """The lines of a story file, as it is now."""
        machine, known, room = self._machine, {}, _KEPT_CHARACTERS
        header = {
            "format": FORMAT,
            "machine": type(machine).__name__,
            "arguments": _plain_arguments(machine.arguments),
            "dropped": machine.story.dropped,
        }
        yield json.dumps(header)
        for entry in machine.story:
            worded = self._known.get(id(entry)) or (entry, json.dumps(to_plain(entry)))
            room -= len(worded[1])
            if room >= 0:
                known[id(entry)] = worded
            yield worded[1]
        self._known = known


def dump_lines(machine: RecoveryMachine | NodeMachine) -> list[str]:
    """The lines of a story file, once."""
    return list(StoryWriter(machine).lines())


def load_lines(lines: Iterable[str]) -> tuple[RecoveryMachine | NodeMachine, list[Any]]:
    """A fresh machine like the recorded one, and the recorded entries.

    Raises ValueError with the line that is wrong.
    """
    numbered = enumerate((line for line in lines if line.strip()), 1)
    first = next(numbered, None)
    header = {} if first is None else json.loads(first[1])
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"the first line must be a header with format {FORMAT}: is this a story?")
    if header["dropped"]:
        raise ValueError(
            f"the first {header['dropped']} entries of this story are gone: it cannot be replayed"
        )
    entries = []
    for number, line in numbered:
        try:
            entries.append(from_plain(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error
    arguments = dict(header["arguments"])
    arguments["timeouts"] = Timeouts(**arguments["timeouts"])
    if header["machine"] == NodeMachine.__name__:
        arguments["incarnations"] = {
            int(rank): value for rank, value in arguments["incarnations"].items()
        }
        return NodeMachine(**arguments), entries
    return RecoveryMachine(**arguments), entries


def replay(
    machine: RecoveryMachine | NodeMachine, entries: Iterable[Event | Command | Note]
) -> list[str]:
    """Feed the recorded events to a fresh machine.

    Returns the differences, none if it decides as it did.
    """
    recorded = [entry for entry in entries if not isinstance(entry, Note)]
    differences = []
    for index, entry in enumerate(recorded):
        if not isinstance(entry, Event):
            continue
        decided: list[Command] = machine.handle(entry)
        end = index + 1
        while end < len(recorded) and isinstance(recorded[end], Command):
            end += 1
        before = recorded[index + 1 : end]
        if decided != before:
            differences.append(
                f"{describe(entry)}\n  then: {[describe(command) for command in before]}"
                f"\n  now:  {[describe(command) for command in decided]}"
            )
    return differences


def _plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    plain = {key: to_plain(value) for key, value in arguments.items()}
    timeouts = arguments["timeouts"]
    plain["timeouts"] = {item.name: getattr(timeouts, item.name) for item in fields(timeouts)}
    return plain


def main(arguments: list[str]) -> int:
    """The command line.

    Exit code: 0 the same decisions, 1 others, 2 not a story that can be replayed.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m taskd.replay FILE\n")
        return 2
    try:
        machine, entries = load_lines(Path(arguments[0]).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{arguments[0]}: {error}\n")
        return 2
    differences = replay(machine, entries)
    story: Story = machine.story
    sys.stdout.write("".join(f"{describe(entry)}\n" for entry in story))
    for difference in differences:
        sys.stderr.write(f"decided differently: {difference}\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
