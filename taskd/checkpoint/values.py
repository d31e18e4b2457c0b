"""Plain values, as bytes that are loaded without running code.

Numbers, text, bytes, tensors, and lists, tuples and dicts of them.

Anything else is refused when it is saved, by name and type: what could not be loaded must not look
as if it had been saved.
"""

import codecs
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from taskd.errors import CheckpointError, CorruptCheckpointError

# Python pickles longer ones in a form that torch does not load.
_MAX_INT_BITS = 2039
_ATOMS = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)


class _NoBytes:
    """Is written in place of b"", and read as that.

    Torch pickles in a form that calls `bytes` for it, and loads nothing that does.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


# Numbers and texts of other libraries (numpy's float64, enumerations) become the ones that they are
# based on.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int,
    float: float,
    complex: complex,
    str: str.__str__,
    bytes: lambda value: bytes(value) or _NoBytes(),
}


@dataclass(frozen=True)
class Packed:
    """A plain value as `pack` has made it, in place of one that may change before it is written."""

    data: bytes


def pack(name: str, value: Any) -> bytes:
    """Raises CheckpointError for a value that could not be loaded safely."""
    if isinstance(value, Packed):
        return value.data
    buffer = io.BytesIO()
    torch.save(_plain(name, value), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Tensors come on the CPU. Raises CorruptCheckpointError, whose text is the reason alone."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpointError(
            f"contains pickled code: refused ({str(error).partition(chr(10))[0][:200]})"
        ) from error
    # torch tells damage by whatever its parser meets first.
    except Exception as error:
        raise CorruptCheckpointError(f"is damaged: {error}") from error


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise CheckpointError(
            f"{name} is an int of {value.bit_length()} bits, and {_MAX_INT_BITS} at most could be "
            "loaded without running code: give text or bytes"
        )
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _own_memory(name, value)
    if type(value) in (list, tuple):
        return type(value)(_plain(f"{name}[{index}]", item) for index, item in enumerate(value))
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)(
            {
                _plain(f"{name} (a key)", key): _plain(f"{name}[{key!r}]", item)
                for key, item in value.items()
            }
        )
    for base, convert in _BASES.items():
        if isinstance(value, base):
            return convert(value)
    if (
        type(value).__module__ == "numpy"
        and getattr(value, "shape", None) == ()
        and hasattr(value, "item")
    ):
        return value.item()
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which could not be "
        "loaded without running code: give numbers, text, "
        "bytes, tensors, or lists, tuples and dicts of them",
    )


def _own_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and with no more memory behind it than its own.

    Torch.save writes all that is behind it.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__} on {tensor.device} within a "
            "value: give it as an entry of its own"
        )
    plain = tensor.detach().cpu()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
