"""A wrapper that becomes another program, as one with `numactl` would; that one takes its time.

FACTS   directory for <rank>-<pid>.jsonl
"""

import os
import sys

from testbed.script import fact

_PROGRAM = """
import time
from testbed.script import fact
time.sleep(7)  # a process that is thought to be dying is killed after 5 s
fact("done")
"""

fact("executes")
os.execv(sys.executable, [sys.executable, "-c", _PROGRAM])
