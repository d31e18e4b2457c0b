"""What holds for all tests: gloo stays on loopback, and random histories have a seed that everybody can read."""

import os
import secrets

# Otherwise gloo looks up the host's name for each group; where no resolver answers, that takes 10 s each time.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

# Fresh in each run. The processes of xdist inherit it.
SEED = os.environ.setdefault("TASKD_TEST_SEED", str(secrets.randbits(32)))


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"random histories: TASKD_TEST_SEED={SEED} plays the same ones again")
