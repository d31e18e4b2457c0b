"""`python -m taskd.profiling on|off [NAME ...] | status`: the profiling switch file by hand.

For jobs without a cluster service. Writes what the manager of the job reads once a second
(`taskd.manager.profiling_switch`), in one step, so that it never sees half a file.
"""

import argparse
import json
import pathlib
import sys

from taskd.config import PROFILING_SWITCH_ENV, profiling_switch
from taskd.core.profiling import COMMUNICATION, DEFAULT_DOMAIN, SWITCHES, asked_by, code_of
from taskd.manager.profiling_switch import parse_switches, read_switches
from taskd.replaced import replaced


def write_switches(path: pathlib.Path, switches: dict[str, bool]) -> None:
    """Replace the file, and make the folders that are missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        json.dump({name: "on" if is_on else "off" for name, is_on in switches.items()}, file)
        file.write("\n")


def changed(switches: dict[str, bool], names: list[str], *, is_on: bool) -> dict[str, bool]:
    """The switches after the command.

    No names: the default domain for "on" (communication costs more and is asked for by name), all
    for "off".
    """
    chosen = names or (DEFAULT_DOMAIN if is_on else SWITCHES)
    return {name: is_on if name in chosen else switches.get(name, False) for name in SWITCHES}


def _read(path: pathlib.Path) -> dict[str, bool]:
    content = read_switches(path)
    return {} if content is None else parse_switches(content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m taskd.profiling",
        description="Switches the profiling of a running job on and off.",
    )
    parser.add_argument("command", choices=("on", "off", "status"))
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help=f"{', '.join(SWITCHES)}; none: all but {COMMUNICATION} on, or all off",
    )
    parser.add_argument(
        "--path", help=f"the switch file; else {PROFILING_SWITCH_ENV}, else {profiling_switch({})}"
    )
    return parser


def main(arguments: list[str]) -> int:
    """The command line. Exit code: 0 done, 1 the file cannot be read or written, 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SWITCHES]
    if unknown or (options.names and options.command == "status"):
        parser.error(
            f"{(unknown or options.names)[0]!r} is not accepted: expected "
            f"{'nothing' if not unknown else ', '.join(SWITCHES)}"
        )
    path = profiling_switch(given=options.path)
    try:
        try:
            before = _read(path)
        except ValueError as error:
            if options.command == "status":
                sys.stderr.write(f"{path}: {error}\n")
                return 1
            before = {}  # it is replaced
        switches = before
        if options.command != "status":
            switches = changed(before, options.names, is_on=options.command == "on")
            write_switches(path, switches)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror or error}\n")
        return 1
    code = code_of(switches)
    shown = ", ".join(f"{name} {'on' if switches.get(name) else 'off'}" for name in SWITCHES)
    sys.stdout.write(f"{path}: {shown}\n{code}: {asked_by(code)}\n")
    if options.command == "off" and options.names and code != code_of({}):
        sys.stdout.write("The default domain is on as long as any switch is.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
