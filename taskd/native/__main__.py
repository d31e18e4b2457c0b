"""`eval "$(python -m taskd.native)"`.

Prints the line that has libtaskd preloaded into everything that the shell starts.
"""

import sys

from taskd.errors import NativeLibraryError
from taskd.native.library import export_line


def main() -> int:
    """Exit code 0, or 1 with the reason on the standard error output."""
    try:
        print(export_line())  # noqa: T201
    except NativeLibraryError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
