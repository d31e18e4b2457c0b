"""What of libtaskd is switched off, read in every process that could load it.

A value that means nothing leaves it on: agents refuse it when they start (`AgentConfig`).
"""

import os

from taskd.config.names import NATIVE_ENV, NUMERIC_NAMES_ENV
from taskd.config.values import Environment


def is_native_off(environment: Environment = os.environ) -> bool:
    """Whether libtaskd is not to be loaded."""
    return environment.get(NATIVE_ENV, "").strip().lower() == "off"


def are_numeric_names_off(environment: Environment = os.environ) -> bool:
    """Whether torch's name lookups are to be left as they are."""
    return environment.get(NUMERIC_NAMES_ENV, "").strip().lower() == "off"
