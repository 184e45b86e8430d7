"""The shell around levels: junk in the store, and what a frontend says that cannot be."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from holdfast.control.leadership import LevelLoop
from holdfast.control.outbox import Outbox
from holdfast.discovery.keys import LEVELS
from holdfast.health.records import ReportRecord
from holdfast.spec.health import LevelSettings, SloSettings
from holdfast.store.contract import Store


def loop() -> LevelLoop:
    outbox = Outbox(cast(Store, None), asyncio.Event())
    settings = LevelSettings(slo=SloSettings(requests_per_s=10.0))
    return LevelLoop(settings, "d", outbox, unix_s=lambda: 0.0, on_spare=lambda spared: None)


@pytest.mark.parametrize(
    "junk",
    [b"", b"\xff", b'{"level":9,"reason":""}', b'{"level":0,"reason":"","patience":0}', b'{"level":0,"reason":"\xff"}'],
)
async def test_a_level_that_cannot_be_is_begun_anew(junk: bytes) -> None:
    """Not at each sample for ever."""
    made = loop()
    made.begin({LEVELS + "d": junk}, {}, ())
    made.tick([])
    assert made.capacity is not None


@pytest.mark.parametrize("more", [{"prompt_tokens": -(10**9)}, {"answer_tokens": -1}, {"answer_tokens": 10**400}])
async def test_what_a_frontend_says_that_cannot_be_is_not_counted(more: dict[str, Any]) -> None:
    """What requests are like stays what it was, and the next report counts."""
    made = loop()
    for ended in (10**400, 0, 1):
        made.on_report("f", ReportRecord(name="f", at_unix_s=0.0, ended=ended))
    profile = made._levels.profile
    before = profile.prompt_tokens
    made.on_report("f", ReportRecord(name="f", at_unix_s=0.0, **{"ended": 2, **more}))
    assert (profile.requests, profile.prompt_tokens) == (1, before)
