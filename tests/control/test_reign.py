"""What control's log says of answers that may be wrong."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from holdfast.control import words as w
from holdfast.control.metrics import ControlMetrics
from holdfast.control.reign import Reign
from holdfast.core.address import UnixAddress
from holdfast.spec.launch import ControlLaunch
from holdfast.store.client import EmbeddedStore
from holdfast.wire.net import SocketNetwork
from holdfast.wire.world import real_world

TOLD = [(0.0, "0 streams of the last 0 s"), (48.0, "at least 0 streams of the last 48 s")]


@pytest.mark.parametrize(("ago_s", "words"), TOLD)
async def test_what_was_before_this_reign_is_not_called_counted(
    ago_s: float, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was last right before this control led had streams that nobody here has counted."""
    world = real_world()
    store = EmbeddedStore(UnixAddress(f"{tmp_path}/store.sock"), SocketNetwork(), random.Random(3))
    reign = Reign(ControlLaunch(), store, world, asyncio.Event(), ControlMetrics(), on_begin=lambda: None)
    reign._flag(w.Flag("ns/worker/generate/1f", reign.now_s - ago_s, "canary wrong"))
    told = [record.message for record in caplog.records]
    assert told == [f"ns/worker/generate/1f: {words} may be wrong: canary wrong"]
