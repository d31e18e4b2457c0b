"""docs/protocol.md lists every message type with its code and fields, and nothing else."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from taskd.transport import base
from taskd.wire import codec, messages

PAGE = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text()


def listed_messages() -> list[tuple[str, ...]]:
    """Of each message: name, code, direction, fields, when. As "- `A` (1), a → b: `c`. When"."""
    pattern = r"(?m)^- `(\w+)` \((\d+)\), ([^:]+): (`\w+`(?:, `\w+`)*)\. (.*)$"
    return re.findall(pattern, PAGE.replace("\n  ", " "))


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_message_is_listed_with_its_code_and_fields() -> None:
    listed = {name: (int(code), names(fields)) for name, code, _, fields, _ in listed_messages()}
    registered = {
        cls.__name__: (code, [field.name for field in dataclasses.fields(cls)])
        for code, cls in messages.MESSAGE_BY_CODE.items()
    }
    assert listed == registered


def test_every_message_has_a_direction_and_an_occasion() -> None:
    for name, _, direction, _, occasion in listed_messages():
        assert "→" in direction, name
        assert len(occasion) > 20, name


def test_the_envelope_is_described() -> None:
    frame = PAGE.partition("## Frame")[2].partition("\nRules:")[0]
    listed = re.findall(r"(?m)^- `(\w+)`, ", frame)
    assert sorted(listed) == sorted(
        ["version", "type", "body", *(field.name for field in dataclasses.fields(codec.Envelope))]
    )


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"at most {codec.MAX_MESSAGE_BYTES:,} bytes" in PAGE
    assert f"protocol version, now {codec.PROTOCOL_VERSION}" in PAGE
    assert base.MAX_FRAME_BYTES == codec.MAX_MESSAGE_BYTES
