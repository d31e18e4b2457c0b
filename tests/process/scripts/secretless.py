"""Workers that note what they were given, and then do nothing."""

import os
import time

import torch  # noqa: F401

from testbed.script import fact

fact("started", secret_file=os.environ.get("TASKD_SECRET_FILE"))
time.sleep(3600)
