"""How long a stream whose engine is gone waits for the standby of its group before another worker takes it. Pure.

The standby finds the stream's KV in the vault and computes less than a block again; another worker computes the whole
text again. So the stream waits for the standby, but not longer than takeovers take here, and not longer than the
prefill elsewhere is estimated to take: a stream that waits for that long in vain and then goes elsewhere has lost no
more than as much again. Where the prefill is estimated to be quicker than a takeover, the stream does not wait.

Always true: no wait is longer than `WAIT_S_MAX`; a takeover is measured also where no stream waited for it, so that a
bound that is too small is corrected; what is remembered is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.streams.groups import Claim

# A client takes a longer pause for a stall. Also the bound before the first takeover was measured.
WAIT_S_MAX = 5.0
# A takeover takes tens of milliseconds (docs/failover.md); on a busy machine the next one may take many times the last.
WAIT_S_MIN = 1.0
# Of the slowest of the last takeovers.
WAIT_FACTOR = 4.0
# A takeover's time before the first was measured: about what it takes on a CPU.
EXPECTED_S = 0.05
# Takeovers remembered: about as many as a group has in its life.
RECENT = 16
# A group without a leader for longer was started again: that is no takeover.
TAKEOVER_S_MAX = 60.0
# Groups without a leader at once; the one that lost its leader first is forgotten first.
OUTAGES_MAX = 1024
# How much one prefill counts against those before it: about the last ten matter.
WEIGHT = 0.1


def standby_wait_s(expected_s: float, bound_s: float, prefill_s: float | None) -> float:
    """Return how long to wait for a standby, which is expected to lead after `expected_s`, if the prefill elsewhere is
    estimated to take `prefill_s` (None: it was never measured)."""
    if prefill_s is None:
        return bound_s
    return min(bound_s, prefill_s) if prefill_s > expected_s else 0.0


class Prefills:
    """How long texts take to their first token, by length: 1, 2-3, 4-7, … tokens."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # mean tokens and seconds

    def saw(self, tokens: int, took_s: float) -> None:
        """So many tokens were computed before a stream's first token came, so long after it was sent."""
        if tokens < 1:
            return
        size = tokens.bit_length()
        mean_tokens, mean_s = self._seen.get(size, (float(tokens), took_s))
        self._seen[size] = (
            mean_tokens + WEIGHT * (tokens - mean_tokens),
            mean_s + WEIGHT * (took_s - mean_s),
        )

    def estimate_s(self, tokens: float) -> float | None:
        """Return how long a text takes, in proportion to the texts of the nearest length; None: none was seen."""
        if not self._seen:
            return None
        size = int(tokens).bit_length()
        mean_tokens, mean_s = self._seen[min(self._seen, key=lambda known: (abs(known - size), -known))]
        return mean_s * tokens / mean_tokens


@dataclass(frozen=True, slots=True)
class Outage:
    """A group's leader is gone."""

    claim: Claim
    since_s: float
    tokens: int  # of the texts of all streams that left it together


class Takeovers:
    """How long groups are without a leader, as this frontend sees it."""

    def __init__(self) -> None:
        self._outages: OrderedDict[tuple[str, str], Outage] = OrderedDict()
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def lost(self, claim: Claim, now_s: float, tokens: Callable[[], int]) -> Outage:
        """A stream left this leader, which is gone; `tokens` counts those of all its streams, for the first of them."""
        known = self._outages.get(claim.key)
        if known is not None and known.claim == claim:
            return known
        outage = self._outages[claim.key] = Outage(claim, now_s, tokens())
        self._outages.move_to_end(claim.key)
        if len(self._outages) > OUTAGES_MAX:
            self._outages.popitem(last=False)
        return outage

    def led(self, group: tuple[str, str], now_s: float) -> None:
        """An engine of this group takes work."""
        outage = self._outages.pop(group, None)
        if outage is not None and now_s - outage.since_s <= TAKEOVER_S_MAX:
            self._took_s.append(now_s - outage.since_s)

    @property
    def expected_s(self) -> float:
        """The median of the last ones."""
        return sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else EXPECTED_S

    @property
    def bound_s(self) -> float:
        """How long a takeover may take."""
        if not self._took_s:
            return WAIT_S_MAX
        return min(WAIT_S_MAX, max(WAIT_S_MIN, WAIT_FACTOR * max(self._took_s)))
