"""`python -m taskd.keys new [--out FILE]` makes the secret of a job, for TASKD_SECRET_FILE."""

import argparse
import secrets
import sys
from collections.abc import Sequence

from taskd import files
from taskd.config import SECRET_FILE_ENV

_BYTES = 32  # as the keys that are derived from it


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments` None: those of the process. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m taskd.keys", description=__doc__)
    new = parser.add_subparsers(required=True).add_parser("new", help="make a secret")
    new.add_argument("--out", default="taskd.secret", metavar="FILE", help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        files.write_new(given.out, [secrets.token_hex(_BYTES)], files.SECRET_MODE)
    except OSError as error:
        sys.stderr.write(
            f"{given.out} cannot be made: {error.strerror}. A file that is there is never "
            "replaced: choose another name\n"
        )
        return 1
    sys.stdout.write(
        f"{given.out} holds a new secret, which only you can read. Copy it to every node and say "
        f"there, for the manager and torchrun:\n\n  export {SECRET_FILE_ENV}={given.out}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
