"""Prometheus metrics: the one file that knows the library. Logic counts plain numbers; shells show them here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.core.unwritten import UNWRITTEN

__all__ = [
    "CONTENT_TYPE", "Counter", "Gauge", "Histogram", "Metric", "MetricsRegistry", "Read", "catch_up", "counter",
    "gauge", "histogram", "merged", "page",
]  # fmt: skip

MetricsRegistry = CollectorRegistry
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_PROCESS = CollectorRegistry()  # what every page of this process shows besides its own
_unwritten = Counter(
    "holdfast_unwritten",
    "Writes of this process's own log, record or journal that failed (a full disk)",
    ["what"],
    registry=_PROCESS,
)
for _what in ("log", "record", "journal"):  # shown from the start, for alerts
    _unwritten.labels(_what)


def page(registry: CollectorRegistry) -> bytes:
    """The text that a scrape gets."""
    for kind, total in UNWRITTEN.totals.items():
        catch_up(_unwritten.labels(kind), total)
    return generate_latest(registry) + generate_latest(_PROCESS)


def catch_up(counter: Counter, total: float) -> None:
    """Bring a counter up to a total that is counted elsewhere."""
    behind = total - counter._value.get()
    if behind > 0:
        counter.inc(behind)


class Read:
    """Families that are made when somebody scrapes, from what is counted or kept elsewhere: whoever is not there any
    more has no line."""

    def __init__(self, read: Callable[[], Iterable[Metric]], registry: CollectorRegistry) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Asked by a scrape."""
        return self._read()


Labels = tuple[str, ...]
Values = TypeVar("Values", bound=Labels)


def gauge(name: str, text: str, labels: Labels, samples: Mapping[Values, float]) -> Metric:
    """Values by label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Labels, samples: Mapping[Values, float]) -> Metric:
    """Totals by label values; `_total` is put behind the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def histogram(
    name: str, text: str, labels: Labels, bounds: Sequence[float], samples: Mapping[Values, tuple[Sequence[int], float]]
) -> Metric:
    """Of each, the count per bucket (one more than there are bounds), and the sum."""
    family = HistogramMetricFamily(name, text, labels=labels)
    names = [*map(str, bounds), "+Inf"]
    for values, (counts, total) in samples.items():
        below = map(float, itertools.accumulate(counts))
        family.add_metric(values, list(zip(names, below, strict=True)), total)
    return family


def merged(pages: Mapping[str, bytes], label: str) -> bytes:
    """Several processes' pages as one: every sample says whose it is by `label`, every family stands there once."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # its comments, its samples
    for name, page in pages.items():
        pair = '{}="{}"'.format(label, name.replace("\\", r"\\").replace('"', r"\""))
        family: tuple[list[str], list[str]] = ([], [])
        for line in page.decode().splitlines():
            if line.startswith("# "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                family[1].append(_labelled(line, pair))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, pair: str) -> str:
    """A name ends at its labels or, where it has none, at its value."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{pair},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{pair}}} {value}"
