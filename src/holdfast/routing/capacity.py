"""Compares what the present workers can carry with what the deployment promises (its SLO). Pure.

Theory. A worker's *pace* is measured for each range of batch sizes: the seconds for which a stream occupies a place per
token (its share of the prompt's work included). By Little's law tokens/s = streams / pace, and requests/s = tokens/s /
tokens of an answer. The number of streams is limited by the worker's places and by its KV blocks, whichever is fewer.
The latency targets allow a certain pace; a slower batch counts less, in proportion. Each rate is divided by its own
promise, and the smallest *ratio* decides; streams and rates cannot be compared directly (facts 15).

Traffic rarely reaches a worker's limit, so it only shows bounds: at least what was made, at most what all its streams
would make at a pace no better than that of a small batch. Between these bounds a worker counts with an *assumed* rate:
- the median of the *measured* workers of its kind (those with bounds that meet);
- if there is none, its share of the promise, which the planned workers keep together.
So an idle deployment keeps its promise, a new worker counts like its peers, and a slow or small worker counts with what
it shows as soon as it shows it.

Always true:
- The smaller batches of a degradation level never reduce a worker's measured capacity.
- A worker without weight carries nothing.
- A waking standby carries what its group did, until the time by which it should be awake.
- Slowness alone never removes more than three quarters: the traffic that could disprove it must still be admitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.spec.health import SloSettings

# Weight of one window in the running mean: about the last ten matter.
WEIGHT = 0.1
# Weight of one request in the running mean.
PROFILE_WEIGHT = 0.01
# A batch size counts as known after so many windows: a single one may have been all prefill.
WINDOWS_MIN = 5
# A worker's bounds meet when the lower is at least this share of the upper. It is above the share of a batch that a
# level leaves (0.75 to 0.9 with premium requests): otherwise the level's small batches would look like the worker's
# limit, and the level would stay.
MEASURED_SHARE = 0.95
# Older measurements no longer show how slow a worker is. Under load each batch size is measured again much sooner. A
# batch size that a level prevents is tried again after this time; if it is still slow, the next return takes longer.
FRESH_S = 60.0
# A worker counts for at least this share of its assumed rate: if all are slow, the level is 3, not 4.
SLOW_SHARE_MIN = 0.25


@dataclass(slots=True)
class Profile:
    """Mean token counts over about the last hundred requests; the defaults hold until the first one ended."""

    prompt_tokens: float = 512.0
    answer_tokens: float = 256.0
    requests: int = 0  # counted so far

    def add_ended(self, requests: int, prompt_tokens: int, answer_tokens: int) -> None:
        """Count requests that ended well, with the sums of their tokens."""
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
        """Return the rates clamped to these bounds, unit by unit."""
        return Rates(
            min(max(self.requests_per_s, least.requests_per_s), most.requests_per_s),
            min(max(self.tokens_per_s, least.tokens_per_s), most.tokens_per_s),
        )


def allowed_pace_s(slo: SloSettings, answer_tokens: float) -> float:
    """Return the slowest pace, in seconds per token, that the latency targets allow."""
    return (slo.tpot_ms + slo.ttft_ms / max(1.0, answer_tokens)) / 1000.0


def promised_rates(slo: SloSettings, answer_tokens: float) -> Rates | None:
    if slo.requests_per_s:
        return Rates(slo.requests_per_s, slo.tokens_per_s or slo.requests_per_s * answer_tokens)
    if slo.tokens_per_s:
        return Rates(slo.tokens_per_s / answer_tokens, slo.tokens_per_s)
    return None


@dataclass(slots=True)
class _Seen:
    """The measurements of one range of batch sizes: 1, 2-3, 4-7, …"""

    streams: float  # means; their quotient is the pace, so that a window of all prefill counts by its few tokens
    tokens_per_s: float
    at_s: float
    windows: int = 0

    @property
    def pace_s(self) -> float:
        return self.streams / self.tokens_per_s

    def show(self, pace_s: float) -> None:
        """Set a pace that follows from measurements of other batch sizes."""
        self.tokens_per_s = self.streams / pace_s


@dataclass(frozen=True, slots=True)
class PaceBounds:
    """The lower and upper bound of the tokens per second that a worker makes within the latency targets."""

    least: float
    most: float

    @property
    def measured(self) -> bool:
        return self.least >= MEASURED_SHARE * self.most


class Meter:
    """The measured pace of one worker, from its traffic. A standby continues with the meter of its group."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def add_window(self, streams: float, tokens: int, window_s: float, now_s: float) -> None:
        """Count a window that ended now: the mean of running streams (without queued ones) and the tokens made.

        A window without tokens or with less than one stream says nothing about the pace; hangs are detected elsewhere.
        """
        if streams < 1.0 or tokens < 1 or window_s <= 0.0:
            return
        size = int(streams).bit_length()
        tokens_per_s = tokens / window_s
        seen = self._seen.setdefault(size, _Seen(streams, tokens_per_s, now_s))
        seen.at_s, seen.windows = now_s, seen.windows + 1
        weight = max(WEIGHT, 1.0 / seen.windows)  # so the first window, often all prefill, counts no more than others
        seen.streams += weight * (streams - seen.streams)
        seen.tokens_per_s += weight * (tokens_per_s - seen.tokens_per_s)
        # A larger batch is never faster than a smaller one; if the numbers say so, the older one is out of date.
        if seen.windows >= WINDOWS_MIN:
            for other, old in self._seen.items():
                if other != size and (other > size) == (old.pace_s < seen.pace_s):
                    old.show(seen.pace_s)

    def bounds(self, streams_max: float, pace_max_s: float, now_s: float) -> PaceBounds:
        """Return the bounds of tokens per second with at most `streams_max` streams, each allowed this pace."""
        known = [seen for seen in self._seen.values() if seen.windows >= WINDOWS_MIN]
        fresh = [seen for seen in known if now_s - seen.at_s <= FRESH_S]
        least = max((_worth(seen, min(seen.streams, streams_max), pace_max_s) for seen in known), default=0.0)
        most = min((_worth_max(seen, streams_max, pace_max_s) for seen in fresh), default=math.inf)
        return PaceBounds(min(least, most), most)


def _worth(seen: _Seen, streams: float, pace_max_s: float) -> float:
    """Return the tokens per second of `streams` at the measured pace, reduced if it is slower than allowed."""
    return streams / seen.pace_s * min(1.0, pace_max_s / seen.pace_s)


def _worth_max(seen: _Seen, streams_max: float, pace_max_s: float) -> float:
    """Return an upper bound of `_worth`: more streams than measured have no better pace, fewer make no more tokens."""
    return max(_worth(seen, streams_max, pace_max_s), min(seen.streams, streams_max) / seen.pace_s)


@dataclass(frozen=True, slots=True)
class Carrier:
    """A worker or a waking standby that can carry traffic."""

    name: str
    weight: float  # by its health verdict; a waking standby has 1
    places: int  # streams that it runs at once, undegraded
    meter: Meter = field(default_factory=Meter)
    kv_blocks: int | None = None  # None: it does not say
    kv_block_tokens: int = 16
    kind: str = ""  # model card and device kind; workers of equal kind are compared
    waking_until_s: float | None = None  # None: it is awake

    def carries(self, now_s: float) -> bool:
        return self.weight > 0.0 and (self.waking_until_s is None or now_s < self.waking_until_s)

    def streams_max(self, profile: Profile) -> float:
        """Return how many streams of the profile's requests it can run at once."""
        if self.kv_blocks is None:
            return float(self.places)
        held = self.kv_blocks * self.kv_block_tokens / (profile.prompt_tokens + profile.answer_tokens)
        return min(float(self.places), held)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The rates that the deployment can carry now."""

    rates: Rates
    promised: Rates | None
    carriers: int  # carriers with any capacity, waking ones included
    waking: int
    unmeasured: int  # carriers that count with an assumed rate
    by_carrier: Mapping[str, Rates] = field(default_factory=dict)
    in_tokens: bool = False  # only tokens were promised; the requests follow from them

    @property
    def ratios(self) -> dict[str, float]:
        """Return the ratio of each rate to its promise, rounded so that ten tenths are one."""
        if self.promised is None:
            return {"workers": 1.0 if self.carriers else 0.0}
        return {
            "requests/s": round(self.rates.requests_per_s / self.promised.requests_per_s, 3),
            "tokens/s": round(self.rates.tokens_per_s / self.promised.tokens_per_s, 3),
        }

    def without(self, name: str) -> float:
        """Return the ratio without this carrier."""
        own = self.by_carrier.get(name)
        if own is None:
            return self.ratio
        return replace(self, rates=self.rates + own.times(-1.0), carriers=self.carriers - 1).ratio

    @property
    def ratio(self) -> float:
        """Return the smallest ratio, which decides."""
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


def measure_capacity(
    slo: SloSettings, profile: Profile, carriers: Sequence[Carrier], planned: int, now_s: float
) -> Capacity:
    """Return what these workers carry. `planned`: the number of workers planned to keep the promise."""
    assert planned >= 1, planned
    answer_tokens = profile.answer_tokens
    promised = promised_rates(slo, answer_tokens)
    share = promised.times(1.0 / planned) if promised is not None else Rates()
    pace_s = allowed_pace_s(slo, answer_tokens)
    there = [carrier for carrier in carriers if carrier.carries(now_s)]
    shown = [carrier.meter.bounds(carrier.streams_max(profile), pace_s, now_s) for carrier in there]
    by_kind: dict[str, list[float]] = {}
    for carrier, one in zip(there, shown, strict=True):
        if one.measured:
            # The upper bound, because places that are briefly free between two streams count too.
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
