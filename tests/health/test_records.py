"""Records of the store that nobody can have written are not read, instead of being gone on from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control.store_view import decoded
from holdfast.health import canary
from holdfast.health.breaker import OPEN_S_MAX
from holdfast.health.device_faults import Severity
from holdfast.health.expectations import ExpectationsRecord, Key, QuestionEntry
from holdfast.health.records import DeviceRecord, HealthRecord, ReportRecord, WorkerSeen
from holdfast.health.standing import OWED_MAX, WorkerStanding

WHOLE: dict[str, Any] = {
    "health": HealthRecord(
        name="w",
        standing=WorkerStanding(owed=OWED_MAX, weight=1.0, since_s=1.8e9),
        canary=canary.CanaryRecord(wrongs=2, cost_s=canary.TRY_S, baselines={0: canary.Baseline(canary.TRY_S, 9)}),
    ),
    "report": ReportRecord(
        name="f",
        at_unix_s=1.8e9,
        workers={"a": WorkerSeen(open=64, stream_s=-1e-12, failed={"stalled": 2})},
        admitted=("a", "b"),
    ),
    "device": DeviceRecord(severity=Severity.FATAL, reason="Xid 79", number=79, at_unix_s=1.8e9),
    "expected": ExpectationsRecord(Key("c", "b", "d", "k"), (), (QuestionEntry(withdrawals=2),), (), at_unix_s=1.8e9),
}
NEVER = [
    ("health", "standing.owed", OWED_MAX + 1),
    ("health", "standing.owed", 1e9),
    ("health", "standing.weight", 1.5),
    ("health", "standing.fall", -1),
    ("health", "standing.since_s", 1e300),
    ("health", "breaker.rest_s", OPEN_S_MAX + 1),
    ("health", "breaker.until_s", -1.0),
    ("health", "canary.cost_s", 1e9),
    ("health", "canary.wrongs", -3),
    ("health", "canary.baselines.0.mean_s", 1e9),
    ("health", "reloads", -1),
    ("report", "workers.a.open", 1e9),
    ("report", "workers.a.failed.stalled", -2),
    ("report", "workers.a.stream_s", 1e300),
    ("device", "cleared_unix_s", 1e12),
    ("expected", "entries.0.withdrawals", -1),
]


@pytest.mark.parametrize(("kind", "place", "number"), NEVER)
def test_a_number_out_of_its_bounds_makes_a_record_unreadable(kind: str, place: str, number: float) -> None:
    """What is within them is read as it was written."""
    whole = WHOLE[kind]
    written = {"p/1": msgspec.json.encode(whole)}
    assert decoded(written, "p/", type(whole)) == {"1": whole}
    facts = msgspec.json.decode(written["p/1"])
    *path, last = place.split(".")
    at = facts
    for step in path:
        at = at[int(step)] if isinstance(at, list) else at[step]
    assert last in at
    at[last] = number
    assert decoded({"p/1": msgspec.json.encode(facts)}, "p/", type(whole)) == {}
