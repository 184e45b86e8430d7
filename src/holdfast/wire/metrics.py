"""Prometheus metrics: the one file that knows the library. Logic counts plain numbers; shells show them here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.core.unwritten import UNWRITTEN

__all__ = ["CONTENT_TYPE", "Counted", "Counter", "Gauge", "Histogram", "MetricsRegistry", "catch_up", "merged", "page"]

MetricsRegistry = CollectorRegistry
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_PROCESS = CollectorRegistry()  # what every page of this process shows besides its own
_unwritten = Counter(
    "holdfast_unwritten",
    "Writes of this process's own log, record or journal that failed (a full disk)",
    ["what"],
    registry=_PROCESS,
)


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


class Counted:
    """A histogram by one label whose buckets are counted elsewhere: `read` gives label, count per bucket, and sum."""

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        bounds: Sequence[float],
        read: Callable[[], Iterable[tuple[str, Sequence[int], float]]],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self._bounds = [*map(str, bounds), "+Inf"]
        self._read = read
        registry.register(self)

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text, labels=(self._label,))]

    def collect(self) -> list[HistogramMetricFamily]:
        """Asked by a scrape."""
        (family,) = self.describe()
        for label, counts, total in self._read():
            below = list(itertools.accumulate(counts))
            family.add_metric((label,), list(zip(self._bounds, map(float, below), strict=True)), total)
        return [family]


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
