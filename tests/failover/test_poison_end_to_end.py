"""A request that kills every engine that runs it, among innocent streams, against a real `holdfast up`.

Every answer is known beforehand. One token is poison: a prompt that has it kills engines from the start, a stream that
has *said* it kills every engine it is resumed on.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.kv.adopt import NO_CANARY
from holdfast.testing.clients import Received, read_answer
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from tests.rigs.failover.known_answers import answer_to, are_unbroken, ask_number, ask_tokens, streams

pytestmark = [pytest.mark.alone, pytest.mark.processes]

INNOCENTS = range(12)
VICTIM = 14  # its answer comes to the poison word with its first token
TOKENS = 800  # four seconds and more: enough for a kill in the middle of them
# What a new leader's log says of what it found.
RUNGS = {
    "leads with [0-9]+ whole blocks": "believed",
    f"leads with no KV: {NO_CANARY}": "empty",
    "without a canary: the weights are verified": "verified",
}
# The canary's 8 tokens take 40 ms, so it is over before a suspect that waits to be alone has had its turn.
TPOT_MS = 5
# Three engines die of it and two are started for it, half a second each; a shared machine may take many times that.
VERDICT_S = 60.0


EXPECTED = {number: answer_to(number, TOKENS) for number in INNOCENTS}
SAID = {token for tokens in EXPECTED.values() for token in tokens}
POISON = next(token for token in answer_to(VICTIM, 1) if token not in SAID)


@pytest.fixture(scope="module")
def up() -> Iterator[Supervised]:
    options = ("--sim-tpot-ms", str(TPOT_MS), "--sim-poison-token", str(POISON))
    with Supervised("--vault-gib", "0.1", *options) as started:
        yield started


def rungs(up: Supervised) -> list[str]:
    """What the leaders so far made of what they found, oldest first."""
    logs = "\n".join((up.folder / "logs" / f"worker-1{letter}.log").read_text() for letter in "ab")
    return [RUNGS[key] for line in sorted(logs.splitlines()) for key in RUNGS if re.search(key, line)]


def kill_active(up: Supervised) -> None:
    kill_group(up.active().pid)


def poisoned(error: dict[str, Any] | None) -> bool:
    return error is not None and error["code"] == "PoisonedRequest" and "the last time it was tried alone" in str(error)


def leaders(up: Supervised) -> int:
    assert two_leaders(up.terms()) == []
    return len(up.terms())


@pytest.mark.timeout(300)
def test_a_poison_prompt_fails_by_name_and_harms_nobody_else(up: Supervised) -> None:
    """It ends as PoisonedRequest after three engines, every innocent stream goes on exactly; the second adopter starts
    with an empty pool and lives until the trial, so that the third may believe what it left; no second copy of the
    weights is ever made; a pair is left, and its next adopter believes the pool."""

    async def run() -> tuple[Received, float, list[float]]:
        running = await streams(up, INNOCENTS, TOKENS)
        began_s = time.monotonic()
        received = await ask_tokens(up.port, [1, 2, POISON, 3], 1, TOKENS)
        took_s = time.monotonic() - began_s
        return received, took_s, await are_unbroken(running, EXPECTED)

    received, took_s, gaps_s = uvloop.run(run())
    # It never had a token, so its answer had not begun: a plain error, or an event if it was held for long.
    error = json.loads(received.body())["error"] if received.status == 500 else read_answer(received).error
    assert poisoned(error), received.pieces
    assert b"[DONE]" not in received.body()
    assert took_s < VERDICT_S
    up.wait_until(up.restored, "an active and a standby")
    assert "3 engines died while they worked on this request" in str(error), "what it may cost, whatever else died"
    # A busy machine may lose others: one that wakes too late, or has its canary answered after the trial.
    count, seen = leaders(up), rungs(up)
    assert count >= 4
    assert seen[:2] == ["believed", "believed"]
    assert "empty" in seen
    if count <= 5:
        assert seen[2] == "empty", seen
    if count == 4:
        assert seen[3:] in (["believed"], ["verified", "empty"]), seen
    assert "generation 2" not in (up.folder / "logs" / "vault-1.log").read_text()
    print(f"verdict after {took_s:.2f} s, worst gap of an innocent stream {max(gaps_s):.2f} s")

    async def kill_under_way() -> None:
        await in_thread(up.wait_until, lambda: up.active().facts["proven"], "its word for the next adopter")
        running = await streams(up, INNOCENTS, TOKENS)
        await in_thread(kill_active, up)
        await are_unbroken(running, EXPECTED)

    before = up.active().pid
    uvloop.run(kill_under_way())
    up.wait_restored(before)
    assert rungs(up)[len(seen)] == "believed"
    assert up.active().facts["failover"]["blocks"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_stream_that_became_poison_ends_with_an_error_event(up: Supervised) -> None:
    """A stream whose own words kill whoever takes it over: its client has every token it was sent, then the error by
    name as an event and no [DONE]; the others go on exactly, and a pair is left."""
    before = leaders(up)

    async def run() -> Received:
        victim = asyncio.create_task(ask_number(up.port, VICTIM, TOKENS))
        running = await streams(up, INNOCENTS, TOKENS)
        await in_thread(kill_active, up)
        await are_unbroken(running, EXPECTED)
        return await victim

    answer = read_answer(uvloop.run(run()))
    assert poisoned(answer.error), answer.error
    assert not answer.done
    assert POISON in answer.tokens, "it was not poison yet when its engine died"
    assert answer.tokens == answer_to(VICTIM, len(answer.tokens))
    up.wait_until(up.restored, "an active and a standby")
    assert "3 engines died while they worked on this request" in str(answer.error), "what it may cost"
    assert leaders(up) - before >= 4  # a busy machine may lose others
