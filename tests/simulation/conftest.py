"""The same Hypothesis profiles as for the core's properties."""

import os

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local")
)
