"""What torch loads in every torchrun: the entry point of taskd in the group `torchrun.handlers`.

Torch asks for it while torch.distributed.elastic.rendezvous is imported, when its launcher is not
there yet. So nothing is decided here: when torchrun has read its command line, it calls
`_parse_rendezvous_config`, and then `launch_agent`, where `install` has the last word before
anything runs. A torchrun that does not ask for taskd has spent two calls. Imports nothing that such
a torchrun has not imported anyway.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

BACKEND = "taskd"
_SWITCH = "TASKD_PROCESS_ENABLE"  # off has precedence over the backend
_LAUNCHER = "torch.distributed.launcher.api"
_UTILS = "torch.distributed.elastic.rendezvous.utils"
_PARSE = "_parse_rendezvous_config"


def get_handler() -> Callable[[Any], Any]:
    """What torch registers for `--rdzv-backend=taskd`."""
    utils = sys.modules.get(_UTILS)
    parse = getattr(utils, _PARSE, None)
    if parse is not None:

        @functools.wraps(parse)
        def parse_and_prepare(text: str) -> Any:
            _prepare(sys.modules[_LAUNCHER])
            return parse(text)

        setattr(utils, _PARSE, parse_and_prepare)
    return create_handler


def create_handler(parameters: Any) -> Any:
    """A rendezvous for this name where taskd could not take its place in torchrun."""
    from taskd.torchrun import rendezvous  # noqa: PLC0415

    return rendezvous.create_handler(parameters)


def _prepare(launcher: Any) -> None:
    """Let the next `launch_agent` decide whether taskd is wanted; once."""
    original = launcher.launch_agent
    if getattr(original, "is_prepared", False):
        return

    @functools.wraps(original)
    def launch_agent(config: Any, *others: Any, **named: Any) -> Any:
        launcher.launch_agent = original
        if config.rdzv_backend == BACKEND:
            os.environ.setdefault(_SWITCH, "on")
        if _SWITCH in os.environ:  # else nothing of taskd is loaded
            install()
        return launcher.launch_agent(config, *others, **named)

    launch_agent.is_prepared = True  # type: ignore[attr-defined]
    launcher.launch_agent = launch_agent


def install() -> bool:
    """Put taskd into this torchrun if TASKD_PROCESS_ENABLE is on. True if it is there.

    Never raises: torchrun must start. Once is enough.
    """
    try:
        from taskd.config import is_patch_enabled  # noqa: PLC0415

        if not is_patch_enabled():
            return False
        from taskd.torchrun import patch  # noqa: PLC0415

        patch.apply()
    except Exception:  # the veneer: a failure here is logged and torchrun goes on as it is
        logging.getLogger("taskd").exception(
            "taskd is not installed into this torchrun, which runs without it"
        )
        return False
    return True
