"""The scheduler's rules one by one: who is taken, who is refused, who goes first, and what is asked of its caller."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from holdfast.core.requests import CANARY_TIER
from holdfast.core.tiers import Tier
from holdfast.engines.paged.scheduler import PASSED_MAX, SchedulerSettings
from holdfast.kv.geometry import block_keys
from tests.rigs.engines.paged_scheduler import SIZE, World, next_token, request, unbroken


def test_the_first_output_tells_how_much_of_the_prompt_was_cached() -> None:
    """A prompt that was computed before is found up to its last whole block; only the first output says so."""
    world = World()
    for number, cached in ((1, 0), (2, 2 * SIZE)):
        world.scheduler.submit(number, request(range(1, 2 * SIZE + 2), 3, ignore_eos=True))
        assert [output.cached for output in world.drain()] == [cached, 0, 0]


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
    """It came before them; and it has begun, so it is not withdrawn as those that never ran are."""
    world = World(5, concurrency=2)
    for number in (1, 2, 3, 4):
        world.scheduler.submit(number, request([number] * 7, 6, ignore_eos=True))
    while not world.scheduler.preemptions:
        world.step()
    assert [stream.number for stream in world.scheduler.waiting] == [2, 3, 4]
    assert [world.scheduler.cancel(number, unbegun=True) for number in (1, 2, 4, 77)] == [False, False, True, False]
    assert [output.stream for output in world.drain() if output.finish] == [1, 2, 3]


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


def test_who_waits_goes_by_tier_and_then_by_time() -> None:
    """Streams that somebody reads already go before those of any tier of which nobody has seen anything."""
    world = World(16, concurrency=1, queue=8)
    tiers = [Tier.STANDARD, Tier.BEST_EFFORT, Tier.STANDARD, Tier.PREMIUM, Tier.BEST_EFFORT, Tier.PREMIUM]
    for number, tier in enumerate(tiers):
        world.scheduler.submit(number, msgspec.structs.replace(request([1, 2], 2, ignore_eos=True), tier=tier))
        world.plan() if number == 0 else None
    shown = msgspec.structs.replace(request([1, 2, 3], 4, 2, ignore_eos=True), tier=Tier.BEST_EFFORT)
    world.scheduler.submit(9, shown)
    assert [stream.number for stream in world.scheduler.waiting] == [9, 3, 5, 2, 1, 4]
    world.retire()
    assert [output.stream for output in world.drain() if output.finish] == [0, 9, 3, 5, 2, 1, 4]


def test_the_lowest_tier_has_its_turn_too() -> None:
    """Where premium requests never end, one of best effort lets so many pass for each tier above it, and no more."""
    world = World(16, concurrency=1, queue=8)
    asked = request([1, 2], 1, ignore_eos=True)
    world.scheduler.submit(0, msgspec.structs.replace(asked, tier=Tier.PREMIUM))
    world.scheduler.submit(1, msgspec.structs.replace(asked, tier=Tier.BEST_EFFORT))
    passed = 0
    for number in itertools.count(2):
        world.scheduler.submit(number, msgspec.structs.replace(asked, tier=Tier.PREMIUM))
        if 1 in [output.stream for output in world.step()]:
            break
        passed += 1
    assert passed == 2 * PASSED_MAX


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


def test_a_canary_that_finds_no_room_lets_those_pass_that_come_back() -> None:
    """After a takeover what is left of the pool is spared for them, so that they may find room where a canary does not:
    it waits, and they do not wait for it; who has shown nothing stays behind it."""
    world = World(10)
    asked = {number: request([number] * 7, 20, ignore_eos=True) for number in (1, 2, 3)}
    texts = {number: list(each.tokens) for number, each in asked.items()}
    for number, each in asked.items():
        world.scheduler.submit(number, each)
    for _ in range(8):
        for output in world.step():
            texts[output.stream] += output.tokens
    world.die_and_adopt()
    world.scheduler.submit(1, msgspec.structs.replace(asked[1], tokens=texts[1]))
    world.step()
    world.scheduler.submit(9, msgspec.structs.replace(request(range(1, 6), 4, ignore_eos=True), tier=CANARY_TIER))
    world.scheduler.submit(8, request([8], 2))
    world.scheduler.submit(2, msgspec.structs.replace(asked[2], tokens=texts[2]))
    world.step()
    assert list(world.scheduler.running) == [1, 2]
    assert [stream.number for stream in world.scheduler.waiting] == [9, 8]
    assert {output.stream for output in world.drain() if output.finish} == {1, 2, 8, 9}
