"""A desired model is checked as it is made, and says everything that is wrong with it."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.fleet.desired import Level, Model

FINE = {"key": "a", "device_bytes": 1}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"key": ""}, "its key must be printable, and not empty"),
        ({"replicas_min": -1}, "replicas_min is -1, must be at least 0"),
        ({"replicas_min": 3, "replicas_max": 2}, "replicas_max is 2, must be from replicas_min (3) to 10000"),
        ({"wanted": 2}, "wanted is 2, which is more than replicas_max (1)"),
        ({"wanted": -1}, "wanted is -1, must be at least 0"),
        ({"devices": 0}, "devices is 0, must be from 1 to 64"),
        ({"device_bytes": 0}, "device_bytes is 0, must be at least 1"),
        ({"host_bytes": -1}, "host_bytes is -1, must be at least 0"),
        ({"floor": Level.WARM}, "its floor is WARM, and host_bytes does not say how much that takes"),
        ({"per_node_max": -1}, "per_node_max is -1, must be at least 0"),
        ({"load_s": 0.0}, "load_s is 0, must be more than 0"),
        ({"drain_s": -1.0}, "drain_s is -1, must be at least 0"),
        ({"reload_s": -1.0}, "reload_s is -1, must be at least 0"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, object], told: str) -> None:
    """The mistake is named, with the value and the bound."""
    with pytest.raises(ValueError) as caught:
        Model(**{**FINE, **fields})
    assert told in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """Nobody mends one field to hear of the next; also where it is read from the store."""
    desired = b'{"key": "a", "device_bytes": 0, "wanted": 9}'
    with pytest.raises(msgspec.ValidationError, match=r"wanted is 9.*device_bytes is 0"):
        msgspec.json.decode(desired, type=Model)


@pytest.mark.parametrize(
    ("floor", "hot", "kept"), [(Level.HOT, 2, 2), (Level.WARM, 1, 2), (Level.COLD, 1, 1)], ids=lambda value: str(value)
)
def test_a_floor_says_how_far_the_first_ones_fall(floor: Level, hot: int, kept: int) -> None:
    """One is wanted and two are the least: a floor that is HOT wants both HOT, one that is WARM keeps the second so."""
    model = Model(key="a", replicas_min=2, replicas_max=4, wanted=1, floor=floor, device_bytes=1, host_bytes=1)
    assert (model.hot, model.kept) == (hot, kept)


def test_a_model_is_written_and_read() -> None:
    """What is read is what was written."""
    model = Model(key="a", nodes=frozenset({"n"}), floor=Level.WARM, device_bytes=5, host_bytes=3)
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model
