"""init_taskd_proxy and destroy_taskd_proxy: the relay of this node."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.api.veneer import as_bool, warn_of_unknown_keys
from taskd.config import RelayConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.agent.clients.relay import Relay

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """What init made for destroy."""

    relay: Relay | None = None


_held = _Held()


@as_bool
def init_taskd_proxy(config: Mapping[str, object]) -> bool:
    """Listen for this node's clients. Does not wait for the manager: messages wait for it."""
    from taskd.agent.clients.relay import Relay  # noqa: PLC0415
    from taskd.clock import MonotonicClock  # noqa: PLC0415

    loaded = RelayConfig.load(config)
    warn_of_unknown_keys("init_taskd_proxy", config, loaded.KEYS)
    if _held.relay is not None:
        log.error("init_taskd_proxy: this process has a relay already, at %s", _held.relay.address)
        return False
    _held.relay = Relay(loaded, MonotonicClock())
    _held.relay.start()
    return True


@as_bool
def destroy_taskd_proxy() -> bool:
    """Stop the relay."""
    relay, _held.relay = _held.relay, None
    if relay is None:
        log.error("destroy_taskd_proxy: call init_taskd_proxy first")
        return False
    relay.close()
    return True
