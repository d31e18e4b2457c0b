"""Checkpoints for tests.

A state that follows from its version, written by any number of writers of this process, and
compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import torch

from taskd.checkpoint import manifest, owners
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.load import load
from taskd.checkpoint.names import Kind
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write

if TYPE_CHECKING:
    import pathlib


def state_of(version: int, rows: int = 300) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(version)
    return {
        "weight": torch.randn(rows, 17, generator=generator),
        "bias": torch.randn(17, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(version, dtype=torch.int64),
        "schedule": {"last_epoch": version, "milestones": [10, 20], "rate": version / 3},
    }


def tensors_in(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and torch.equal(
            first.contiguous().reshape(-1).view(torch.uint8),
            second.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def draft_of(directory: pathlib.Path, version: int, **changed: Any) -> Draft:
    fields = {
        "job": "job",
        "kind": Kind.PERIODIC,
        "attempt": "first",
        "writers": (0,),
        "generation": 0,
        "world_size": 1,
    }
    return Draft(directory=directory, version=version, **{**fields, **changed})


def save(
    directory: pathlib.Path, version: int, keep: int | None = None, **changed: Any
) -> pathlib.Path:
    draft = draft_of(directory, version, **changed)
    for rank in draft.writers:
        write(
            draft, rank, state_of(version), {f"ranks/{rank}/random": bytes([rank, version % 256])}
        )
    return publish(draft, keep)


def assert_holds(
    path: pathlib.Path, version: int, writers: tuple[int, ...] = (0,), rows: int = 300
) -> None:
    expected = state_of(version, rows)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors_in(expected).items()}
    values = load(path, target)
    for name, tensor in target.items():
        assert same_bits(tensor, expected[name]), name
    assert values == {
        "schedule": expected["schedule"],
        **{f"ranks/{rank}/random": bytes([rank, version % 256]) for rank in writers},
    }


def signed(path: pathlib.Path, **changes: Any) -> None:
    """Change the manifest and correct its checksum, as an attacker or a later version would."""
    (path / "taskd.json").write_bytes(
        manifest.encode(dataclasses.replace(manifest.read(path), **changes))
    )


def replaced(path: pathlib.Path, name: str, data: bytes) -> None:
    """Replace a file and enter it in the manifest, as somebody would who wants it to be loaded."""
    (path / name).write_bytes(data)
    entry = manifest.FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
    signed(
        path,
        files=tuple(entry if file.name == name else file for file in manifest.read(path).files),
    )


def tree(directory: pathlib.Path) -> dict[str, bytes]:
    """Everything below, to see that nothing was touched."""

    def content(path: pathlib.Path) -> bytes:
        if path.is_symlink():
            return os.readlink(path).encode()
        return path.read_bytes() if path.is_file() else b""

    return {
        str(path.relative_to(directory)): content(path) for path in sorted(directory.rglob("*"))
    }


def remounted_read_only(path: pathlib.Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)


def names(directory: pathlib.Path) -> list[str]:
    return sorted(os.listdir(directory))


def gone_owner() -> str:
    """A process that has ended for certain: this one, had it started at another time."""
    place, pid, start = owners.myself().rsplit(".", 2)
    return f"{place}.{pid}.{int(start) - 1}"
