"""Runs a script of TensorFlow, which stops itself at given places, for a test to do something.

    python halt.py FOLDER PLACES SCRIPT [ARGUMENT ...]

PLACES, separated by commas: `17`: when step 17 is done, told of, and not saved; `save-20`: when the
files of checkpoint 20 are written, and TensorFlow's own file does not name them yet. The first
process that comes to a place writes its pid into FOLDER/PLACE and gets SIGSTOP from itself.
"""

import builtins
import os
import pathlib
import re
import runpy
import signal
import sys

from tensorflow.python.checkpoint.checkpoint_management import CheckpointManager

folder, places, script = pathlib.Path(sys.argv[1]), set(sys.argv[2].split(",")), sys.argv[3]
record = CheckpointManager._record_state


def halt(place: str) -> None:
    """Once in all processes; until SIGCONT or SIGKILL."""
    try:
        with (folder / place).open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def print_and_halt(*values: object, **options: object) -> None:
    """The `print` of the script."""
    builtins.print(*values, **options)
    told = re.match(r"pid \d+ step (\d+) ", str(values[0]))
    if told and told[1] in places:
        halt(told[1])


def record_or_halt(manager: CheckpointManager) -> None:
    """In place of the method that writes the name of the newest checkpoint."""
    for path in pathlib.Path(manager.directory).glob("ckpt-*.index"):
        place = f"save-{path.stem.removeprefix('ckpt-')}"
        if place in places:
            halt(place)
    record(manager)


CheckpointManager._record_state = record_or_halt
del sys.argv[:3]
runpy.run_path(script, init_globals={"print": print_and_halt}, run_name="__main__")
