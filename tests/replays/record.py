"""Recording of the stories in tests/replays/stories.

    python tests/replays/record.py again NAME ...            # the same events, decided today
    python tests/replays/record.py history SEED NUMBER FILE  # the manager of a random history
    python tests/replays/record.py history SEED NUMBER FILE --node 0

`again` shows what is decided differently and writes it down: for a change of decisions, or of the
words in them, that is wanted. Read the difference before you commit it. The manager of a real job
writes its story itself (docs/operations.md); `python -m taskd.replay FILE` shows it.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from taskd.core.events import Event
from taskd.replay import dump_lines, load_lines, replay
from taskd.testing import histories

if TYPE_CHECKING:
    from collections.abc import Sequence

STORIES = pathlib.Path(__file__).parent / "stories"


def again(path: pathlib.Path) -> list[str]:
    """Write the story anew. Returns what is decided differently."""
    machine, entries = load_lines(path.read_text(encoding="utf-8").splitlines())
    differences = replay(machine, entries)
    assert any(isinstance(entry, Event) for entry in machine.story)
    path.write_text("\n".join(dump_lines(machine)) + "\n", encoding="utf-8")
    return differences


def history(seed: int, number: int, path: pathlib.Path, node: int | None) -> None:
    """Play a random history, and write down what its last manager or one of its agents met."""
    job = histories.make(seed, number)
    job.run()
    if node is None and job.manager is None:
        raise SystemExit("this history has no manager at its end")
    machine = job.agents[node].machine if node is not None else job.manager.machine
    path.write_text("\n".join(dump_lines(machine)) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests/replays/record.py")
    kinds = parser.add_subparsers(dest="kind", required=True)
    renewed = kinds.add_parser("again")
    renewed.add_argument("names", nargs="+")
    played = kinds.add_parser("history")
    played.add_argument("seed", type=int)
    played.add_argument("number", type=int)
    played.add_argument("file", type=pathlib.Path)
    played.add_argument("--node", type=int)
    wanted = parser.parse_args(arguments)
    if wanted.kind == "history":
        history(wanted.seed, wanted.number, wanted.file, wanted.node)
        return 0
    for name in wanted.names:
        print(f"{name}:", *again(STORIES / f"{name}.jsonl"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
