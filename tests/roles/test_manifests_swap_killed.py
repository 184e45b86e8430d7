"""A swap on one device whose supervisor is killed in the middle of it: the next one goes on where it was."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.rollout.machine import DesiredState
from tests.rigs.roles.device_swap import FAST, ONE, SHORT, SLOW, TWO, Mortal, fates, kill, text_of, wants_of

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("device", "wants"),
    [
        pytest.param(ONE, [DesiredState.DRAIN], id="in place, while the old one drains"),
        pytest.param(ONE, [DesiredState.SERVE], id="in place, while the new one starts"),
        pytest.param(TWO, [DesiredState.SERVE, DesiredState.STAND_BY], id="beside, while the new one stands by"),
        pytest.param(TWO, [DesiredState.DRAIN, DesiredState.SERVE], id="beside, while the old one drains"),
    ],
)
async def test_the_next_supervisor_goes_on(device: dict[str, int], wants: list[DesiredState]) -> None:
    """With the same processes: nobody is started twice, and no stream is lost. In place a stream that outlives its
    worker goes on in the new one and says so; beside, it ends where it began."""
    first, second = (text_of(words, failover=False) for words in (SLOW, FAST))
    with Mortal(first, **device) as site:
        supervisor = site.keep()
        await site.store.start()
        try:
            await site.in_place(1)
            stream = site.stream("story", 20 * SHORT)
            await asyncio.to_thread(stream.wait_tokens, 5)
            await site.apply(second)
            await site.until(lambda it: it.target.number == 2 and wants_of(it) == wants, str(wants))
            kill(supervisor)
            supervisor = site.keep()
            memory = await site.in_place(2)
            answer = await asyncio.to_thread(stream.answer)
            late = await asyncio.to_thread(site.stream("late", 5).answer)
        finally:
            await site.store.close()
            kill(supervisor)
    assert answer.wrong == "", memory
    assert answer.exact is (answer.resumed == 0)
    assert fates([late]) == [("", True)]
    assert (list(memory.replicas), memory.undone) == (["Frontend-1", "Worker-3"], 0), "a name more is one started twice"
