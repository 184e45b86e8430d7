"""A new leader whose proof is false, and no other engine that can take over: `holdfast up` with open streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.testing.load import Load, hit_in_the_middle, run_streams
from holdfast.testing.place import EngineSeen
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(300)]

LOAD = Load(streams=8, tokens=150)
HOLD_S = 6.0  # where a stream is given up, the test need not wait for long


@pytest.fixture
def up() -> Iterator[Supervised]:
    with Supervised("--vault-gib", "0.0625", "--sim-tpot-ms", "20", "--hold-s", str(HOLD_S)) as started:
        yield started


def flagged(engine: EngineSeen | None) -> bool:
    return engine is not None and engine.facts.get("exact") is False


def test_a_false_proof_on_the_only_engine_ends_no_stream(up: Supervised) -> None:
    """The standby takes over and its proof is false, however often it is asked; nothing is restarted meanwhile. It
    serves on: every stream ends with its right tokens, flagged and with the reason. Once the supervisor has started
    another engine that one takes over, and answers are exact again."""
    unbroken = uvloop.run(run_streams(up.port, LOAD))
    active, bad = up.active(), up.engine("standby")
    assert bad is not None
    up.chaos(bad.name, "false_proof")

    def hit() -> None:
        os.kill(up.supervisor_pid, signal.SIGSTOP)
        kill_group(active.pid)

    try:
        answers = uvloop.run(hit_in_the_middle(up, LOAD, hit))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in unbroken], up.logs()
        seen = up.engine("active")
        assert seen is not None
        assert (seen.pid, flagged(seen)) == (bad.pid, True)
        reason = "the canary's answer was wrong after taking over, twice"
        assert str(seen.facts["doubt"]).startswith(reason)
        for answer in answers:
            assert (answer.resumed, answer.exact) == (1, False)
            assert answer.reason.startswith(reason)
    finally:
        os.kill(up.supervisor_pid, signal.SIGCONT)
    up.wait_restored(bad.pid)
    assert not flagged(up.engine("active"))
    assert two_leaders(up.terms()) == []
    after = uvloop.run(run_streams(up.port, LOAD))
    assert [answer.tokens for answer in after] == [answer.tokens for answer in unbroken]
    assert not any(answer.exact is False for answer in after)
