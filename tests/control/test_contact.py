"""What control concludes from what one worker says, and from its silence."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from holdfast.control import words as w
from holdfast.control.asking import Asker
from holdfast.control.contact import WITNESS_S, Contact
from holdfast.core.errors import Code
from holdfast.core.requests import Failure, Output
from holdfast.core.tasks import beside
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import InstanceKey, InstanceRecord
from holdfast.discovery.registry import Instance
from holdfast.health.liveness import Judged, Verdict
from holdfast.wire.messages import Cancel, Generate
from holdfast.wire.net import SocketNetwork

GONE = Judged(Verdict.SUSPECT, Verdict.GONE, "silent")
BACK = Judged(Verdict.GONE, Verdict.PROBATION, "it beats again")


class Keeper:
    """Hears others, or nobody."""

    def __init__(self) -> None:
        self.events: list[w.Event] = []
        self.others_heard_s = float("-inf")

    def tell(self, event: w.Event) -> None:
        self.events.append(event)

    def pinged(self, path: str, took_s: float | None) -> None:
        pass

    def is_sound(self, path: str, since_s: float) -> bool:
        return True

    def hears(self, path: str, since_s: float) -> bool:
        return self.others_heard_s >= since_s


def contact(keeper: Keeper) -> Contact:
    key = InstanceKey("d-00000000", "worker", "generate", 7)
    instance = Instance(key, InstanceRecord("tcp://h:1", "tcp://h:2", "sum"), cast(ModelCard, None))
    return Contact(instance, SocketNetwork(), random.Random(1), "control", keeper, serving=False)


async def test_who_hears_nobody_calls_nobody_gone() -> None:
    """Cut off from all workers, or from the only one, control takes none out of traffic; one is gone as soon as another
    is heard, if it still is."""
    keeper = Keeper()
    made = contact(keeper)
    made._found(GONE)
    made.tick(100.0)
    assert keeper.events == []
    keeper.others_heard_s = 100.1 - WITNESS_S
    made.tick(100.1)
    made.tick(100.2)
    assert keeper.events == [w.Judged(made.path, GONE)]
    made._found(BACK)
    assert keeper.events[1:] == [w.Judged(made.path, BACK)]


async def test_who_is_back_before_another_is_heard_was_never_gone() -> None:
    """What was withheld is not told later."""
    keeper = Keeper()
    made = contact(keeper)
    made._found(GONE)
    made._found(BACK)
    keeper.others_heard_s = 100.0
    made.tick(100.0)
    assert keeper.events == [w.Judged(made.path, BACK)]


@pytest.mark.parametrize("address", ["", "junk", "tcp://h:99999999"])
async def test_a_beat_address_that_is_none_ends_no_watch(address: str) -> None:
    """Its record may be written anew."""
    made = contact(Keeper())
    made.beats._address = address
    async with beside(made.beats.keep(), "beats") as watch:
        await asyncio.sleep(0.01)
        assert not watch.done()


@pytest.mark.parametrize(("code", "sound"), [(Code.INVALID_REQUEST, False), (Code.ENGINE_SHUTDOWN, True)])
async def test_a_question_that_a_worker_does_not_take_says_nothing_of_it(code: Code, sound: bool) -> None:
    """All of its kind would refuse it, and all would be out of traffic."""
    keeper = Keeper()
    asker = Asker("a", keeper, lambda message: True, lambda own: 0.0)
    asker.ask(w.Ask("a", 1, (1, 2), 4, 15.0))
    asker.take(Output(1, [], failure=Failure(code, "why")))
    (event,) = keeper.events
    assert isinstance(event, w.NoAnswer)
    assert event.sound is sound
    await asyncio.sleep(0)


async def test_a_question_takes_the_place_of_the_one_before() -> None:
    """A worker has a place for one: what it was asked before its fresh load is called off, or the check of that load
    would be refused, and its streams would wait for the next."""
    keeper, sent = Keeper(), list[object]()
    asker = Asker("a", keeper, lambda message: sent.append(message) is None, lambda own: 0.0)
    asker.ask(w.Ask("a", 1, (1, 2), 4, 15.0))
    asker.ask(w.Ask("a", 2, (1, 2), 4, 15.0))
    assert [type(message) for message in sent] == [Generate, Cancel, Generate]
    assert sent[1] == Cancel([1])
    asker.take(Output(1, [3], "length"))
    asker.take(Output(2, [3], "length"))
    assert [event.number for event in keeper.events if isinstance(event, w.Answer)] == [2]
    assert len(keeper.events) == 1
