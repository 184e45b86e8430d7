"""What workers carry, from what they have shown; each rate against its own promise. And stories of it, read as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.routing.capacity import (
    FRESH_S,
    WINDOWS_MIN,
    Capacity,
    Carrier,
    Meter,
    Profile,
    Rates,
    measure_capacity,
)
from holdfast.spec.health import SloSettings as Slo
from tests.rigs.transcripts import must_go_as_written, stories

SLO = Slo(ttft_ms=500.0, tpot_ms=50.0, requests_per_s=4.0)
ANSWERS = Profile(prompt_tokens=100.0, answer_tokens=100.0)


def metered(streams: float, pace_ms: float, at_s: float = 0.0, windows: int = 50) -> Meter:
    """One that saw so many streams at that pace, up to then."""
    meter = Meter()
    for window in range(windows):
        meter.add_window(streams, round(streams * 100_000 / pace_ms), 100.0, at_s - windows + 1 + window)
    return meter


def ratio(*carriers: Carrier, slo: Slo = SLO, planned: int = 4, now_s: float = 0.0) -> float:
    return measure_capacity(slo, ANSWERS, carriers, planned, now_s).ratio


# -- units


def test_no_mixed_units_a_few_fast_streams_are_not_a_low_rate() -> None:
    """Three places that turn over ten requests a second each keep a promise of twenty: as a number three is less than
    twenty, and the sketch's least of concurrency and rate would have called it 15 %."""
    carrier = Carrier("w", 1.0, places=3, meter=metered(3.0, pace_ms=1.0))
    capacity = measure_capacity(Slo(requests_per_s=20.0), ANSWERS, [carrier], 1, 0.0)
    assert capacity.rates.requests_per_s == pytest.approx(30.0, rel=0.01)
    assert capacity.ratio == pytest.approx(1.5, rel=0.01)


def test_no_mixed_units_each_rate_is_compared_with_its_own_promise() -> None:
    """The smallest of the ratios decides, whichever number is the smaller."""
    capacity = Capacity(Rates(5.0, 400.0), Rates(4.0, 1000.0), carriers=1, waking=0, unmeasured=0)
    assert capacity.ratios == {"requests/s": 1.25, "tokens/s": 0.4}
    assert capacity.ratio == 0.4
    assert str(capacity) == "400 of 1000 tokens/s (1 worker, 0 waking, 0 not measured)"


def test_capacity_is_told_in_what_was_promised() -> None:
    """Of a promise in tokens nobody is told requests, which only follow from it."""
    carrier = Carrier("w", 1.0, places=3)
    assert "400 of 400 tokens/s" in str(measure_capacity(Slo(tokens_per_s=400.0), ANSWERS, [carrier], 1, 0.0))
    assert "4 of 4 requests/s" in str(measure_capacity(SLO, ANSWERS, [carrier], 1, 0.0))


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.floats(0.1, 1000.0))
def test_no_mixed_units_a_ratio_does_not_know_its_unit(requests: float, tokens: float, factor: float) -> None:
    """Counting requests by the minute, in what is there and in what is promised, changes nothing."""
    one = Capacity(Rates(requests, tokens), Rates(3.0, 5.0), carriers=1, waking=0, unmeasured=0)
    other = Capacity(Rates(requests * factor, tokens), Rates(3.0 * factor, 5.0), carriers=1, waking=0, unmeasured=0)
    assert other.ratio == pytest.approx(one.ratio, abs=0.0011)


# -- workers that were not measured


@pytest.mark.parametrize("planned", [1, 3, 7, 10, 16, 48])
def test_an_idle_deployment_is_whole(planned: int) -> None:
    """As many workers as were planned and no traffic: exactly 1, however fractions add up; one less is less."""
    carriers = [Carrier(f"w{number}", 1.0, places=8) for number in range(planned)]
    assert ratio(*carriers, planned=planned) == 1.0
    assert ratio(*carriers[1:], planned=planned) == pytest.approx(1.0 - 1.0 / planned, abs=0.001)


def test_a_new_worker_is_taken_to_be_like_its_peers() -> None:
    """The median of the measured ones of its kind, not those of another kind, and not its share of the promise."""
    carriers = [Carrier(f"w{number}", 1.0, 8, metered(8.0, pace_ms=40.0), kind="a") for number in range(3)]
    carriers.append(Carrier("other", 1.0, 8, metered(8.0, pace_ms=10.0), kind="b"))
    known = measure_capacity(SLO, ANSWERS, carriers, 4, 0.0)
    new = measure_capacity(SLO, ANSWERS, [*carriers, Carrier("new", 1.0, 8, kind="a")], 4, 0.0)
    assert known.rates.tokens_per_s == pytest.approx(3 * 200.0 + 800.0, rel=0.01)
    assert new.rates.tokens_per_s - known.rates.tokens_per_s == pytest.approx(200.0, rel=0.01)
    assert (known.unmeasured, new.unmeasured) == (0, 1)


def test_a_place_that_is_free_between_two_streams_is_carried_too() -> None:
    """Workers that are all but full, one of 25 places free on average while the next stream comes, are full ones."""
    carriers = [Carrier(f"w{number}", 1.0, 8, metered(8.0 * 0.96, pace_ms=40.0)) for number in range(4)]
    assert measure_capacity(SLO, ANSWERS, carriers, 4, 0.0).rates.tokens_per_s == pytest.approx(4 * 200.0, rel=0.01)


def test_what_is_left_without_one_is_what_the_others_carry() -> None:
    """For whoever wonders whether a worker could be spared; one that carries nothing takes nothing with it."""
    carriers = [Carrier("a", 1.0, 8, metered(8.0, pace_ms=40.0)), Carrier("b", 0.5, 8), Carrier("c", 0.0, 8)]
    capacity = measure_capacity(SLO, ANSWERS, carriers, 4, 0.0)
    assert capacity.without("a") == pytest.approx(0.25, rel=0.02)
    assert capacity.without("b") == pytest.approx(0.5, rel=0.02)
    assert capacity.without("c") == capacity.ratio
    assert measure_capacity(Slo(), ANSWERS, carriers[:1], 1, 0.0).without("a") == 0.0


def test_without_a_promise_any_worker_is_enough() -> None:
    """Nothing to compare with: whole with a worker, nothing without."""
    slo = Slo()
    assert ratio(Carrier("w", 0.5, 8), slo=slo) == 1.0
    assert ratio(slo=slo) == 0.0


# -- what was measured


def test_a_worker_at_its_limit_counts_as_what_it_makes() -> None:
    """8 streams at 40 ms are 200 tokens/s and 2 requests/s of 100 tokens, whatever was planned."""
    capacity = measure_capacity(SLO, ANSWERS, [Carrier("w", 1.0, 8, metered(8.0, pace_ms=40.0))], 4, 0.0)
    assert capacity.rates.tokens_per_s == pytest.approx(200.0, rel=0.01)
    assert capacity.rates.requests_per_s == pytest.approx(2.0, rel=0.01)
    assert capacity.ratio == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("kv_blocks", "streams"), [(None, 8.0), (1000, 8.0), (50, 4.0), (25, 2.0)])
def test_kv_blocks_bound_the_streams(kv_blocks: int | None, streams: float) -> None:
    """Prompt and answer take 200 tokens: 50 blocks of 16 hold four such, whatever the places."""
    carrier = Carrier("w", 1.0, 8, metered(8.0, pace_ms=40.0), kv_blocks=kv_blocks)
    assert carrier.streams_max(ANSWERS) == streams
    assert measure_capacity(SLO, ANSWERS, [carrier], 4, 0.0).rates.tokens_per_s == pytest.approx(
        streams / 0.04, rel=0.01
    )


@pytest.mark.parametrize("multiplier", [0.75, 0.5])
def test_a_smaller_batch_does_not_look_like_less_capacity(multiplier: float) -> None:
    """Degradation takes places away; if that read as capacity lost, it would degrade further, and never return."""
    meter = metered(8.0, pace_ms=40.0)
    carriers = [Carrier(f"w{number}", 1.0, 8, meter) for number in range(2)]
    before = ratio(*carriers)
    for window in range(1, 1000):
        meter.add_window(8.0 * multiplier, round(8.0 * multiplier / 0.030), 1.0, float(window))
        assert ratio(*carriers, now_s=float(window)) >= before


@pytest.mark.parametrize("streams", [6.0, 6.8, 7.5])
def test_a_batch_that_its_level_keeps_small_is_no_measured_limit(streams: float) -> None:
    """Whoever begins to measure at level 1 never sees a full batch: three quarters of the places, and premium in some
    of the rest. What they could carry is not known from that, so they count as promised, and the level can return."""
    slo = Slo(ttft_ms=500.0, tpot_ms=50.0, requests_per_s=8.0)  # what four workers of 8 streams at 40 ms make
    carriers = [Carrier(f"w{number}", 1.0, 8, metered(streams, pace_ms=40.0)) for number in range(4)]
    assert ratio(*carriers, slo=slo) == 1.0


def test_more_streams_are_never_faster_so_the_older_sight_gives_way() -> None:
    """A worker that has become slow shows it with the few streams it still gets; and shows with many that it mended."""
    meter = metered(8.0, pace_ms=40.0)
    carrier = Carrier("w", 1.0, 8, meter)
    whole = measure_capacity(SLO, ANSWERS, [carrier], 4, 0.0).rates.tokens_per_s
    for window in range(1, 60):
        meter.add_window(2.0, 10, 1.0, float(window))  # 200 ms a token
    slow = measure_capacity(SLO, ANSWERS, [carrier], 4, 60.0).rates.tokens_per_s
    for window in range(61, 160):
        meter.add_window(8.0, 200, 1.0, float(window))
    assert slow < whole / 2
    assert measure_capacity(SLO, ANSWERS, [carrier], 4, 160.0).rates.tokens_per_s == pytest.approx(whole, rel=0.05)


def test_bad_news_is_forgotten_and_good_news_is_not() -> None:
    """A worker that was too slow counts as planned when nothing was seen of it for a while; a fast one stays fast."""
    slow = [Carrier("w", 1.0, 8, metered(8.0, pace_ms=100.0)) for _ in range(4)]
    fast = [Carrier("w", 1.0, 8, metered(8.0, pace_ms=10.0)) for _ in range(4)]
    later_s = FRESH_S + 1.0
    assert ratio(*slow, slo=structs.replace(SLO, requests_per_s=8.0)) < 0.5
    assert ratio(*slow, slo=structs.replace(SLO, requests_per_s=8.0), now_s=later_s) == 1.0
    assert ratio(*fast, now_s=later_s) == ratio(*fast) > 5.0


def test_windows_that_say_nothing_are_not_counted() -> None:
    """No tokens, less than a stream, no time: whether a worker hangs is for others to judge."""
    meter = Meter()
    for _ in range(100):
        meter.add_window(8.0, 0, 1.0, 0.0)
        meter.add_window(0.5, 10, 1.0, 0.0)
        meter.add_window(8.0, 10, 0.0, 0.0)
    assert ratio(*[Carrier("w", 1.0, 8, meter)] * 4) == 1.0


@pytest.mark.parametrize("wrong", [{"ttft_ms": 0.0}, {"requests_per_s": -1.0}, {"tokens_per_s": float("nan")}])
def test_a_promise_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    """It would be divided by."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Slo(**wrong)


def test_a_window_of_prefill_is_no_slow_worker() -> None:
    """Eight prompts at once, and one token each in that second: of the tokens of the seconds around it, a little."""
    meter = metered(8.0, pace_ms=20.0)
    carriers = [Carrier(f"w{number}", 1.0, 8, meter) for number in range(4)]
    before = ratio(*carriers)
    meter.add_window(8.0, 8, 1.0, 1.0)
    assert ratio(*carriers, now_s=1.0) > 0.85 * before


def test_the_first_window_counts_as_any_other() -> None:
    """Streams that all begin at once make few tokens in their first second; five seconds later that is a fifth of what
    is known, not most of it, or a deployment that comes back would look slow."""
    meter = Meter()
    meter.add_window(8.0, 40, 1.0, 0.0)  # of the 200 that follow each second
    for window in range(1, WINDOWS_MIN):
        meter.add_window(8.0, 200, 1.0, float(window))
    assert meter.bounds(8.0, 1.0, 5.0).most == pytest.approx((40 + 4 * 200) / WINDOWS_MIN)


def test_a_batch_that_a_level_does_not_let_come_up_is_tried_again() -> None:
    """Full batches were slow once. Level 1 lets no new ones come up, and fewer streams are within the targets: a minute
    later that is what is known, so that the level can return, and fall again if they are slow still."""
    meter = metered(8.0, pace_ms=60.0)
    carriers = [Carrier(f"w{number}", 1.0, 8, meter) for number in range(2)]
    assert ratio(*carriers, planned=2) < 0.7
    for window in range(1, int(FRESH_S) + 2):
        meter.add_window(6.0, 150, 1.0, float(window))
    assert ratio(*carriers, planned=2, now_s=FRESH_S) < 0.7
    assert ratio(*carriers, planned=2, now_s=FRESH_S + 1.0) == 1.0


# -- any workers

windows = st.lists(
    st.tuples(st.floats(0.0, 16.0), st.integers(0, 2000), st.sampled_from([0.5, 1.0, 10.0])), max_size=40
)
workers = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 16), windows), max_size=4)


@settings(max_examples=150, deadline=None)
@given(workers, st.integers(1, 5), st.sampled_from([0.0, 10.0, 600.0]))
def test_what_is_counted_lies_where_it_must(
    drawn: list[tuple[float, int, list[tuple[float, int, float]]]], planned: int, tokens_per_s: float
) -> None:
    """For any traffic: finite, nothing from weight 0, half from weight 0.5, and more with a worker more."""
    slo = Slo(requests_per_s=4.0, tokens_per_s=tokens_per_s)
    carriers = []
    for number, (weight, places, traffic) in enumerate(drawn):
        meter, now_s = Meter(), 0.0
        for streams, tokens, window_s in traffic:
            now_s += window_s
            meter.add_window(min(streams, places), tokens, window_s, now_s)
        carriers.append(Carrier(f"w{number}", weight, places, meter, kind=f"k{number}"))
    capacity = measure_capacity(slo, ANSWERS, carriers, planned, 400.0)
    assert 0.0 <= capacity.ratio < 1e9
    assert capacity.carriers == sum(1 for carrier in carriers if carrier.weight)
    assert (capacity.ratio == 0.0) == (capacity.carriers == 0) or capacity.ratio < 0.001
    assert capacity == measure_capacity(slo, ANSWERS, [c for c in carriers if c.weight], planned, 400.0)
    whole = measure_capacity(slo, ANSWERS, [replace(c, weight=1.0) for c in carriers], planned, 400.0)
    half = measure_capacity(slo, ANSWERS, [replace(c, weight=0.5) for c in carriers], planned, 400.0)
    assert half.rates.tokens_per_s == pytest.approx(whole.rates.tokens_per_s / 2)
    more = measure_capacity(slo, ANSWERS, [*carriers, Carrier("more", 1.0, 4, kind="more")], planned, 400.0)
    assert more.ratio > capacity.ratio


@settings(max_examples=300, deadline=None)
@given(
    base_ms=st.floats(1.0, 100.0),
    each_ms=st.floats(0.0, 20.0),
    places=st.integers(1, 40),
    shares=st.lists(st.floats(0.0, 1.0), min_size=WINDOWS_MIN, max_size=60),
)
def test_the_truth_lies_between_the_bounds(base_ms: float, each_ms: float, places: int, shares: list[float]) -> None:
    """For an engine whose pace grows with its batch, under any load: it makes what is shown at least, and no more than
    is shown at most. The tenth is for batches of different sizes that are seen as one."""
    meter, pace_max_s = Meter(), 0.055

    def pace_s(streams: float) -> float:
        return (base_ms + each_ms * streams) / 1000.0

    truth = max(b / pace_s(b) * min(1.0, pace_max_s / pace_s(b)) for b in range(1, places + 1))
    for share in shares:
        streams = 1.0 + share * (places - 1)
        meter.add_window(streams, round(1e6 * streams / pace_s(streams)), 1e6, 0.0)
    shown = meter.bounds(places, pace_max_s, 0.0)
    assert shown.least <= 1.1 * truth
    assert shown.most >= 0.9 * truth
    if all(share == 1.0 for share in shares) and pace_s(places) <= pace_max_s:
        assert shown.measured


# -- stories, read as text


class Story:
    """Plays commands against workers, on time it makes up itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slo = Slo()
        self.planned = 1
        self.profile = Profile(100.0, 100.0)
        self.carriers: dict[str, Carrier] = {}

    def play(self, command: str) -> list[str]:
        word, *words = command.split()
        flags = [w for w in words if "=" not in w]
        values = {k: float(v) for k, _, v in (w.partition("=") for w in words if "=" in w)}
        return getattr(self, f"do_{word}")(flags, values) or []

    def do_promise(self, flags: list[str], values: dict[str, float]) -> None:
        self.planned = int(values.pop("planned"))
        self.slo = Slo(**values)

    def do_worker(self, flags: list[str], values: dict[str, float]) -> None:
        for name in flags:
            self.carriers[name] = Carrier(name, 1.0, int(values["places"]), kv_blocks=int(values["kv_blocks"]))

    def do_run(self, flags: list[str], values: dict[str, float]) -> None:
        """So many seconds in which each of these ran so many streams at that pace."""
        for _ in range(int(values["seconds"])):
            self.now_s += 1.0
            for name in flags:
                tokens = round(values["streams"] * 1000 / values["pace_ms"])
                self.carriers[name].meter.add_window(values["streams"], tokens, 1.0, self.now_s)

    def do_weigh(self, flags: list[str], values: dict[str, float]) -> None:
        for name, weight in values.items():
            self.carriers[name] = replace(self.carriers[name], weight=weight)

    def do_dies(self, flags: list[str], values: dict[str, float]) -> None:
        """Its standby wakes, and must be awake by then."""
        until_s = self.now_s + values["wake_s"]
        self.carriers[flags[0]] = replace(self.carriers[flags[0]], waking_until_s=until_s)

    def do_wakes(self, flags: list[str], values: dict[str, float]) -> None:
        self.carriers[flags[0]] = replace(self.carriers[flags[0]], waking_until_s=None)

    def do_answers(self, flags: list[str], values: dict[str, float]) -> None:
        self.profile = Profile(values["prompt"], values["answer"])

    def do_wait(self, flags: list[str], values: dict[str, float]) -> None:
        self.now_s += float(flags[0])

    def do_show(self, flags: list[str], values: dict[str, float]) -> list[str]:
        capacity = measure_capacity(self.slo, self.profile, list(self.carriers.values()), self.planned, self.now_s)
        return [f"  {self.now_s:5.0f}  {capacity.ratio:.0%}: {capacity}"]


@stories("capacity", least=3)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those that are computed."""
    must_go_as_written(path, Story)
