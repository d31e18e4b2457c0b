"""Ends the timed waits of threads that belong to aborted process groups.

csrc/imports/waits.c says why and how. Without libtaskd, or with a torch that waits in another way,
`available` is False: a rank that gloo leaves asleep is then replaced after the pause timeout. Knows
no groups: callers name threads.
"""

import logging
import sys

from taskd.errors import NativeLibraryError
from taskd.native import library

log = logging.getLogger(__name__)

_TORCH_LIBRARY = "libtorch_cpu.so"


class Waits:
    """The hook of this process. Create it once torch is loaded."""

    def __init__(self) -> None:
        self._binding = library.load() if "torch" in sys.modules else None
        if self._binding is None:
            return
        try:
            self._binding.waits_hook(_TORCH_LIBRARY)
        except NativeLibraryError as error:
            log.warning(
                "gloo's waits cannot be ended early in this torch (%s): a rank that gloo leaves "
                "asleep when another dies is replaced after the pause timeout",
                error,
            )
            self._binding = None

    @property
    def available(self) -> bool:
        """Whether waits can be ended."""
        return self._binding is not None

    def expire(self, tids: list[int]) -> None:
        """End the timed waits of these kernel threads, now and from now on."""
        if self._binding is not None and tids:
            self._binding.waits_expire(tids)

    def forgive(self, tids: list[int]) -> None:
        """These threads have ended, or may wait again."""
        if self._binding is not None and tids:
            self._binding.waits_forgive(tids)
