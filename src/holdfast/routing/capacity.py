"""Capacity: what the workers that are there can carry, against what the deployment promises. Pure.

Theory. One thing is measured of a worker: its *pace*, how long a stream holds a place for each token it makes (its
share of the prompt's work included), by how many streams ran beside it. From that follow, by Little's law, tokens/s =
streams / pace and requests/s = tokens/s / tokens of an answer. How many streams may run is the least of its places and
of what its KV blocks hold: both are streams. The latency targets allow a pace; a batch that is slower counts less, in
proportion. Each rate is divided by its own promise and the smallest *ratio* decides: a least of streams and rates would
mean nothing (facts 15).

Traffic rarely shows a worker's limit. What it shows are bounds: at least what was made, at most what all its streams
would make at a pace no better than the best that few of them had. Between these a worker counts as what is *assumed*:
the median of the workers of its kind whose bounds meet, which are *measured*, or, where none is, one of the planned
workers, which together keep the promise. So an idle deployment is whole; a new worker is like its peers; and a slow or
too small one counts as what it shows, as soon as it shows it.

Always true: smaller batches, which degradation asks for, never make a worker look as if it carried less; a worker
without weight carries nothing; a waking standby carries what its group did, until it should have woken; slowness alone
never takes more than three quarters off, so that it cannot keep away the traffic that would disprove it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.spec.levels import SloSettings

# How much one window counts against those before it: about the last ten matter.
WEIGHT = 0.1
# How much one request counts against those before it.
PROFILE_WEIGHT = 0.01
# A batch size is known when it was seen in so many windows: one may have been all prefill.
WINDOWS_MIN = 5
# The bounds of a worker meet when the lower is this share of the upper. It is more than a level leaves of a batch, with
# premium in some of the rest (0.75 to 0.9): else a level's own small batches would be taken for a limit, and it stayed.
MEASURED_SHARE = 0.95
# What was seen longer ago says no more how slow a worker is. Under load each batch size is seen again much sooner; one
# that a level does not let come up is tried again then, and where it is slow still, the level's patience grows.
FRESH_S = 60.0
# What a worker that is there counts for at least, of what is assumed of it: all of them slow is level 3, not 4.
SLOW_SHARE_MIN = 0.25


@dataclass(slots=True)
class Profile:
    """What requests are like: means over about the last hundred. The defaults stand until there was one."""

    prompt_tokens: float = 512.0
    answer_tokens: float = 256.0
    requests: int = 0  # that were counted

    def ended(self, requests: int, prompt_tokens: int, answer_tokens: int) -> None:
        """So many requests came to their good end, with so many tokens together."""
        if requests < 1:
            return
        self.requests += requests
        weight = max(requests / self.requests, 1.0 - (1.0 - PROFILE_WEIGHT) ** requests)
        self.prompt_tokens += weight * (prompt_tokens / requests - self.prompt_tokens)
        self.answer_tokens += weight * (max(1.0, answer_tokens / requests) - self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Rates:
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0

    def __add__(self, other: Rates) -> Rates:
        return Rates(self.requests_per_s + other.requests_per_s, self.tokens_per_s + other.tokens_per_s)

    def times(self, factor: float) -> Rates:
        return Rates(self.requests_per_s * factor, self.tokens_per_s * factor)

    def within(self, least: Rates, most: Rates) -> Rates:
        """The nearest to it between the two, unit by unit."""
        return Rates(
            min(max(self.requests_per_s, least.requests_per_s), most.requests_per_s),
            min(max(self.tokens_per_s, least.tokens_per_s), most.tokens_per_s),
        )


def allowed_pace_s(slo: SloSettings, answer_tokens: float) -> float:
    """How long a stream may hold its place for each token."""
    return (slo.tpot_ms + slo.ttft_ms / max(1.0, answer_tokens)) / 1000.0


def promised_rates(slo: SloSettings, answer_tokens: float) -> Rates | None:
    """What is to be carried; None: no rate is promised."""
    if slo.requests_per_s:
        return Rates(slo.requests_per_s, slo.tokens_per_s or slo.requests_per_s * answer_tokens)
    if slo.tokens_per_s:
        return Rates(slo.tokens_per_s / answer_tokens, slo.tokens_per_s)
    return None


@dataclass(slots=True)
class _Seen:
    """What was seen of one range of batch sizes: 1, 2-3, 4-7, …"""

    streams: float  # means; their quotient is the pace, so that a window of all prefill counts by its few tokens
    tokens_per_s: float
    at_s: float
    windows: int = 0

    @property
    def pace_s(self) -> float:
        return self.streams / self.tokens_per_s

    def show(self, pace_s: float) -> None:
        """Other sizes say that its pace is another by now."""
        self.tokens_per_s = self.streams / pace_s


@dataclass(frozen=True, slots=True)
class Shown:
    """What a worker has shown: between these lie the tokens per second that it makes at the targets."""

    least: float
    most: float

    @property
    def measured(self) -> bool:
        return self.least >= MEASURED_SHARE * self.most


class Meter:
    """What one worker's traffic says of its pace. A standby goes on with the meter of its group."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def saw(self, streams: float, tokens: int, window_s: float, now_s: float) -> None:
        """In a window that ended now it ran so many streams on average (without those in its queue) and made so many
        tokens.

        A window without tokens or with less than a stream says nothing of its pace: whether it hangs, others judge.
        """
        if streams < 1.0 or tokens < 1 or window_s <= 0.0:
            return
        size = int(streams).bit_length()
        tokens_per_s = tokens / window_s
        seen = self._seen.setdefault(size, _Seen(streams, tokens_per_s, now_s))
        seen.at_s, seen.windows = now_s, seen.windows + 1
        weight = max(WEIGHT, 1.0 / seen.windows)  # the first of all, which is often all prefill, counts as any other
        seen.streams += weight * (streams - seen.streams)
        seen.tokens_per_s += weight * (tokens_per_s - seen.tokens_per_s)
        # More streams are never faster than fewer; where the numbers say so, the older one is out of date.
        if seen.windows >= WINDOWS_MIN:
            for other, old in self._seen.items():
                if other != size and (other > size) == (old.pace_s < seen.pace_s):
                    old.show(seen.pace_s)

    def shown(self, streams_max: float, pace_max_s: float, now_s: float) -> Shown:
        """The bounds of its tokens per second, with at most so many streams, each allowed this pace."""
        known = [seen for seen in self._seen.values() if seen.windows >= WINDOWS_MIN]
        fresh = [seen for seen in known if now_s - seen.at_s <= FRESH_S]
        least = max((_worth(seen, min(seen.streams, streams_max), pace_max_s) for seen in known), default=0.0)
        most = min((_worth_max(seen, streams_max, pace_max_s) for seen in fresh), default=math.inf)
        return Shown(min(least, most), most)


def _worth(seen: _Seen, streams: float, pace_max_s: float) -> float:
    """Tokens per second of so many streams at the pace that was seen, less for a pace beyond the targets."""
    return streams / seen.pace_s * min(1.0, pace_max_s / seen.pace_s)


def _worth_max(seen: _Seen, streams_max: float, pace_max_s: float) -> float:
    """More streams have no better pace than those that were seen; fewer, within the targets, make no more tokens."""
    return max(_worth(seen, streams_max, pace_max_s), min(seen.streams, streams_max) / seen.pace_s)


@dataclass(frozen=True, slots=True)
class Carrier:
    """A worker, or a standby that is waking, as capacity counts it."""

    name: str
    weight: float  # of its health; a waking standby has 1
    places: int  # streams that it runs side by side, undegraded
    meter: Meter = field(default_factory=Meter)
    kv_blocks: int | None = None  # None: it does not say
    kv_block_tokens: int = 16
    kind: str = ""  # model card and device kind: who is like whom
    waking_until_s: float | None = None  # None: it is awake

    def carries(self, now_s: float) -> bool:
        return self.weight > 0.0 and (self.waking_until_s is None or now_s < self.waking_until_s)

    def streams_max(self, profile: Profile) -> float:
        """How many streams it can run side by side, with requests as they are."""
        if self.kv_blocks is None:
            return float(self.places)
        held = self.kv_blocks * self.kv_block_tokens / (profile.prompt_tokens + profile.answer_tokens)
        return min(float(self.places), held)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the deployment can carry now."""

    rates: Rates
    promised: Rates | None
    carriers: int  # that carry anything, with those that are waking
    waking: int
    unmeasured: int  # that count as what is assumed of them
    by_carrier: Mapping[str, Rates] = field(default_factory=dict)
    in_tokens: bool = False  # tokens alone were promised: the requests follow from them

    @property
    def ratios(self) -> dict[str, float]:
        """Of each rate to its own promise, rounded: ten tenths are one."""
        if self.promised is None:
            return {"workers": 1.0 if self.carriers else 0.0}
        return {
            "requests/s": round(self.rates.requests_per_s / self.promised.requests_per_s, 3),
            "tokens/s": round(self.rates.tokens_per_s / self.promised.tokens_per_s, 3),
        }

    def without(self, name: str) -> float:
        """The ratio if this carrier had no traffic, and no other changed."""
        own = self.by_carrier.get(name)
        if own is None:
            return self.ratio
        return replace(self, rates=self.rates + own.times(-1.0), carriers=self.carriers - 1).ratio

    @property
    def ratio(self) -> float:
        """The smallest ratio, which decides."""
        return min(self.ratios.values())

    def __str__(self) -> str:
        workers = "1 worker" if self.carriers == 1 else f"{self.carriers} workers"
        counts = f"{workers}, {self.waking} waking, {self.unmeasured} not measured"
        if self.promised is None:
            return f"no rate is promised ({counts})"
        have, want = self.rates, self.promised
        least = "tokens/s" if self.in_tokens else min(self.ratios, key=self.ratios.__getitem__)
        figures = {
            "requests/s": f"{have.requests_per_s:.4g} of {want.requests_per_s:.4g} requests/s",
            "tokens/s": f"{have.tokens_per_s:.4g} of {want.tokens_per_s:.4g} tokens/s",
        }
        return f"{figures[least]} ({counts})"


def measure(slo: SloSettings, profile: Profile, carriers: Sequence[Carrier], planned: int, now_s: float) -> Capacity:
    """What these workers carry, of which the deployment planned so many to keep its promise."""
    assert planned >= 1, planned
    answer_tokens = profile.answer_tokens
    promised = promised_rates(slo, answer_tokens)
    share = promised.times(1.0 / planned) if promised is not None else Rates()
    pace_s = allowed_pace_s(slo, answer_tokens)
    there = [carrier for carrier in carriers if carrier.carries(now_s)]
    shown = [carrier.meter.shown(carrier.streams_max(profile), pace_s, now_s) for carrier in there]
    by_kind: dict[str, list[float]] = {}
    for carrier, one in zip(there, shown, strict=True):
        if one.measured:
            # What is left free for a moment between two streams is carried too.
            by_kind.setdefault(carrier.kind, []).append(one.most)
    total, unmeasured, by_carrier = Rates(), 0, {}
    for carrier, one in zip(there, shown, strict=True):
        peers = by_kind.get(carrier.kind)
        assumed = _rates(statistics.median(peers), answer_tokens) if peers else share
        counted = assumed.within(_rates(one.least, answer_tokens), _rates(one.most, answer_tokens))
        counted = counted.within(share.times(SLOW_SHARE_MIN), Rates(math.inf, math.inf))
        unmeasured += not one.measured and counted == assumed
        by_carrier[carrier.name] = counted.times(carrier.weight)
        total += by_carrier[carrier.name]
    return Capacity(
        total,
        promised,
        carriers=len(there),
        waking=sum(1 for carrier in there if carrier.waking_until_s is not None),
        unmeasured=unmeasured,
        by_carrier=by_carrier,
        in_tokens=not slo.requests_per_s,
    )


def _rates(tokens_per_s: float, answer_tokens: float) -> Rates:
    return Rates(tokens_per_s / answer_tokens, tokens_per_s)
