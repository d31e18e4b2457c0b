"""Which device this process works on. Loads no torch: without one there is no device.

The current device belongs to a thread: one that a handler is called in begins with the first.
"""

import sys
from typing import Any

_KINDS = ("cuda", "npu")


def current() -> dict[str, int]:
    """The current device of this thread, by kind; {}: none is in use, as on CPU."""
    return {
        kind: module.current_device()
        for kind, module in ((kind, _module(kind)) for kind in _KINDS)
        if module is not None and module.is_initialized()
    }


def use(devices: dict[str, int]) -> None:
    """Make these the current ones of this thread."""
    for kind, number in devices.items():
        module = _module(kind)
        if module is not None:
            module.set_device(number)


def _module(kind: str) -> Any:
    return getattr(sys.modules.get("torch"), kind, None)
