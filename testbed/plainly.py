"""A training without taskd, to compare with: `plainly.py script …` runs it to its last line.

It ends before Python takes itself down, because torch may abort there ("terminate called without an
active exception"): a thread of gloo that drops a Python object while Python ends is unwound by
`pthread_exit` through functions that let nothing through. Without this, one training in seven of
torch 2.13 ended so.
"""

import atexit
import os
import pathlib
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
