"""Where scripts import names of `mindio_ttp.framework_ttp` from as well: all of them, and these."""

from mindio_ttp import framework_ttp
from mindio_ttp.framework_ttp import *  # noqa: F403
from mindio_ttp.framework_ttp.processor import get_device

__all__ = [*framework_ttp.__all__, "get_device"]  # noqa: PLE0604
