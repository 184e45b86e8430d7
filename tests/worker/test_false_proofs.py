"""New leaders whose proofs are false, with and without an engine that can take over, under open streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.testing.processes import kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.workload import Workload, hit_in_the_middle, run_streams

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(300)]

LOAD = Workload(streams=8, tokens=150)
SLOWER = 3.0  # the active, until it is killed: so that it is killed in the middle of every stream


@pytest.fixture
def up() -> Iterator[Supervised]:
    with Supervised("--standbys", "2", "--vault-gib", "0.0625", "--sim-tpot-ms", "20") as started:
        started.wait_until(lambda: len(standbys(started)) == 2, "two standbys")
        yield started


def standbys(up: Supervised) -> list[EngineSeen]:
    return [engine for engine in up.engines() if engine.state == "standby" and engine.facts["ready"]]


def flagged(engine: EngineSeen | None) -> bool:
    return engine is not None and engine.facts.get("exact") is False


def test_a_false_proof_ends_an_engine_with_a_successor_and_no_stream(up: Supervised) -> None:
    """Two standbys whose proofs are false, however often they are asked; nothing is restarted meanwhile. The first that
    takes over leaves without a token, since the second is ready; the second serves on: every stream ends with its right
    tokens, flagged and with the reason. Once the supervisor has started another engine that one takes over, and answers
    are exact again."""
    unbroken = uvloop.run(run_streams(up.port, LOAD))
    active, bad = up.active(), {engine.pid for engine in standbys(up)}
    for engine in standbys(up):
        up.chaos(engine.name, "wrong_proofs", times=1_000_000)
    up.chaos(active.name, "slow", factor=SLOWER)

    def hit() -> None:
        os.kill(up.supervisor_pid, signal.SIGSTOP)
        kill_group(active.pid)

    try:
        answers = uvloop.run(hit_in_the_middle(up, LOAD, hit))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in unbroken], up.logs()
        last = up.active()
        assert last.pid in bad
        assert flagged(last)
        reason = "the canary's answer was wrong after taking over, twice"
        assert str(last.facts["doubt"]).startswith(reason)
        for answer in answers:
            # The first may have left before a busy frontend had sent it anything.
            assert (answer.resumed in (1, 2), answer.exact) == (True, False), answer
            assert answer.reason.startswith(reason)
        [first] = [term for term in up.terms() if term.pid in bad - {last.pid}]
        assert first.last_sent_ns == 0, "it sent tokens"
    finally:
        os.kill(up.supervisor_pid, signal.SIGCONT)
    up.wait_restored(last.pid)
    assert not flagged(up.engine("active"))
    assert two_leaders(up.terms()) == []
    after = uvloop.run(run_streams(up.port, LOAD))
    assert [answer.tokens for answer in after] == [answer.tokens for answer in unbroken]
    assert not any(answer.exact is False for answer in after)
