"""Whether an accelerator works on for this process.

After a kernel has failed (an index out of range, an illegal address, an error of the memory) every
later call of this process to the device fails; another process can use it.
"""

from __future__ import annotations

import sys
from typing import Any

_KINDS = ("cuda", "npu", "xpu")


def why_broken() -> str:
    """What the device answers, if it fails whatever it is asked; "" if it does not.

    Does not wait for the device.
    """
    torch: Any = sys.modules.get("torch")
    for kind in () if torch is None else _KINDS:
        module: Any = getattr(torch, kind, None)
        if module is None or not module.is_initialized():
            continue
        try:
            module.current_stream().query()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""
