"""What an elected manager is told by the agent that starts it, as bytes."""

import msgpack

from taskd.core.policy.election import Won
from taskd.wire import schema

_MAX_BYTES = 4 * 1024 * 1024  # addresses of 65,536 agents


def encode_won(won: Won) -> bytes:
    """The election, for `decode_won`."""
    data: bytes = msgpack.packb(schema.record(Won).pack(won))
    return data


def decode_won(data: bytes) -> Won:
    """The election. Raises `RemoteProtocolError`."""
    won: Won = schema.record(Won).unpack(schema.parse(data, _MAX_BYTES), "Won")
    return won
