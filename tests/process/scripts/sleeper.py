"""Workers that do nothing."""

import time

import torch  # noqa: F401

print("asleep", flush=True)
time.sleep(3600)
