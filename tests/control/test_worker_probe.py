"""What control concludes from what one worker says, and from its silence."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from holdfast.control import health_controller as hc
from holdfast.control.worker_probe import WITNESS_S, CanaryAsker, WorkerProbe
from holdfast.core.errors import Code
from holdfast.core.requests import Failure, Output
from holdfast.core.tasks import beside
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import InstanceKey, InstanceRecord
from holdfast.discovery.registry import Instance
from holdfast.health.liveness import Liveness, LivenessChanged
from holdfast.wire.messages import Cancel, Generate
from holdfast.wire.net import SocketNetwork

GONE = LivenessChanged(Liveness.SUSPECT, Liveness.GONE, "silent")
BACK = LivenessChanged(Liveness.GONE, Liveness.PROBATION, "it beats again")


class Keeper:
    """Hears others, or nobody."""

    def __init__(self) -> None:
        self.events: list[hc.HealthEvent] = []
        self.others_heard_s = float("-inf")

    def on_event(self, event: hc.HealthEvent) -> None:
        self.events.append(event)

    def on_ping(self, path: str, took_s: float | None) -> None:
        pass

    def heard_other_or_alone(self, path: str, since_s: float) -> bool:
        return True

    def heard_other_since(self, path: str, since_s: float) -> bool:
        return self.others_heard_s >= since_s


def contact(listener: Keeper) -> WorkerProbe:
    key = InstanceKey("d-00000000", "worker", "generate", 7)
    instance = Instance(key, InstanceRecord("tcp://h:1", "tcp://h:2", "sum"), cast(ModelCard, None))
    return WorkerProbe(instance, SocketNetwork(), random.Random(1), "control", listener, serving=False)


async def test_who_hears_nobody_calls_nobody_gone() -> None:
    """Cut off from all workers, or from the only one, control takes none out of traffic; one is gone as soon as another
    is heard, if it still is."""
    listener = Keeper()
    made = contact(listener)
    made._on_finding(GONE)
    made.tick(100.0)
    assert listener.events == []
    listener.others_heard_s = 100.1 - WITNESS_S
    made.tick(100.1)
    made.tick(100.2)
    assert listener.events == [hc.LivenessReported(made.path, GONE)]
    made._on_finding(BACK)
    assert listener.events[1:] == [hc.LivenessReported(made.path, BACK)]


async def test_who_is_back_before_another_is_heard_was_never_gone() -> None:
    """What was withheld is not told later."""
    listener = Keeper()
    made = contact(listener)
    made._on_finding(GONE)
    made._on_finding(BACK)
    listener.others_heard_s = 100.0
    made.tick(100.0)
    assert listener.events == [hc.LivenessReported(made.path, BACK)]


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
    listener = Keeper()
    asker = CanaryAsker("a", listener, lambda message: True, lambda own: 0.0)
    asker.ask(hc.AskWorker("a", 1, (1, 2), 4, 15.0))
    asker.on_output(Output(1, [], failure=Failure(code, "why")))
    (event,) = listener.events
    assert isinstance(event, hc.AnswerMissing)
    assert event.sound is sound
    await asyncio.sleep(0)


async def test_a_question_takes_the_place_of_the_one_before() -> None:
    """A worker has a place for one: what it was asked before its fresh load is called off, or the check of that load
    would be refused, and its streams would wait for the next."""
    listener, sent = Keeper(), list[object]()
    asker = CanaryAsker("a", listener, lambda message: sent.append(message) is None, lambda own: 0.0)
    asker.ask(hc.AskWorker("a", 1, (1, 2), 4, 15.0))
    asker.ask(hc.AskWorker("a", 2, (1, 2), 4, 15.0))
    assert [type(message) for message in sent] == [Generate, Cancel, Generate]
    assert sent[1] == Cancel([1])
    asker.on_output(Output(1, [3], "length"))
    asker.on_output(Output(2, [3], "length"))
    assert [event.number for event in listener.events if isinstance(event, hc.AnswerReceived)] == [2]
    assert len(listener.events) == 1
