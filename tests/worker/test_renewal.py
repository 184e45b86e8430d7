"""A worker without a group is asked, on a canary's connection, to load its weights again: a real process and frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from holdfast.testing.waiting import until
from holdfast.wire.messages import Active, Message, Reload, Reloaded, Welcome
from tests.rigs.failover_worker import DataPeer, Stage, connect

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


async def told(peer: DataPeer, message: Reload) -> Reloaded:
    """What it answers to this."""
    heard = len(peer.heard)
    peer.send(message)

    def answers() -> list[Message]:
        return [each for each in peer.heard[heard:] if isinstance(each, Reloaded)]

    await until(answers, "an answer")
    (answer,) = answers()
    assert isinstance(answer, Reloaded)
    return answer


async def test_a_lone_worker_loads_anew_once_for_each_verdict(stage: Stage) -> None:
    """Its streams go back and it goes on at once under a larger load, which the next to connect is welcomed with;
    whoever asks for what was done already, has no token that fits or is no canary changes nothing."""
    path = str(stage.folder / "w.sock")
    worker = stage.worker(
        "--address", f"unix://{path}", "--sim-tpot-ms", "50", failover=False, HOLDFAST_ENGINE_TOKEN="secret"
    )
    await asyncio.to_thread(worker.until_state, "active")
    frontend, control = await connect(path), await connect(path, "canary")
    frontend.generate(1, tokens=20_000)  # 1,000 s: longer than a test may take, so it runs at the reload
    await until(lambda: list(frontend.outputs(1)), "a token")
    assert (await told(control, Reload(1, token="other"))).load == 1
    frontend.send(Reload(1))
    answer = await told(control, Reload(1, reason="its answers were wrong"))
    assert answer.load == 2, answer
    assert "loaded again" in answer.outcome
    await until(lambda: [each for each in frontend.outputs(1) if each.failure], "its streams back")
    assert not [each for each in frontend.heard if isinstance(each, Active)]
    frontend.generate(2)
    await until(lambda: list(frontend.outputs(2)), "a token")
    assert (await told(control, Reload(1))) == Reloaded(2, "they were loaded again before: load 2")
    assert (await told(control, Reload(2, token="secret"))).load == 3
    later = await connect(path)
    welcome = later.heard[0]
    assert isinstance(welcome, Welcome)
    assert (welcome.load, welcome.active) == (3, True)
    for peer in (frontend, control, later):
        peer.close()
