"""The metadata of a checkpoint, read back whichever Python has written it."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import assert_holds, replaced, save
from torch.distributed.checkpoint import metadata as dcp

from taskd.checkpoint.load import contents
from taskd.errors import CorruptCheckpointError

if TYPE_CHECKING:
    import pathlib

ENCODING = dcp._MEM_FORMAT_ENCODING


class Call:
    """Is pickled as a call of `getattr`."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.arguments


def pickled_by_name(path: pathlib.Path) -> bytes:
    """The metadata at `path` as CPython 3.11.2 pickles it.

    The member of an Enum as `getattr(its class, its name)`; 3.10, 3.11.7 and 3.12 call the class
    with the value.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[ENCODING] = lambda member: (getattr, (ENCODING, member.name))
    pickler.dump(pickle.loads((path / ".metadata").read_bytes()))
    return buffer.getvalue()


def test_members_that_are_pickled_by_name_are_read(tmp_path) -> None:
    """Debian 12 has Python 3.11.2: no checkpoint that was written there could be loaded."""
    path = save(tmp_path, 20)
    data = pickled_by_name(path)
    assert b"getattr" in data
    replaced(path, ".metadata", data)
    assert_holds(path, 20)


@pytest.mark.parametrize(
    "arguments",
    [
        (ENCODING, "__class__"),
        (ENCODING, "mro"),
        (ENCODING, "_member_map_"),
        (ENCODING, ["TORCH_CHANNELS_LAST"]),
        (ENCODING, "NO_MEMBER"),
        (ENCODING, "NO_MEMBER", 1),
        (ENCODING, "TORCH_CHANNELS_LAST", 1),
        (dcp.Metadata, "__init__"),
        (dcp.Metadata, "__reduce__"),
        (torch.float32, "to_complex"),
        (torch.Size, "numel"),
        ("text", "format"),
        (),
    ],
)
def test_nothing_else_is_reached_by_name(tmp_path, arguments) -> None:
    path = save(tmp_path, 20)
    replaced(path, ".metadata", pickle.dumps(Call(*arguments)))
    with pytest.raises(
        CorruptCheckpointError, match=r"contains pickled code: refused \(builtins.getattr\)"
    ):
        contents(path)


def test_getattr_itself_is_no_metadata(tmp_path) -> None:
    path = save(tmp_path, 20)
    replaced(path, ".metadata", pickle.dumps(getattr))
    with pytest.raises(CorruptCheckpointError, match="is damaged: it is no metadata of DCP"):
        contents(path)
