"""Wraps the Prometheus library; no other file imports it. State machines count plain numbers, which are exported
here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.core.log_files import UNWRITTEN

__all__ = [
    "CONTENT_TYPE", "Counter", "Gauge", "Histogram", "Metric", "MetricsRegistry", "Read", "catch_up", "counter",
    "gauge", "histogram", "merged", "page",
]  # fmt: skip

MetricsRegistry = CollectorRegistry
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_PROCESS = CollectorRegistry()  # shown on every page of this process
_unwritten = Counter(
    "holdfast_unwritten",
    "Writes of this process's own log, record or journal that failed (a full disk)",
    ["what"],
    registry=_PROCESS,
)
for _what in ("log", "record", "journal"):  # exported from the start, for alerts
    _unwritten.labels(_what)


def page(registry: CollectorRegistry) -> bytes:
    """Return the text of a scrape."""
    for kind, total in UNWRITTEN.totals.items():
        catch_up(_unwritten.labels(kind), total)
    return generate_latest(registry) + generate_latest(_PROCESS)


def catch_up(counter: Counter, total: float) -> None:
    """Bring a counter up to a total that is counted elsewhere."""
    behind = total - counter._value.get()
    if behind > 0:
        counter.inc(behind)


class Read:
    """A collector that calls `read` at each scrape, so that series of removed objects disappear."""

    def __init__(self, read: Callable[[], Iterable[Metric]], registry: CollectorRegistry) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._read()


Labels = tuple[str, ...]
Values = TypeVar("Values", bound=Labels)


def gauge(name: str, text: str, labels: Labels, samples: Mapping[Values, float]) -> Metric:
    """Return a gauge with a value for each tuple of label values."""
    return _family(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, labels: Labels, samples: Mapping[Values, float]) -> Metric:
    """Return a counter with a total for each tuple of label values; `_total` is appended to the name."""
    return _family(CounterMetricFamily(name, text, labels=labels), samples)


def _family(family: GaugeMetricFamily | CounterMetricFamily, samples: Mapping[Values, float]) -> Metric:
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def histogram(
    name: str, text: str, labels: Labels, bounds: Sequence[float], samples: Mapping[Values, tuple[Sequence[int], float]]
) -> Metric:
    """Return a histogram. Each sample has a count per bucket (one more than there are bounds), and the sum."""
    family = HistogramMetricFamily(name, text, labels=labels)
    names = [*map(str, bounds), "+Inf"]
    for values, (counts, total) in samples.items():
        below = map(float, itertools.accumulate(counts))
        family.add_metric(values, list(zip(names, below, strict=True)), total)
    return family


def merged(pages: Mapping[str, bytes], label: str) -> bytes:
    """Return several processes' pages as one: `label` tells each sample's process, and each family appears once."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # comments, samples
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
    """Return the sample line with the label pair added."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{pair},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{pair}}} {value}"
