"""Fails at once, every time."""

import a_module_that_does_not_exist  # noqa: F401
