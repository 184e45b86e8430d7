"""When a consumer is told that its stream moves again: after a failure, before the tokens, and at no other time."""

from __future__ import annotations

import pytest
from streams_rig import Cluster

from holdfast.core.errors import Code


def test_told_before_the_first_token_after_a_failure() -> None:
    """Each failure is told once, with its pause, while the tokens that end it are still to be shown."""
    cluster = Cluster()
    a, b = cluster.worker("a"), cluster.worker("b")
    client = cluster.ask("s")
    first, second = (a, b) if a.requests else (b, a)
    first.say("s", [7, 8])
    assert client.pauses == []
    first.die()
    cluster.wait(0.3)
    assert client.pauses == []
    second.say("s", [9])
    second.say("s", [10])
    assert client.pauses == [(0.3, 2)]
    first.connect()
    second.die()
    cluster.wait(0.2)
    first.say("s", [11], "stop")
    assert client.pauses == [(0.3, 2), (0.2, 4)]
    assert client.shown == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("code", "told"), [(Code.WORKER_OVERLOADED, 0), (Code.DISCONNECTED, 1), (Code.CANNOT_CONNECT, 1)]
)
def test_a_full_worker_is_no_failure_to_speak_of(code: Code, told: int) -> None:
    """A stream that met a full worker before its first token is not said to have been resumed; a failed one is."""
    cluster = Cluster()
    a, b = cluster.worker("a"), cluster.worker("b")
    client = cluster.ask("s")
    first, second = (a, b) if a.requests else (b, a)
    first.say("s", [], fail=code)
    second.say("s", [7])
    assert len(client.pauses) == told
