"""Decides how long a stream of a dead engine waits for the standby of its group before another worker takes it. Pure.

The standby finds the stream's KV in the vault and recomputes less than a block; another worker recomputes the whole
text. So the stream waits for the standby, but not longer than takeovers take here, and not longer than the estimated
prefill elsewhere. A stream that waits without success and then goes elsewhere has at most doubled its pause. If the
estimated prefill is quicker than a takeover, the stream does not wait.

`LeaderEpochs` says which engine of a group leads: the one with the largest epoch ever reported, because the vault
grants the pool to one epoch only. All others lead no longer, even if they have not noticed: a stopped engine that wakes
up reports its old state. The epoch is remembered when the link that reported it is gone. It belongs to the worker that
first reported it. An engine without a group leads itself.

Always true: no wait is longer than `WAIT_S_MAX`; every takeover is measured, even if no stream waited for it, so that a
bound that is too small is corrected; all memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

# Groups that one frontend sees in its life, over all deployments and generations; one takes a few hundred bytes. The
# group that has been silent for longest is forgotten first: its engines are long gone.
GROUPS_MAX = 4096


@dataclass(frozen=True, slots=True)
class LeaderClaim:
    """A worker says that it leads its group under an epoch."""

    namespace: str
    group: str
    epoch: int
    worker: int

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.group


class LeaderEpochs:
    """Remembers the newest epoch of each group, and which worker has it."""

    def __init__(self, groups_max: int = GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._newest: OrderedDict[tuple[str, str], LeaderClaim] = OrderedDict()

    def note(self, claim: LeaderClaim) -> bool:
        """Note a claim; return True if the worker leads."""
        key = claim.key
        newest = self._newest.get(key)
        if claim.group and (newest is None or claim.epoch > newest.epoch):
            self._newest[key] = claim
        if key in self._newest:
            self._newest.move_to_end(key)
        if len(self._newest) > self._groups_max:
            self._newest.popitem(last=False)
        return not self.objection(claim)

    def objection(self, claim: LeaderClaim) -> str:
        """Return why a claim does not count, as text; "" if it does."""
        newest = self._newest.get(claim.key)
        if newest is None or claim == newest:
            return ""
        if claim.epoch > newest.epoch:
            return ""  # newer, and not noted yet
        if claim.epoch == newest.epoch:
            return f"epoch {claim.epoch} belongs to worker {newest.worker:x}"
        return f"superseded by epoch {newest.epoch}"

    def __len__(self) -> int:
        return len(self._newest)


# Clients see a longer pause as a stall. Also the bound before the first takeover was measured.
WAIT_S_MAX = 5.0
# A takeover takes tens of milliseconds (docs/failover.md); on a busy machine the next one may take many times the last.
WAIT_S_MIN = 1.0
# The bound is this multiple of the slowest of the last takeovers.
WAIT_FACTOR = 4.0
# Assumed duration before the first takeover was measured: about what it takes on a CPU.
EXPECTED_S = 0.05
# Takeovers remembered: about as many as a group has in its life.
RECENT = 16
# A group that had no leader for longer was restarted: that is no takeover.
TAKEOVER_S_MAX = 60.0
# Groups that are without a leader at the same time; the oldest outage is forgotten first.
OUTAGES_MAX = 1024
# How much one prefill counts against those before it: about the last ten matter.
WEIGHT = 0.1


def standby_wait_s(expected_s: float, bound_s: float, prefill_s: float | None) -> float:
    """Return how long to wait for a standby that is expected to lead after `expected_s`. `prefill_s`: the estimated
    prefill elsewhere (None: never measured)."""
    if prefill_s is None:
        return bound_s
    return min(bound_s, prefill_s) if prefill_s > expected_s else 0.0


class Prefills:
    """Measured times to the first token, by text length: 1, 2-3, 4-7, … tokens."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # mean tokens and seconds

    def add(self, tokens: int, took_s: float) -> None:
        """Add a measurement: a stream's first token came `took_s` after it was sent, and `tokens` were computed."""
        if tokens < 1:
            return
        size = tokens.bit_length()
        mean_tokens, mean_s = self._seen.get(size, (float(tokens), took_s))
        self._seen[size] = (
            mean_tokens + WEIGHT * (tokens - mean_tokens),
            mean_s + WEIGHT * (took_s - mean_s),
        )

    def estimate_s(self, tokens: float) -> float | None:
        """Return the estimated time for a text, in proportion to the nearest measured length; None: none measured."""
        if not self._seen:
            return None
        size = int(tokens).bit_length()
        mean_tokens, mean_s = self._seen[min(self._seen, key=lambda known: (abs(known - size), -known))]
        return mean_s * tokens / mean_tokens


@dataclass(frozen=True, slots=True)
class Outage:
    """A group's leader is gone."""

    claim: LeaderClaim
    since_s: float
    tokens: int  # of the texts of all streams that ran on the leader


class Takeovers:
    """Measures how long groups are without a leader."""

    def __init__(self) -> None:
        self._outages: OrderedDict[tuple[str, str], Outage] = OrderedDict()
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def leader_lost(self, claim: LeaderClaim, now_s: float, tokens: Callable[[], int]) -> Outage:
        """Return the outage of a leader that is gone, and begin it if it is new. `tokens` counts the tokens of all its
        streams; it is called once per outage."""
        known = self._outages.get(claim.key)
        if known is not None and known.claim == claim:
            return known
        outage = self._outages[claim.key] = Outage(claim, now_s, tokens())
        self._outages.move_to_end(claim.key)
        if len(self._outages) > OUTAGES_MAX:
            self._outages.popitem(last=False)
        return outage

    def leader_found(self, group: tuple[str, str], now_s: float) -> None:
        """End the outage of a group: an engine of it takes work."""
        outage = self._outages.pop(group, None)
        if outage is not None and now_s - outage.since_s <= TAKEOVER_S_MAX:
            self._took_s.append(now_s - outage.since_s)

    @property
    def expected_s(self) -> float:
        """Return the median of the last takeovers."""
        return sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else EXPECTED_S

    @property
    def bound_s(self) -> float:
        """Return how long a takeover may take."""
        if not self._took_s:
            return WAIT_S_MAX
        return min(WAIT_S_MAX, max(WAIT_S_MIN, WAIT_FACTOR * max(self._took_s)))
