"""The scheduler's rules one by one: who is taken, who is refused, who goes first, and what is asked of its caller."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest, Sampling, TokenLogprobs
from holdfast.engines.paged.blocks import PrivateBlocks
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.kv.geometry import block_keys
from paged_rig import EOS, SIZE, VOCABULARY, World, next_token, request, unbroken


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (request([]), "tokens"),
        (request([1], prompt_len=2), "prompt_len"),
        (GenerateRequest("r", [1], 0, Sampling(4, 0)), "prompt_len"),
        (request([1] * 65), "tokens"),
        (request([1, VOCABULARY]), "tokens"),
        (request([1, 2**40]), "tokens"),
        (request([1, -1]), "tokens"),
        (request([1], repetition_penalty=0.0), "repetition_penalty"),
        (request([1], repetition_penalty=math.nan), "repetition_penalty"),
        (request([1], logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        (request([1] * 32), "can never fit"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(asked: GenerateRequest, word: str) -> None:
    """A refusal says which field and changes nothing: the same number is free for the next."""
    world = World()
    with pytest.raises(HoldfastError, match=word) as refused:
        world.scheduler.submit(1, asked)
    assert refused.value.code == Code.INVALID_REQUEST
    assert not world.scheduler.waiting
    world.scheduler.submit(1, request([1, 2]))
    assert world.drain()[-1].finish == "length"


@pytest.mark.parametrize(
    ("given", "finish", "count"),
    [
        ({"max_tokens": 3, "ignore_eos": True}, "length", 3),
        ({"max_tokens": 99, "ignore_eos": True}, "length", 29),  # the pool's 32 positions
        ({"max_tokens": 99, "ignore_eos": True, "context_tokens_max": 20}, "length", 17),
        ({"max_tokens": 9, "stops": "second"}, "stop", 2),  # the stop token is in the output
        ({"max_tokens": 9, "stops": "second", "min_tokens": 1}, "stop", 2),
        ({"max_tokens": 9, "stops": "second", "min_tokens": 2}, "length", 9),
    ],
)
def test_how_a_stream_ends(given: dict[str, Any], finish: str, count: int) -> None:
    """By a stop token on top of min_tokens, or by its length: max_tokens, the context or the pool."""
    text = [1, 2, 3]
    first = next_token(text)
    stops = [next_token([*text, first])] if given.pop("stops", None) else []
    world = World(context_tokens_max=given.pop("context_tokens_max", 64))
    world.scheduler.submit(1, request(text, **given, stops=stops))
    outputs = world.drain()
    assert [output.finish for output in outputs] == [None] * (count - 1) + [finish]


def test_max_tokens_count_from_the_prompts_end() -> None:
    """A resumed stream makes only what is left; one with nothing left ends at once, without a step."""
    world = World()
    world.scheduler.submit(1, request([1, 2, 3, 4], 3, prompt_len=2))
    world.scheduler.submit(2, request([1, 2, 3, 4], 2, prompt_len=2))
    early = world.scheduler.take_early()
    assert [(output.stream, output.finish) for output in early] == [(2, "length")]
    assert [output.stream for output in world.drain()] == [1]


def test_the_largest_prompt_that_fits_has_room_for_one_token() -> None:
    """A prompt of all positions but one is taken, and ends with "length" where the blocks end."""
    world = World()
    world.scheduler.submit(1, request([1] * 31, 9, ignore_eos=True))
    assert [output.finish for output in world.drain()] == ["length"]


def test_a_held_stream_has_its_blocks_and_no_step_until_it_is_let_go() -> None:
    """It is admitted ahead of a step, counts as running, and others run past it; let go, it is computed like any."""
    world = World(holds=True)
    asked = {number: request([number] * 5, 3, ignore_eos=True) for number in (1, 2)}
    world.scheduler.submit(1, asked[1])
    world.scheduler.admit()
    assert (list(world.scheduler.running), world.blocks.used, world.plan()) == ([1], 2, None)
    world.let_go()
    world.scheduler.submit(2, asked[2])
    said: dict[int, list[int]] = {1: [], 2: []}
    for output in [each for _ in range(3) for each in world.step()]:
        said[output.stream] += output.tokens
    assert said == {1: unbroken(asked[1], 32), 2: []}
    assert list(world.scheduler.running) == [2]
    assert [token for output in world.drain() for token in output.tokens] == unbroken(asked[2], 32)


def test_the_first_output_tells_how_much_of_the_prompt_was_cached() -> None:
    """A prompt that was computed before is found up to its last whole block; only the first output says so."""
    world = World()
    for number, cached in ((1, 0), (2, 2 * SIZE)):
        world.scheduler.submit(number, request(range(1, 2 * SIZE + 2), 3, ignore_eos=True))
        assert [output.cached for output in world.drain()] == [cached, 0, 0]


def test_end_of_turn_ends_a_stream_unless_it_is_ignored() -> None:
    """The model's own stop ids count like the request's."""
    text = next(list(pair) for pair in product(range(49), repeat=2) if next_token(list(pair)) == EOS)
    for ignoring, finish in ((False, "stop"), (True, "length")):
        world = World()
        world.scheduler.submit(1, request(text, 1, ignore_eos=ignoring))
        assert [output.finish for output in world.drain()] == [finish]


def test_a_number_is_free_once_its_stream_is_cancelled() -> None:
    """Even while a step of the old stream is in flight: its token goes to nobody."""
    world = World(lookahead=1)
    world.scheduler.submit(1, request([1, 2]))
    world.plan()
    world.scheduler.cancel(1)
    world.scheduler.cancel(77)
    asked = request([7, 8, 9], 4, ignore_eos=True)
    world.scheduler.submit(1, asked)
    assert [token for output in world.drain() for token in output.tokens] == unbroken(asked, 32)


def test_a_cancelled_streams_last_step_may_complete_a_block() -> None:
    """Its token was drawn by the step before and said to nobody; the block is named by it all the same."""
    world = World(lookahead=1)
    world.scheduler.submit(1, request([1, 2, 3]))
    world.plan()
    world.plan()
    world.scheduler.cancel(1)
    assert world.retire() + world.retire() == []
    assert world.pool.match(block_keys(world.geometry.root(), [1, 2, 3, next_token([1, 2, 3])], 4)) == 1
    world.check_books()


def test_a_preempted_stream_goes_before_those_that_wait() -> None:
    """It came before them."""
    world = World(5, concurrency=2)
    asked = {number: request([number] * 7, 6, ignore_eos=True) for number in (1, 2, 3)}
    for number, each in asked.items():
        world.scheduler.submit(number, each)
    while not world.scheduler.preemptions:
        world.step()
    assert [stream.number for stream in world.scheduler.waiting] == [2, 3]
    ends = [output.stream for output in world.drain() if output.finish]
    assert ends == [1, 2, 3]


def test_a_preempted_stream_waits_for_its_own_steps() -> None:
    """Room that others leave meanwhile is not given to it while a step may still write its old blocks."""
    world = World(6, lookahead=2, step_tokens_max=32)
    asked = {1: request([1] * 7, 9), 2: request([2] * 11, 1), 3: request([3] * 3, 6)}
    for number, each in asked.items():
        world.scheduler.submit(number, each)
    assert world.plan() is not None
    assert world.plan() is not None
    assert world.plan() is None  # no block for 1: the third stream gives up its own, in two steps' time
    said: dict[int, list[int]] = {number: [] for number in asked}
    outputs = world.retire()  # the second ends: three blocks are free
    assert world.plan() is not None
    assert list(world.scheduler.running) == [1]
    world.check_books()
    for output in outputs + world.drain():
        said[output.stream] += output.tokens
    assert said == {number: unbroken(each, 24) for number, each in asked.items()}


def test_running_streams_keep_their_pace_beside_any_prompt() -> None:
    """Every step has a token for each stream past its prompt, and no step has more positions than allowed."""
    world = World(64, step_tokens_max=6, concurrency=3)
    world.scheduler.submit(1, request([1, 2], 30, ignore_eos=True))
    world.step()
    for number, length in ((2, 40), (3, 50)):
        world.scheduler.submit(number, request([number + at % 9 for at in range(length)], 9, ignore_eos=True))
    for _ in range(20):
        plan = world.plan()
        assert plan is not None
        assert plan.token_count <= 6
        assert plan.segments[0].stream == 1
        assert world.retire()[0].stream == 1


def test_no_step_may_be_filled_by_decodes_alone() -> None:
    """Settings under which prompts could wait for ever are refused."""
    with pytest.raises(ValueError, match="step_tokens_max"):
        SchedulerSettings(10, frozenset(), 10, concurrency=8, step_tokens_max=8)
    with pytest.raises(ValueError, match="concurrency"):
        SchedulerSettings(10, frozenset(), 10, concurrency=0)


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """A short prompt behind a long one that has no room waits with it."""
    world = World(8)
    world.scheduler.submit(1, request([1] * 16, 8, ignore_eos=True))
    world.step()
    world.scheduler.submit(2, request([2] * 16, 2))
    world.scheduler.submit(3, request([3], 2))
    world.step()
    assert list(world.scheduler.running) == [1]
    assert [stream.number for stream in world.scheduler.waiting] == [2, 3]


def test_two_equal_prompts_side_by_side_fit_in_the_end() -> None:
    """Each computes its own blocks, the second's stay unpublished; alone it finds the first's, and has room."""
    world = World(6)
    asked = request([1, 2, 3, 4, 5], 18, ignore_eos=True)
    world.scheduler.submit(1, asked)
    world.scheduler.submit(2, asked)
    said: dict[int, list[int]] = {1: [], 2: []}
    for output in world.drain():
        said[output.stream] += output.tokens
    assert said[1] == said[2] == unbroken(asked, 24)


def test_logprobs_go_with_their_token() -> None:
    """What the step tells of a stream's token is in that stream's output, and in no other's."""
    world = World()
    for number in (1, 2):
        world.scheduler.submit(number, request([number, 5]))
    plan = world.scheduler.plan()
    assert plan is not None
    told = TokenLogprobs(-0.5, [(3, -0.5)])
    outputs = world.scheduler.retire(plan, {1: 3, 2: 4}, {1: told})
    assert [(output.tokens, output.logprobs) for output in outputs] == [([3], [told]), ([4], None)]


def test_clear_gives_everything_back() -> None:
    """With steps in flight, streams waiting and streams cancelled: no block stays held, and all streams are named."""
    world = World(8, lookahead=1, concurrency=2)
    for number in range(4):
        world.scheduler.submit(number, request([number] * 9))
    world.plan()
    world.scheduler.cancel(0)
    world.plan()
    assert world.scheduler.clear() == [1, 2, 3]
    assert world.blocks.used == 0
    assert world.pool.free_count + world.pool.cached_count == 8
    assert world.scheduler.plan() is None


def test_steps_retire_in_order() -> None:
    """A step out of order, or one step too many ahead, is the caller's bug and is said so."""
    world = World(lookahead=1)
    world.scheduler.submit(1, request([1] * 9, ignore_eos=True))
    world.scheduler.plan()
    second = world.scheduler.plan()
    assert second is not None
    with pytest.raises(AssertionError, match="in the order"):
        world.scheduler.retire(second, {1: 1})
    with pytest.raises(AssertionError, match="retire a step first"):
        world.scheduler.plan()


def test_private_blocks_serve_a_canary() -> None:
    """Without a pool: a short stream runs in blocks that lie behind it, and gives them back."""
    blocks = PrivateBlocks(range(100, 104), 4)
    scheduler = Scheduler(SchedulerSettings(VOCABULARY, frozenset(), 64, concurrency=2, step_tokens_max=8), blocks)
    scheduler.submit(0, request([1] * 6, 9))
    scheduler.submit(1, request([2] * 6, 9))
    seen: set[int] = set()
    ends = []
    while (plan := scheduler.plan()) is not None:
        seen.update(block for segment in plan.segments for block in segment.blocks)
        outputs = scheduler.retire(plan, {segment.stream: 7 for segment in plan.drawing})
        ends += [output.finish for output in outputs if output.finish]
    assert seen == {100, 101, 102, 103}
    assert ends == ["length", "length"]
    assert scheduler.preemptions > 0
    scheduler.submit(2, request([1] * 15, 1))
    assert scheduler.plan() is not None
