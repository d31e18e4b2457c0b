"""A module of a script's own folder."""

WHO = open("/proc/self/comm").read().strip()  # noqa: SIM115
