"""What holds for all tests: gloo stays on loopback."""

import os

# Otherwise gloo looks up the host's name for each group; where no resolver answers, that takes 10 s each time.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
