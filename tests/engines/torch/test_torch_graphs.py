"""What step graphs are given, on a CPU: streams that are preempted for real say what they say without graphs."""

from __future__ import annotations

import threading

import pytest

from holdfast.core.requests import GenerateRequest
from holdfast.engines.sampling import token_hashes
from holdfast.engines.torch.gpu.graphs import GraphInputs
from tests.rigs.engines.any_engine import Vault
from tests.rigs.engines.paged_scheduler import SIZE, World
from tests.rigs.engines.paged_scheduler import request as asked_of
from tests.rigs.engines.torch_engine import BLOCK_GIB, WANTS, Rig, prompt, request, rig
from tests.rigs.engines.torch_graphs import by_graphs, counted_by_hand

STREAMS = 5  # four of them are a graph's size: the last one's row is left as it is while it is away
ANSWER = 60  # tokens
SMALL = {"kv_gib": 28 * BLOCK_GIB, "concurrency": 8}  # five prompts fit, five answers do not


def asked(first: int) -> dict[int, GenerateRequest]:
    """One prompt, answers of their own: who gives up its blocks finds the prompt's again in another's."""
    places = range(STREAMS)
    return {first + at: request(prompt(70), ANSWER, seed=at, temperature=0.8 if at else 0.0) for at in places}


async def together(r: Rig, asked: dict[int, GenerateRequest]) -> None:
    """All of them begin in one step, so each computes the prompt into blocks of its own."""
    gate = threading.Event()
    r.hosted._stepper.run(gate.wait)
    r.submit(asked)
    gate.set()
    await r.until(lambda: r.ended(*asked))


def said(r: Rig, first: int) -> list[list[int]]:
    return [r.tokens(number) for number in range(first, first + STREAMS)]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_rows_table_has_its_streams_blocks_after_a_preemption(lookahead: int) -> None:
    """Whoever left a row and came back to it, the tables on the device are the plan's own, step by step."""
    world = World(block_count=10, lookahead=lookahead, step_tokens_max=12)
    inputs = GraphInputs(4, 16, 99, token_hashes(50))
    for number in range(1, 5):
        # One text: what one of them gives up is found again in another's blocks, so it is back in its row at once.
        world.scheduler.submit(number, asked_of(range(5), 22, ignore_eos=True))
    returned = 0
    rows: dict[int, tuple[object, list[int]]] = {}
    while world.scheduler.running or world.scheduler.waiting or world.queue:
        plan = world.plan() if len(world.queue) <= lookahead else None
        if plan is not None:
            inputs.fill_tables(plan.segments, len(plan.segments))
            for row, segment in enumerate(plan.segments):
                used = -(-segment.position // SIZE)
                assert inputs.tables[row, :used].tolist() == segment.blocks[:used]
                before = rows.get(row)
                returned += before is not None and before[0] is segment.owner and before[1] is not segment.blocks
                rows[row] = (segment.owner, segment.blocks)
        if world.queue and (plan is None or len(world.queue) > lookahead):
            world.retire()
    assert world.scheduler.preemptions > 0
    assert returned > 0, "no stream came back to its row with other blocks: this shows nothing"


async def test_preempted_streams_say_the_same_by_graphs(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool that is too small for all, what streams say and what they leave under a key is as without graphs."""
    async with rig(vault, **SMALL) as r:
        graphs = await by_graphs(r, monkeypatch)
        await together(r, asked(1))
        assert r.scheduler.preemptions > 0
        assert graphs.replays > ANSWER
        found = r.blocks.found_tokens_total
        await together(r, asked(11))
        assert r.blocks.found_tokens_total > found, "no published block was read"
        monkeypatch.setattr(graphs, "run", lambda segments, sources: None)
        await r.run(asked(21))
        assert said(r, 1) == said(r, 21)
        assert said(r, 11) == said(r, 21)


def wanting(first: int) -> dict[int, GenerateRequest]:
    return {first + at: request(prompt(20 + 13 * at, at), 30 + at, **wants) for at, wants in enumerate(WANTS)}


@pytest.mark.parametrize("small", [False, True])
async def test_streams_that_want_more_stay_in_the_graph(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """One that is truncated, penalised or asks for logprobs takes no step out of the graphs, and says what it says
    without them, preempted or not; so do its neighbours."""
    pool = {"kv_gib": 36 * BLOCK_GIB} if small else {}
    async with rig(vault, concurrency=8, **pool) as r:
        graphs = await by_graphs(r, monkeypatch)
        by_hand = counted_by_hand(monkeypatch)
        await together(r, wanting(1))
        assert not by_hand
        assert (r.scheduler.preemptions > 0) is small
        monkeypatch.setattr(graphs, "run", lambda segments, sources: None)
        await r.run(wanting(11))
        for place in range(len(WANTS)):
            assert r.tokens(1 + place) == r.tokens(11 + place), WANTS[place]
            told = [[output.logprobs for output in r.of(first + place)] for first in (1, 11)]
            assert told[0] == told[1]
