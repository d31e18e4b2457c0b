"""Ends while the thread that listens to the agent collects garbage that is torch's."""

from testbed.late_garbage import collect_late

begun = collect_late("taskd")
assert begun.wait(60)
print("ends while garbage is collected", flush=True)
