"""What control's log says of answers that may be wrong."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from holdfast.control import health_controller as hc
from holdfast.control.leadership import Leadership
from holdfast.control.metrics import ControlMetrics
from holdfast.core.address import UnixAddress
from holdfast.spec.launch import ControlLaunch
from holdfast.store.client import EmbeddedStore
from holdfast.wire.net import SocketNetwork, real_world

TOLD = [(0.0, "0 streams of the last 0 s"), (48.0, "at least 0 streams of the last 48 s")]


@pytest.mark.parametrize(("ago_s", "words"), TOLD)
async def test_what_was_before_this_leadership_is_not_called_counted(
    ago_s: float, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was last right before this control led had streams that nobody here has counted."""
    world = real_world()
    store = EmbeddedStore(UnixAddress(f"{tmp_path}/store.sock"), SocketNetwork(), random.Random(3))
    leadership = Leadership(ControlLaunch(), store, world, asyncio.Event(), ControlMetrics(), on_begin=lambda: None)
    leadership._flag(hc.FlagAnswers("ns/worker/generate/1f", leadership.now_s - ago_s, "canary wrong"))
    told = [record.message for record in caplog.records]
    assert told == [f"ns/worker/generate/1f: {words} may be wrong: canary wrong"]
