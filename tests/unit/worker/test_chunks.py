"""Bytes and tensors on their way between two ranks."""

import os

import exchanges
import pytest

pytestmark = pytest.mark.slow

# of 20 MB: to look at each byte by itself takes about 40 s of processor time, and else 0.03 s
_LIMIT_S = 20.0


def test_bytes_arrive_as_they_are_and_are_not_looked_at_one_by_one(world):
    messages = [b"", b"\0", os.urandom(20_000_000)]
    _, (is_same, taken_s) = world.run(exchanges.swap_bytes, messages, size=2)
    assert is_same
    assert taken_s < _LIMIT_S
