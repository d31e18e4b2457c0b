"""`python -m taskd.chaos [OPTIONS] -- COMMAND`: faults into a job, and a verdict.

Exit code: 0 every fault was recovered (and the digests are equal, if asked), 1 not, 2 wrong usage,
or TaskD is not on in the command.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

from taskd.chaos import command, schedule, verdict
from taskd.chaos.command import Command
from taskd.chaos.run import NotReadyError, Outcome, Run
from taskd.clock import MonotonicClock
from taskd.config.names import CHECKPOINT_ENV, LOG_PATH_ENV
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


# What the command of a fault is told, as text.
ENVIRONMENT = {
    "CHAOS_FAULT": "the number of the fault, from 1",
    "CHAOS_KIND": "node or link",
    "CHAOS_CHOICE": "the number that the schedule has drawn for it, below a million",
    "CHAOS_POSITION": "the same modulo the number of torchruns with workers on this machine",
    "CHAOS_AGENT": "the process id of the torchrun at that position",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m taskd.chaos",
        usage="%(prog)s [OPTIONS] -- COMMAND ...",
        description="Starts COMMAND, injects a schedule of faults into its job, and judges.",
        epilog="Exit code: 0 all faults were recovered, 1 not, 2 wrong usage or TaskD is not on.",
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the schedule (default 1)")
    add("--faults", type=int, default=20, help="how many (default 20)")
    add(
        "--every",
        type=float,
        default=3.0,
        metavar="S",
        help="mean seconds from a recovery to the next fault (default 3)",
    )
    add(
        "--kinds",
        default=",".join(schedule.DEFAULT_KINDS),
        help="; ".join(f"{kind}: {what}" for kind, what in schedule.KINDS.items()),
    )
    for kind in schedule.BY_COMMAND:
        add(
            f"--{kind}",
            metavar="COMMAND",
            help=f"a line of the shell that makes a fault of the kind {kind}; it has "
            + ", ".join(ENVIRONMENT)
            + ", and ends with 0 when the fault has happened, within --limit",
        )
    add("--reference", action="store_true", help="run the command without faults first")
    add(
        "--digest",
        metavar="REGEX",
        help="what the output must have in common with that of the reference; two processes that "
        "print it at once mix their lines, unless each writes its own, with its end, in one call",
    )
    add(
        "--limit",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that a recovery may take (default 120)",
    )
    add(
        "--start-limit",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds until the job trains (default 300)",
    )
    add(
        "--directory",
        type=pathlib.Path,
        default=pathlib.Path("taskd_chaos"),
        help="outputs, logs and checkpoints, in a new folder (default ./taskd_chaos)",
    )
    add("--json", type=pathlib.Path, metavar="FILE", help="write the verdict there, too")
    add("--dry-run", action="store_true", help="print the schedule only")
    return parser  # fmt: skip


def _split(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Options and command."""
    if "--" not in arguments:
        if {"-h", "--help", "--dry-run"} & set(arguments):
            return arguments, []
        parser.error("no --: write the command of the job behind it: -- torchrun ... train.py")
    at = arguments.index("--")
    if not arguments[at + 1 :]:
        parser.error("nothing stands behind --: write the command of the job there")
    return arguments[:at], arguments[at + 1 :]


def _check(options: argparse.Namespace, kinds: tuple[str, ...]) -> None:
    """Raises ConfigError: a kind lacks its command, or a command its kind."""
    for kind in schedule.BY_COMMAND:
        line = getattr(options, kind)
        if kind in kinds and not (line or "").strip():
            raise ConfigError(
                f"--kinds {kind} needs --{kind} COMMAND: no signal makes this fault; see "
                "docs/operations.md, Chaos"
            )
        if line is not None and kind not in kinds:
            raise ConfigError(f"--{kind} is given, but {kind} is none of --kinds {','.join(kinds)}")


def _owner(
    options: argparse.Namespace, folder: pathlib.Path
) -> Callable[[schedule.PlannedFault, int, int], str]:
    """Who makes the faults that no signal makes; its output goes to a file of the folder."""

    def owner(fault: schedule.PlannedFault, position: int, pid: int) -> str:
        told = (fault.number, fault.kind, fault.choice, position, pid)
        environment = {name: str(value) for name, value in zip(ENVIRONMENT, told, strict=True)}
        return command.call(
            getattr(options, fault.kind),
            dict(os.environ) | environment,
            folder / "commands.txt",
            options.limit,
        )

    return owner


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _execute(
    words: list[str],
    folder: pathlib.Path,
    faults: list[schedule.PlannedFault],
    options: argparse.Namespace,
) -> tuple[Outcome, str]:
    """One run of the command: what became of it, and what it has printed."""
    folder.mkdir()
    environment = os.environ | {
        LOG_PATH_ENV: str(folder / "log"),
        # its own: a run must not go on from what another one has saved
        CHECKPOINT_ENV: str(folder / "checkpoints"),
    }
    output = folder / "output.txt"
    _say(f"{folder.name}: {' '.join(words)}  (output and logs in {folder})")
    with Command(words, environment, output) as running:
        outcome = Run(
            running,
            folder / "log",
            MonotonicClock(),
            start_s=options.start_limit,
            limit_s=options.limit,
            say=_say,
            owner=_owner(options, folder),
        ).execute(faults)
    return outcome, output.read_text(errors="replace")


def _judge(
    words: list[str],
    faults: list[schedule.PlannedFault],
    options: argparse.Namespace,
    pattern: re.Pattern[str] | None,
) -> dict[str, object]:
    """Both runs, compared. Raises ConfigError, NotReadyError."""
    options.directory.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(
        tempfile.mkdtemp(prefix=f"seed-{options.seed}-", dir=options.directory.resolve())
    )
    expected = ""
    if options.reference:
        reference, expected = _execute(words, folder / "reference", [], options)
        if reference.status != 0:
            raise NotReadyError(
                f"without any fault the command ended with {reference.status}: "
                f"see {folder / 'reference' / 'output.txt'}"
            )
    outcome, output = _execute(words, folder / "faults", faults, options)
    equal, trouble = "not asked", ""
    if pattern is not None:
        equal, trouble = verdict.compare(expected, output, pattern)
    result = verdict.judge(outcome, len(faults), digest=equal, digest_trouble=trouble)
    return {
        "command": words,
        "seed": options.seed,
        "every_s": options.every,
        "kinds": options.kinds,
        "ranks": outcome.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min_after": round(os.getloadavg()[0], 2),
        **result,
    }


def main(arguments: list[str]) -> int:
    """The command line. Returns its exit code."""
    parser = _parser()
    given, words = _split(arguments, parser)
    options = parser.parse_args(given)
    try:
        kinds = schedule.kinds_of(options.kinds)
        _check(options, kinds)
        faults = schedule.plan(options.seed, options.faults, options.every, kinds)
        pattern = re.compile(options.digest, re.MULTILINE) if options.digest else None
    except (ConfigError, re.error) as error:
        parser.error(str(error))
    if bool(options.digest) != options.reference:
        parser.error("--reference and --digest belong together: one is to be compared by the other")
    for line in schedule.describe(faults):
        _say(line)
    if options.dry_run:
        return 0
    # the job is in a session of its own, and must not outlive us
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = _judge(words, faults, options, pattern)
    except (ConfigError, NotReadyError, OSError) as error:
        sys.stderr.write(f"taskd.chaos: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("taskd.chaos: interrupted: the job has been ended, there is no verdict\n")
        return 1
    for line in verdict.table(result):
        _say(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
