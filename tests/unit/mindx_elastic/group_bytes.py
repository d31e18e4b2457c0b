"""Group files by hand: what MindSpore's ParallelGroupMap needs of protocol buffers."""

from __future__ import annotations


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def ranks(numbers, *, packed=False) -> bytes:
    if packed:
        return field(1, b"".join(varint(one) for one in numbers))
    return b"".join(varint(1 << 3) + varint(one) for one in numbers)


def group_map(restore, *, others=(), packed=False) -> bytes:
    """As MindSpore writes it: its groups of communication, then the ranks to restore from."""
    items = b"".join(
        field(1, field(1, name.encode()) + field(2, ranks(members))) for name, members in others
    )
    return items + field(2, ranks(restore, packed=packed))
