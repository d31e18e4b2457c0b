"""A torchrun that was elected, and may open few descriptors more than it has, tells all others.

argv: how many more, then where the others hear it. Ends with its standard input, and says how many
connections it had at once, at most.
"""

import os
import resource
import sys

from taskd.agent.link.electing import Electing
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig
from taskd.core.votes import Roster, Voter
from taskd.transport import zeromq

config = AgentConfig.load({"TASKD_RECOVER_STRATEGY": "recover"}, job_id="job")
clock = MonotonicClock()
electing = Electing(config, clock, "first")
electing.take_place(0, 3)
voters = tuple(
    Voter(rank, name, electing.address) for rank, name in enumerate(("first", "second", "third"))
)
electing.obey("127.0.0.1:1", 0)
electing.keep(Roster(0, 1, 3, 1, voters, (), tuple(sys.argv[2:])), clock.now())
limit = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
electing.started(1, "127.0.0.1:1")
most = 0
while not zeromq.poll(electing.links, 0.02, [0]):
    electing.read(clock.now())
    electing.turn(clock.now())
    most = max(most, len(electing.links) - 1)
    zeromq.Dealer("127.0.0.1:1", "first").close()  # what it needs to connect to its own manager
print(most)
