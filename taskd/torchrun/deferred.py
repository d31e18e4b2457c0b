"""torch's c10d rendezvous, made only when it is needed.

torch connects to its store before the agent is there, and gives up where nobody listens. A torchrun
that comes late needs no rendezvous: the manager tells it where the others are, and the host of that
store may be lost (`taskd.torchrun.places`).
"""

from __future__ import annotations

import os
from copy import copy
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.launcher.api import LaunchConfig

_TORCHS_NAME, _NAME = "c10d", "taskd-c10d"
_NOT_SHARED_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's own


def deferred(config: LaunchConfig) -> LaunchConfig:
    """The launch with this rendezvous in the place of c10d; another one is left as it is."""
    if config.rdzv_backend != _TORCHS_NAME or config.max_nodes == 1:
        return config
    rendezvous_handler_registry.register(_NAME, DeferredRendezvous)
    made = copy(config)
    made.rdzv_backend = _NAME
    return made


class DeferredRendezvous(RendezvousHandler):
    """See the module. What is asked of it before it is needed comes from the command line."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """`parameters`: as torch has them."""
        self.settings = copy(parameters)  # torch's own has min_nodes and max_nodes under this name
        self.settings.backend = _TORCHS_NAME
        self._made: Any = None

    @property
    def _inner(self) -> Any:
        """Torch's own. Raises RendezvousError: nobody listens at its endpoint."""
        if self._made is None:
            self._made = rendezvous_handler_registry.create_handler(self.settings)
        return self._made

    @property
    def _store(self) -> Store:
        return self._inner._store

    @property
    def use_agent_store(self) -> bool:
        """As torch's."""
        return os.getenv(_NOT_SHARED_ENV, "0") != "1"

    def get_backend(self) -> str:
        """What torch has been told."""
        return _NAME

    def get_run_id(self) -> str:
        """As torch's."""
        return str(self.settings.run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        """As torch's, from which all that follows comes, too."""
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        """As torch's."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """As torch's."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As torch's."""
        return int(self._inner.num_nodes_waiting())

    def shutdown(self) -> bool:
        """As torch's; nothing, if it was not needed."""
        return self._made is None or bool(self._made.shutdown())
