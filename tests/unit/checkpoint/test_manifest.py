from __future__ import annotations

import dataclasses
import json

import pytest

from taskd.checkpoint import manifest
from taskd.checkpoint.manifest import FileEntry, Manifest
from taskd.checkpoint.names import (
    Kind,
    final_name,
    parse_final,
    parse_hidden,
    partial_name,
    removed_name,
)
from taskd.errors import CheckpointError, CorruptCheckpointError

EXAMPLE = Manifest(
    job="a job", kind=Kind.DUMP, version=1200, generation=3, world_size=4, writers=(0, 2, 3),
    saved_at="2026-01-31T10:00:00.000001+00:00",
    fault="rank 1: SIGKILL", torch="2.13.0", states=("model",), host="node-1",
    publisher="0-1.2.3.4",
    files=(FileEntry("__0_0.distcp", 5, "ab" * 32), FileEntry(".metadata", 7, "cd" * 32)),
)  # fmt: skip


def signed(**changes) -> bytes:
    document = json.loads(manifest.encode(EXAMPLE))
    del document["checksum"]
    document.update(changes)
    return json.dumps({**document, "checksum": manifest._checksum(document)}).encode()


def test_what_is_written_is_read() -> None:
    assert manifest.decode(manifest.encode(EXAMPLE)) == EXAMPLE
    strange = dataclasses.replace(EXAMPLE, job="jöb\n\u202e", fault='\x00"')
    assert manifest.decode(manifest.encode(strange)) == strange


def test_no_flipped_bit_goes_unnoticed() -> None:
    data = manifest.encode(EXAMPLE)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                manifest.decode(bytes(damaged))


def test_no_shortened_file_is_read() -> None:
    data = manifest.encode(EXAMPLE)
    for length in range(len(data) - 1):  # the last byte is a newline
        with pytest.raises(CorruptCheckpointError):
            manifest.decode(data[:length])


@pytest.mark.parametrize(("changes", "reason"), [
    ({"format": 2}, "has format 2; this version of taskd reads format 1"),
    ({"format": True}, "has format True"),
    ({"kind": "copy"}, "wrong value for kind"),
    ({"version": -1}, "wrong value for version"),
    ({"version": True}, "wrong value for version"),
    ({"world_size": "4"}, "wrong value for world_size"),
    ({"writers": [0, -1]}, "wrong value for writers"),
    ({"job": None}, "wrong value for job"),
    ({"files": []}, "wrong value for files"),
    ({"files": [{"name": "../outside", "size_bytes": 1, "sha256": "ab" * 32}]},
    "wrong value for files"),
    ({"files": [{"name": "/dev/zero", "size_bytes": 1, "sha256": "ab" * 32}]},
    "wrong value for files"),
    ({"files": [{"name": ".metadata", "size_bytes": 1, "sha256": "ab" * 32}] * 2},
    "wrong value for files"),
    ({"files": [{"name": ".metadata", "size_bytes": 1, "sha256": "AB" * 32}]},
    "wrong value for files"),
    ({"surprise": 1}, "has the fields"),
])  # fmt: skip
def test_a_right_checksum_does_not_make_a_wrong_value_right(changes, reason) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason):
        manifest.decode(signed(**changes))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"1", b"{}", pytest.param(b"[" * 100_000, id="deep"), b"\xff", b'{"format": 1}'],
)
def test_what_is_no_manifest_is_refused(data) -> None:
    with pytest.raises(CorruptCheckpointError):
        manifest.decode(data)


def test_names_say_what_a_folder_is() -> None:
    assert final_name(Kind.PERIODIC, 1200) == "step-000000001200"
    assert final_name(Kind.DUMP, 7, 2) == "dump-000000000007-2"
    assert parse_final("dump-000000000007-2") == (Kind.DUMP, 7)
    for stranger in (
        "step-7",
        "step-000000000007-1",
        "step-000000000007-02",
        "xstep-000000000007",
        "step-000000000007.old",
        ".metadata",
    ):
        assert parse_final(stranger) is None
        assert parse_hidden(stranger) is None
    partial = parse_hidden(partial_name(Kind.PERIODIC, 5, "job", "g1-abc"))
    assert partial is not None
    assert (partial.version, partial.is_partial, partial.attempt) == (5, True, "g1-abc")
    removed = parse_hidden(removed_name(Kind.PERIODIC, 5, "job", "00"))
    assert removed is not None
    assert not removed.is_partial
    assert removed.mark == partial.mark
    for attempt in ("", "a/b", "..", "x" * 65):
        with pytest.raises(CheckpointError, match="attempt"):
            partial_name(Kind.PERIODIC, 5, "job", attempt)
    for version in (-1, 10**12):
        with pytest.raises(CheckpointError, match="version"):
            final_name(Kind.DUMP, version)
