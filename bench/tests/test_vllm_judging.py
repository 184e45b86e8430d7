"""Tests how the proof of vLLM tells an engine's stall from a busy machine's."""

from __future__ import annotations

from bench.vllm.chain import order, stalls
from bench.vllm.load import KINDS, VllmLoad
from holdfast.testing.answers import Answer


def test_a_stall_is_what_a_calm_moment_does_not_have() -> None:
    """A gap over the end, or begun soon after it, is the end's; one begun long after it is calm, and is taken off."""
    right = [Answer(token_times_s=[0.0, 0.25])]
    broken = [Answer(token_times_s=[9.5, 12.0, 12.5]), Answer(token_times_s=[20.0, 20.5])]
    assert stalls([10.0], broken, right) == (0.5, [2.0])
    assert stalls([10.0, 19.0], broken, right) == (0.25, [2.25, 0.25])


def test_every_kind_is_asked_and_greedy_ones_are_compared() -> None:
    """All kinds of sampling, chats and raw, long and short, two that begin alike; only what is not drawn can be
    compared with stock vLLM."""
    load = VllmLoad("m")
    asked = [load.body(number) for number in range(load.streams)]
    assert {body["temperature"] for _, body in asked} == {kind["temperature"] for kind in KINDS}
    assert len({path for path, _ in asked}) == 2
    prompts = [body["prompt"] for _, body in asked if "prompt" in body]
    assert prompts[0][:64] == load.ids(6)[:64] != load.ids(1)[:64]
    assert max(map(len, prompts)) > 10 * min(map(len, prompts))
    assert load.comparable()
    assert all(asked[number][1]["temperature"] == 0 for number in load.comparable())


def test_ends_are_as_many_as_told() -> None:
    """In an order of the seed's own."""
    assert sorted(order(2, 1, 1, 3)) == ["SIGSTOP", "SIGTERM", "kill -9", "kill -9"]
    assert order(5, 5, 5, 3) == order(5, 5, 5, 3) != order(5, 5, 5, 4)
