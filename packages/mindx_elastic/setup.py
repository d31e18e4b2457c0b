"""Names the licence; the rest is in pyproject.toml."""

from setuptools import setup

setup(license="Apache-2.0")
