"""Every duration of the system, derived from the one that a user sets (`TASKD_FAULT_TIMEOUT`).

Owns the numbers and the order that must hold between them. Knows no clock and no environment.

The required order, and why:

    communication_grace <= heartbeat < manager_silence < pause = agent_lease < start
    heartbeat + 2 unacknowledged < agent_lease

- communication_grace <= heartbeat: a victim waits for the real cause no longer than a healthy node
  may stay silent;
- heartbeat < manager_silence, agent_lease: several heartbeats may be lost before anybody is taken
  for dead;
- heartbeat + 2 unacknowledged < agent_lease: a network that is away costs a connection, which is
  made anew before the lease ends;
- manager_silence < agent_lease: an agent knocks again long before the manager gives its node up;
- pause <= agent_lease: a rank that does not come is replaced by its agent before that agent can be
  lost through it;
- pause < start: coming to the gate of a new process takes imports and set-up, leaving a step does
  not.
"""

from dataclasses import dataclass, replace

DEFAULT_FAULT_TIMEOUT_S = 30.0
DEFAULT_HANG_FLOOR_S = 2.0
DEFAULT_HANG_CEILING_S = 1800.0
# Nodes. Of more than these the manager gets one message instead of one for each rank, ...
_LARGE = 256
_GATHER_S = 0.005  # ranks of one node stop within less
# ... and it reads about so many heartbeats in a second, which are most of what it does.
_HEARTBEATS_PER_S = 1200
_BEATS_OF_SILENCE = 2.5  # in a manager's silence: one answer may be lost


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds. Build with `Timeouts.derive`."""

    communication_grace_s: float  # a broken communication waits this long for its cause
    heartbeat_s: float  # an agent speaks at least this often
    manager_silence_s: float  # an agent takes the manager for lost
    pause_s: float  # a live rank must have paused
    agent_lease_s: float  # the manager takes a node for lost
    lease_recheck_s: float  # the end of the lease, for what waited while the manager itself slept
    start_s: float  # a new process must have come to the gate; ranks that returned must have ended
    fallback_connected_s: float  # how long a fault waits for a manager that had been there
    fallback_never_connected_s: float  # ... and for one that never was
    lost_grace_s: float  # alarm rang, no exit yet: SIGKILL
    restart_grace_s: float  # SIGTERM to SIGKILL when the group is restarted
    dump_s: float  # a rank has this long to write its part of a dump
    give_up_grace_s: float  # SIGTERM to SIGKILL when the job ends: users save in their handlers
    examine_s: float  # a rank that hangs has this long to write down its stacks before SIGKILL
    hang_floor_s: float  # nobody is taken for hanging sooner
    # nor sooner than this if all wait for the network, or it does not run at all
    hang_wait_s: float
    hang_busy_s: float  # ... nor sooner than this while something is going on in it
    hang_ceiling_s: float  # nor later, however long steps and checkpoints were
    # At the end and with a value, as older recorded stories have none.
    unacknowledged_s: float = 5.0  # a connection whose other end acknowledges nothing is made anew
    gather_s: float = 0.0  # what the ranks of a node report together is kept so long: large jobs

    @classmethod
    def derive(
        cls,
        fault_timeout_s: float = DEFAULT_FAULT_TIMEOUT_S,
        *,
        hang_floor_s: float = DEFAULT_HANG_FLOOR_S,
        hang_ceiling_s: float = DEFAULT_HANG_CEILING_S,
    ) -> "Timeouts":
        """Everything from the one setting T, and the bounds of what is learnt.

        Raises ValueError unless all are positive and finite.
        """
        t = float(fault_timeout_s)
        if not 0 < t < float("inf"):
            raise ValueError(
                f"fault timeout must be a positive number of seconds, not {fault_timeout_s!r}"
            )
        if not 0 < hang_floor_s < hang_ceiling_s < float("inf"):
            raise ValueError(
                f"hang limits must be positive and in order, not {hang_floor_s!r} and "
                f"{hang_ceiling_s!r}"
            )
        heartbeat_s = min(1.0, t / 10)
        timeouts = cls(
            communication_grace_s=min(t / 30, heartbeat_s),
            heartbeat_s=heartbeat_s,
            # a round trip over a bad network may take a second
            unacknowledged_s=max(t / 6, min(1.0, t / 3)),
            manager_silence_s=t / 3,
            pause_s=t,
            agent_lease_s=t,
            lease_recheck_s=2 * heartbeat_s,
            start_s=20 * t,
            fallback_connected_s=t / 3,
            fallback_never_connected_s=t / 15,
            lost_grace_s=min(5.0, t / 6),
            restart_grace_s=min(5.0, t / 6),
            dump_s=60 * t,
            give_up_grace_s=t,
            examine_s=1.0,  # 0.25 s was not enough on a machine with more to do than processors
            hang_floor_s=hang_floor_s,
            hang_wait_s=max(DEFAULT_FAULT_TIMEOUT_S, t, hang_floor_s),
            hang_busy_s=10 * max(DEFAULT_FAULT_TIMEOUT_S, t, hang_floor_s),
            hang_ceiling_s=hang_ceiling_s,
        )
        timeouts.check()
        return timeouts

    def of_job(self, node_count: int) -> "Timeouts":
        """Those of a job of so many nodes, from those of any job."""
        if node_count <= _LARGE:
            return self
        longest_s = max(self.heartbeat_s, self.manager_silence_s / _BEATS_OF_SILENCE)
        heartbeat_s = min(max(self.heartbeat_s, node_count / _HEARTBEATS_PER_S), longest_s)
        timeouts = replace(
            self,
            heartbeat_s=heartbeat_s,
            lease_recheck_s=2 * heartbeat_s,
            gather_s=_GATHER_S,
        )
        timeouts.check()
        return timeouts

    def check(self) -> None:
        """Assert the order of the module docstring."""
        assert (
            0
            < self.communication_grace_s
            <= self.heartbeat_s
            < self.manager_silence_s
            < self.agent_lease_s
        )
        assert self.heartbeat_s + 2 * self.unacknowledged_s < self.agent_lease_s
        assert self.pause_s <= self.agent_lease_s
        assert self.pause_s < self.start_s
        assert self.lease_recheck_s < self.agent_lease_s
