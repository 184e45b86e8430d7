"""A seat's orders: what fails ends its process, in one line where it is the outside world's failure."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest

from holdfast.core.tasks import beside
from holdfast.engines.shadow import seat
from holdfast.memory.errors import VaultRefused
from holdfast.testing.waiting import until


@pytest.mark.parametrize(
    ("error", "told", "logged"),
    [
        (VaultRefused("WARM", "they are in host memory"), "wake failed: they are in host memory (WARM)", 0),
        (TimeoutError(), "wake failed: TimeoutError", 0),
        (KeyError("x"), "KeyError: 'x'", 1),
    ],
)
async def test_an_order_that_fails_ends_the_seat_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, told: str, logged: int
) -> None:
    """A traceback is for our own bugs."""
    ends: list[str] = []
    monkeypatch.setattr(seat, "end", ends.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def wake(epoch: int) -> None:
        assert epoch == 7
        raise error

    with ours, caplog.at_level(logging.ERROR):
        orders = seat.Orders(seat.Tether(theirs.detach(), 0))
        async with beside(orders.obey({"wake": wake}), "seat"):
            ours.send(json.dumps([1, "wake", {"epoch": 7}]).encode())
            await until(lambda: bool(ends), "its end")
            await asyncio.sleep(0)
    assert (ends, len(caplog.records)) == ([told], logged)
