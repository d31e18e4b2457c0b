"""What is in `sys.modules`, looked at without running any code of it.

Some entries are no modules, and some are executed as soon as anybody asks them for an attribute.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def namespace(module: Any) -> dict[str, Any]:
    """What an entry of sys.modules has by name; nothing, if it is no module. Runs no code of it.

    A lazy one (`importlib.util.LazyLoader`) is executed as soon as it is asked for an attribute,
    `__dict__` too, and what it raises then is not for us.
    """
    if not issubclass(type(module), ModuleType):  # `isinstance` asks it
        return {}
    return vars(ModuleType)["__dict__"].__get__(module) or {}
