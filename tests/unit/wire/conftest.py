"""Examples have no limit of time: a busy machine is no reason to fail."""

import hypothesis

hypothesis.settings.register_profile("wire", deadline=None)
hypothesis.settings.load_profile("wire")
