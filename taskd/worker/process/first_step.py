"""The first optimizer step of this process, of whatever training it is.

By then a script has imported what its training needs, lazily imported parts included; and after a
restart of the group it tells how long that took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def watch(tell: Callable[[], None]) -> None:
    """Call `tell` once, in the main thread, after the first step of any optimizer of torch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    waiting = [tell]

    def stepped(*_: Any) -> None:
        # The hook stays: it must not be taken out while torch goes through them.
        while waiting:
            waiting.pop()()

    register_optimizer_step_post_hook(stepped)
