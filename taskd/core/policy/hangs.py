"""Who hangs, and who only waits for the one that hangs: marks of all ranks in, a verdict out.

A job stands still when one rank does. From outside all ranks look alike, and so do a hang, a slow
step and a checkpoint. What tells them apart:

    stopped     libtaskd's thread does not run, and the kernel says that the process is stopped
    frozen      that thread does not run, whatever the reason
    locked      the main thread stands, and the interpreter lock is held: the runtime's Python
        thread does not run
    asleep      the main thread stands outside collectives; neither it nor its children use the
        processor, read or write
    busy        the main thread stands outside collectives, but something is going on in it (or it
        waits for something outside the job)
    waiting     it has begun a collective that is not complete: a victim

A rank that was told to go on and stays at the gate is the culprit, sooner if it is stopped. Else a
rank that is not waiting, while others wait, is one once it has stood for longer than its limit,
unless it has itself begun what yet another rank has not. When all wait, it is the network, or a
program whose ranks call different collectives, or one in which some return before others: nobody is
replaced. A slow rank that moves is never a culprit. Nor is one whose agent has not spoken lately:
what it does meanwhile is not known.

Limits are learnt: a multiple of the longest of the recent steps, within bounds. The longest step is
that of the rank whose longest is shortest, because the steps of the others contain waiting for
somebody's checkpoint. Checkpoints, evaluations and the first steps of a generation have limits of
their own; whoever is seen to work in one of the first two has the longest of all. Each hang at a
version that had one already has a limit that is longer by a factor: whatever takes long there and
is no hang gets its time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from taskd.core.marks import Activity, GroupMark, Mark
from taskd.core.timeouts import Timeouts

STEP_FACTOR = 3.0  # limits are so many times what was seen
AGAIN_FACTOR = 8.0  # ... and longer by this for each hang before at the same version
SMALL_JOB = 256  # ranks: up to so many are judged with each heartbeat
RANK_S = 1.5e-5  # of a larger job: seconds from one judgement to the next, for each rank
LOCKED_S = 1.0  # the runtime's thread runs four times a second
FRESH_HEARTBEATS = 2.0  # a mark older than so many heartbeats proves nothing

_LONG = {"checkpoint": "checkpoint_s", "evaluation": "evaluation_s"}
# Where a rank neither hangs nor waits in a step.
_OUTSIDE = frozenset({"boot", "returned", "exiting", "paused", "unknown"})
_SETTING_UP = frozenset({"entered"})


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that hangs, how (half a sentence), and for how long already."""

    rank: int
    detail: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ranks that hang; or none, and `network` says what all of them wait in."""

    culprits: tuple[Culprit, ...] = ()
    network: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Observation:
    """A mark, and whether it was taken lately.

    Its durations are what the agent saw: an agent that is late proves nothing of its ranks.
    """

    mark: Mark
    is_fresh: bool

    @property
    def still_s(self) -> float:
        return self.mark.still_s

    @property
    def is_locked(self) -> bool:
        return self.mark.python_s >= LOCKED_S

    @property
    def is_waiting(self) -> bool:
        """In a collective, if its word is fresh."""
        return self.mark.is_waiting and not self.is_locked and self.mark.frozen_s < LOCKED_S


@dataclass(frozen=True, slots=True)
class _Longest:
    """What was seen to take how long.

    `step_s`: what a step may take; None: some rank has not done two steps yet. `long_s`: the
    longest of each of the phases that take long.
    """

    step_s: float | None
    long_s: dict[str, float]

    @classmethod
    def of(cls, seen: Sequence[_Observation]) -> "_Longest":
        shortest_s = min((one.mark.slowest_s for one in seen), default=0.0)
        long_s = {
            phase: max((getattr(one.mark, name) for one in seen), default=0.0)
            for phase, name in _LONG.items()
        }
        return cls(shortest_s if shortest_s > 0 else None, long_s)


@dataclass(frozen=True, slots=True)
class _Begun:
    """How many collectives were begun in each communicator: spares comparing all ranks with all.

    `least`: by those that do not wait; `most`: by those whose word is fresh. `is_awaited`: one of
    these waits.
    """

    least: dict[int, int]
    most: dict[int, int]
    is_awaited: bool

    @classmethod
    def of(cls, seen: Sequence[_Observation]) -> "_Begun":
        least: dict[int, int] = {}
        most: dict[int, int] = {}
        for one in seen:
            for group in one.mark.groups:
                if not one.is_waiting:
                    least[group.id] = min(least.get(group.id, group.entered), group.entered)
                if one.is_fresh:
                    most[group.id] = max(most.get(group.id, group.entered), group.entered)
        return cls(least, most, any(one.is_fresh and one.is_waiting for one in seen))

    def has_laggard(self, one: _Observation) -> bool:
        """Whether a rank that does not wait has not begun what this one has."""
        return any(
            group.entered > self.least.get(group.id, group.entered) for group in one.mark.groups
        )

    def may_be_awaited(self, one: _Observation) -> bool:
        """Whether anybody can wait for this one."""
        return self.is_awaited or any(
            self.most.get(group.id, 0) > group.entered for group in one.mark.groups
        )


class HangDetector:
    """The newest mark of each rank. Knows nothing of members: callers say who is to be judged."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._seen: dict[int, tuple[float, Mark]] = {}
        self._still: set[int] = set()  # ranks whose newest mark a verdict could be about
        self._judged_at = 0.0
        self._hangs: dict[int | None, int] = {}  # version -> verdicts so far

    def use(self, timeouts: Timeouts) -> None:
        """From now on."""
        self._timeouts = timeouts

    def note(self, now: float, marks: Iterable[Mark]) -> None:
        """An agent looked at its workers."""
        floor_s = self._timeouts.hang_floor_s
        for mark in marks:
            self._seen[mark.rank] = (now, mark)
            if mark.still_s >= floor_s or mark.frozen_s >= floor_s:
                self._still.add(mark.rank)
            elif self._still:
                self._still.discard(mark.rank)

    def is_due(self, now: float) -> bool:
        """Whether a verdict is possible, and not so soon after the last one was looked for.

        To look costs O(n), and heartbeats come n times a second: while all ranks move it is not
        done at all, and a large job that stands (it writes a checkpoint) is looked at now and then.
        """
        if not self._still:
            return False
        ranks = len(self._seen)
        pause_s = min(RANK_S * ranks, self._timeouts.heartbeat_s / 2) if ranks > SMALL_JOB else 0.0
        if now - self._judged_at < pause_s:
            return False
        self._judged_at = now
        return True

    def count(self, rank: int) -> int | None:
        """A hang of this rank is being answered. Returns the version that the rank was at."""
        version = self._seen[rank][1].version
        self._hangs = {version: self._hangs.get(version, 0) + 1}
        return version

    def judge(
        self, now: float, generation: int, lives: Iterable[tuple[int, int]],
        returned: Sequence[int] = (),
    ) -> Verdict | None:  # fmt: skip
        """Who hangs among these lives (rank, incarnation), which train with `taskd.recoverable`.

        `returned`: the ranks whose functions have returned. None: nobody, or not long enough, or it
        cannot be told, or nobody healthy would be left.
        """
        wanted = list(lives)
        seen = self._observe(now, generation, wanted)
        culprits = self._frozen(seen, self._timeouts.hang_floor_s)
        frozen = {culprit.rank for culprit in culprits}
        culprits += self._standing([one for one in seen if one.mark.rank not in frozen])
        if culprits:
            return Verdict(tuple(culprits)) if len(culprits) < len(wanted) else None
        return self._network(seen, returned) if len(seen) == len(wanted) else None

    def frozen(
        self,
        now: float,
        generation: int,
        lives: Iterable[tuple[int, int]],
        patience_s: float | None = None,
    ) -> tuple[Culprit, ...]:
        """Those of these lives that do not run at all, whatever they were doing."""
        seen = [
            self._observation(now, *self._seen[rank])
            for rank, incarnation in lives
            if rank in self._seen and self._is_of(rank, incarnation, generation)
        ]
        return tuple(self._frozen(seen, patience_s or self._timeouts.hang_floor_s))

    def left_behind(
        self, now: float, generation: int, lives: Iterable[tuple[int, int]], *, is_late: bool
    ) -> tuple[Culprit, ...]:
        """Those of these lives that were told to enter this generation, and have not.

        `is_late`: that was long ago; before, those alone that do not run at all.
        """
        found = []
        for rank, incarnation in lives:
            seen_at, mark = self._seen.get(rank, (0.0, None))
            if mark is None or mark.incarnation != incarnation or mark.generation >= generation:
                continue
            one = self._observation(now, seen_at, mark)
            if not is_late:
                found += self._frozen([one], self._timeouts.hang_floor_s)
            elif one.is_fresh and mark.activity != Activity.TRACED:
                locked = ", with the interpreter lock held" if one.is_locked else ""
                detail = f"still {mark.phase} after {one.still_s:.1f} s, told to go on{locked}"
                found.append(Culprit(rank, detail, one.still_s))
        return tuple(found)

    def _observe(
        self, now: float, generation: int, wanted: Sequence[tuple[int, int]]
    ) -> list[_Observation]:
        """What is known of this generation."""
        found = []
        for rank, incarnation in wanted:
            seen_at, mark = self._seen.get(rank, (0.0, None))
            if mark is None or mark.phase in _OUTSIDE:
                continue
            if (mark.incarnation, mark.generation) == (incarnation, generation):
                found.append(self._observation(now, seen_at, mark))
        return found

    def _is_of(self, rank: int, incarnation: int, generation: int) -> bool:
        """Whether the newest mark of this rank is of this life, and of no later generation."""
        mark = self._seen[rank][1]
        return mark.incarnation == incarnation and mark.generation <= generation

    def _observation(self, now: float, seen_at: float, mark: Mark) -> _Observation:
        return _Observation(mark, now - seen_at <= FRESH_HEARTBEATS * self._timeouts.heartbeat_s)

    # ------------------------------------------------------------ rules

    def _frozen(self, seen: Sequence[_Observation], floor_s: float) -> list[Culprit]:
        found = []
        for one in seen:
            mark = one.mark
            is_stopped = mark.activity == Activity.STOPPED
            limit_s = floor_s if is_stopped else self._timeouts.hang_wait_s
            if mark.activity == Activity.TRACED or mark.frozen_s < limit_s or not one.is_fresh:
                continue
            otherwise = f"not running at all ({mark.activity or 'unknown state'})"
            how = "stopped by a signal" if is_stopped else otherwise
            detail = f"{how} for {mark.frozen_s:.1f} s in {mark.phase}"
            found.append(Culprit(mark.rank, detail, mark.frozen_s))
        return found

    def _standing(self, seen: Sequence[_Observation]) -> list[Culprit]:
        """Ranks outside collectives that others wait for."""
        found: list[Culprit] = []
        longest = _Longest.of(seen)
        limits = [
            (one, self._limit(one, longest))
            for one in seen
            if not one.is_waiting and one.is_fresh and one.mark.activity != Activity.TRACED
        ]
        suspects = [(one, limit_s) for one, limit_s in limits if one.still_s >= limit_s]
        if not suspects:
            return found
        begun = _Begun.of(seen)
        for one, limit_s in suspects:
            if begun.has_laggard(one):
                # a victim itself, in a call that does not tell whether it is complete (NCCL)
                continue
            victims = (other for other in seen if other is not one and _waits_for(other, one))
            patient = [
                victim
                for victim in (victims if begun.may_be_awaited(one) else ())
                if victim.is_fresh and victim.still_s >= limit_s / 2
            ]
            if patient:
                found.append(Culprit(one.mark.rank, _describe(one, patient), one.still_s))
        return found

    def _network(self, seen: Sequence[_Observation], returned: Sequence[int]) -> Verdict | None:
        """Everybody waits who has not returned."""
        all_wait = all(one.is_waiting and one.is_fresh for one in seen)
        if len(seen) + len(returned) < 2 or not all_wait:
            return None
        longest = _Longest.of(seen)
        if longest.step_s is None:
            return None
        # Some may have begun a collective in advance, and be in something that takes long.
        long = [
            self._limit(one, longest)
            for one in seen
            if one.mark.phase in _LONG or one.mark.phase in _SETTING_UP
        ]
        version = seen[0].mark.version
        wait_s = self._bound(STEP_FACTOR * longest.step_s, self._timeouts.hang_wait_s, version)
        limit_s = max(wait_s, *long, 0.0)
        shortest = min(one.still_s for one in seen)
        if shortest < limit_s:
            return None
        groups = (group for one in seen for group in one.mark.groups)
        where = sorted({_operation(group) for group in groups if group.entered > group.left})
        what = "in " + " and ".join(where) if where else "in a collective"
        same = "the same collective" if len(where) <= 1 else "collectives that do not fit together"
        text = f"all ranks wait {what} for {shortest:.1f} s: {same}"
        if returned:
            who = _waits([one.mark.rank for one in seen])
            over = f"the function of rank {_shown(returned)} has returned"
            text = f"{who} {what} for {shortest:.1f} s, and {over}: all have to make equal steps"
        return Verdict(network=text, since_s=shortest)

    # ------------------------------------------------------------ limits

    def _limit(self, one: _Observation, longest: _Longest) -> float:
        """How long this rank may stay where it is."""
        timeouts, mark, step_s = self._timeouts, one.mark, longest.step_s
        if mark.activity == Activity.ENDING:  # its end will be told, however large its memory is
            return self._bound(0.0, timeouts.hang_wait_s, mark.version)
        # unknown: nobody has looked long enough yet
        is_busy = mark.activity in (Activity.BUSY, Activity.UNKNOWN) and not one.is_locked
        works = is_busy or mark.activity == Activity.DISK
        if mark.phase in longest.long_s:
            # What was short was another file perhaps: a small one, that was read at the start.
            long_s = 0.0 if works else longest.long_s[mark.phase]
            learned_s = STEP_FACTOR * long_s if long_s > 0 else timeouts.hang_ceiling_s
            return self._bound(learned_s, timeouts.hang_busy_s, mark.version)
        if step_s is None or mark.phase in _SETTING_UP:
            return self._bound(timeouts.start_s, timeouts.hang_busy_s, mark.version)
        # It waited when last seen, or nothing in it gets to run: an overloaded machine does this.
        is_doubtful = mark.is_waiting or mark.frozen_s >= LOCKED_S
        may_take_long = works or is_doubtful or mark.phase == "data"
        at_least = timeouts.hang_busy_s if may_take_long else timeouts.hang_floor_s
        return self._bound(STEP_FACTOR * step_s, at_least, mark.version)

    def _bound(self, seen_s: float, at_least_s: float, version: int | None) -> float:
        """`version`: of the rank in question."""
        factor = AGAIN_FACTOR ** self._hangs.get(version, 0)
        return min(max(seen_s, at_least_s) * factor, self._timeouts.hang_ceiling_s)


def _common(one: _Observation, other: _Observation) -> list[tuple[GroupMark, GroupMark]]:
    """The communicators that both are in."""
    mine = {group.id: group for group in one.mark.groups}
    return [(mine[group.id], group) for group in other.mark.groups if group.id in mine]


def _waits_for(victim: _Observation, culprit: _Observation) -> bool:
    """Whether `victim` is in a collective that `culprit` has not begun.

    Where nothing is known of communicators, any will do.
    """
    if _common(victim, culprit):
        return _is_ahead(victim, culprit) or (victim.is_waiting and culprit.is_locked)
    return victim.is_waiting


def _is_ahead(one: _Observation, other: _Observation) -> bool:
    """Whether `one` has begun a collective that `other` has not."""
    return any(mine.entered > theirs.entered for mine, theirs in _common(one, other))


def _operation(group: GroupMark) -> str:
    return f"{group.operation or 'collective'} {group.entered} of group {group.name or group.id}"


_DOING = {
    Activity.ASLEEP: "asleep",
    Activity.BUSY: "busy",
    Activity.DISK: "waiting for a file, the network or another process",
    Activity.STOPPED: "stopped by a signal",
    Activity.ENDING: "killed or exiting, and not gone",
}


def _describe(culprit: _Observation, victims: Sequence[_Observation]) -> str:
    mark = culprit.mark
    doing = _DOING.get(mark.activity, "standing")
    if culprit.is_locked and mark.activity not in (Activity.STOPPED, Activity.ENDING):
        doing = f"{doing} with the interpreter lock held"
    pairs = (pair for victim in victims for pair in _common(victim, culprit))
    ahead = [theirs for theirs, own in pairs if theirs.entered > own.entered]
    who = _waits([victim.mark.rank for victim in victims])
    where = f" in {_operation(ahead[0])}, which it has not begun" if ahead else " in a collective"
    return f"{doing} for {culprit.still_s:.1f} s in {mark.phase}; {who} for it{where}"


def _waits(ranks: Sequence[int]) -> str:
    return f"rank {_shown(ranks)} waits" if len(ranks) == 1 else f"ranks {_shown(ranks)} wait"


def _shown(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, sorted(ranks)[:8]))}{' ...' if len(ranks) > 8 else ''}"
