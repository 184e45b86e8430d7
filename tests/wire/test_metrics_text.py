"""Several processes' metrics on one page: whose each sample is, and nothing twice but samples."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.wire import metrics
from holdfast.wire.metrics import merged


def page(count: int) -> bytes:
    registry = metrics.MetricsRegistry()
    metrics.Counter("asked", 'questions, "quoted" {braced}', ("model",), registry=registry).labels('a "b" {c}').inc(
        count
    )
    metrics.Gauge("open", "now", registry=registry).set(count)
    metrics.Histogram("took", "seconds", buckets=(1.0, 2.0), registry=registry).observe(count)
    return metrics.page(registry)


def test_every_sample_says_whose_it_is() -> None:
    """A scraper reads the sum of both pages, each family once, with values and labels untouched."""
    read = merged({"frontend": page(1), 'odd "name"': page(5)}, "frontend").decode()
    families = list(text_string_to_metric_families(read))
    assert len({family.name for family in families}) == len(families)
    found = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            found[sample.name, labels.pop("frontend"), *labels.values()] = sample.value
    for name, count in (("frontend", 1), ('odd "name"', 5)):
        assert found["asked_total", name, 'a "b" {c}'] == count
        assert found["open", name] == count
        assert found["took_sum", name] == count
        assert found["took_bucket", name, "+Inf"] == 1


def test_one_page_keeps_all_its_samples() -> None:
    """And nothing but the label is new."""
    own = page(3)
    alone = merged({"x": own}, "frontend").decode()
    assert alone.replace('frontend="x",', "").replace('{frontend="x"}', "") == own.decode()
