"""A replica's moves on its node: which orders are carried out, and when again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.supervise import levels
from holdfast.supervise.levels import Levels
from holdfast.wire.net import SocketNetwork


def order(number: int) -> Action:
    return Action(verb=Verb.PROMOTE, model="chat", node="n1", serial=1, turn=number)


async def test_an_order_that_is_over_is_not_carried_out_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent says it until it sees that it is so, and every end of a move has it look again: without a rest its
    engines would be told without a pause. Another order waits for nothing, and the same is carried out later."""
    monkeypatch.setattr(levels, "AGAIN_S", 600.0)
    done: list[str] = []
    looks = asyncio.Event()
    here = Levels(tmp_path, SocketNetwork(), dict, looks.set)

    async def to_device(_: Levels, name: str) -> None:
        done.append(name)

    monkeypatch.setattr(Levels, "_to_device", to_device)

    async def told(action: Action, *, times: int) -> None:
        looks.clear()
        here.move(action, Level.HOT)
        if len(done) < times:
            await asyncio.wait_for(looks.wait(), 60)
        for _ in range(5):  # whatever was begun besides
            await asyncio.sleep(0)
        assert len(done) == times

    await told(order(1), times=1)
    await told(order(1), times=1)
    await told(order(2), times=2)
    await told(order(2), times=2)
    monkeypatch.setattr(levels, "AGAIN_S", 0.0)
    await told(order(3), times=3)
    await told(order(3), times=4)
    await here.stop()
