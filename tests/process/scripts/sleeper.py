"""Workers that do nothing."""

import time

import torch  # noqa: F401 - a worker has torch loaded

print("asleep", flush=True)
time.sleep(3600)
