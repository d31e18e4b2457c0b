"""What lies beside the tensors of a snapshot, unpickled without running code.

It may have come from another node.

Only what a snapshot is made of is let through: its own two records, paths, plain values, tensors,
arrays. Everything else is refused by name.
"""

import io
import pickle
from typing import Any

import torch

from taskd.errors import StateError

_NAMES = {
    "_codecs": {"encode"},
    "builtins": {"complex", "set"},
    "collections": {"Counter", "OrderedDict", "defaultdict"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # where Python 3.13 has it
    "taskd.checkpoint.pieces": {"Held"},
    "taskd.worker.objects.devices": {"arrived"},
    "taskd.worker.saving.stored": {"Place"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor_v2"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # the memory of a small tensor: a pickle of torch's within this one
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if name in _NAMES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"contains {module}.{name}, which is not loaded from a snapshot"
        )


def loads(data: bytes) -> Any:
    """As `pickle.loads`.

    Raises StateError, whose text is the reason alone: it is damaged, or contains something else
    than plain values.
    """
    return load(io.BytesIO(data))


def load(stream: io.BytesIO) -> Any:
    """The next value of a stream. Raises as `loads`."""
    try:
        return _Unpickler(stream).load()
    except Exception as error:  # damage shows in whatever the unpickler meets first
        message = str(error) or type(error).__name__
        raise StateError(message) from error
