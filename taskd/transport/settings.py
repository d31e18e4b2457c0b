"""The settings of ZeroMQ's sockets, and why they are so: bounds of what waits, and times."""

from taskd.transport.base import MAX_FRAME_BYTES

# Beyond this the socket itself drops the connection. Room above MAX_FRAME_BYTES, so that what is
# merely too long for the protocol is seen, counted and answered for by the wire.
MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
# Messages and bytes per `receive`, so that a flood neither keeps the loop from its deadlines nor
# fills the memory.
BATCH = 1000
BATCH_BYTES = 16 * MAX_MESSAGE_BYTES
MAX_PARTS = 1000  # of a message; ours have one
HIGH_WATER_MARK = 1000  # messages that wait for a router which is not there
# Messages from and for one peer of a router: it has thousands of them. What does not fit waits at
# the sender; a peer that has not read so many is not listening.
RECEIVED_HIGH_WATER_MARK = 64
SENT_HIGH_WATER_MARK = 256
# Connections that wait to be taken in: all agents of a job may come at once, and who finds no room
# tries again after a second.
BACKLOG = 4096
# a connection that says nothing is dropped: strangers must not use up descriptors
HANDSHAKE_MS = 5000
RECONNECT_MS = 100  # a restarted manager is found within this ...
RECONNECT_MAX_MS = 2000  # ... growing to this while nobody is there
# An attempt to connect: twice what the kernel waits before it repeats the first packet of one. Left
# to itself, it repeats it ever more seldom.
CONNECT_MS = 2000
