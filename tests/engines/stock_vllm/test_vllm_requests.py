"""Requests in vLLM's words and its answers in ours, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, SEED_MAX, GenerateRequest, Output, Sampling, TokenLogprobs
from holdfast.core.tiers import Tier
from holdfast.engines.paged.scheduler import SchedulerSettings
from holdfast.engines.vllm import requests
from holdfast.engines.vllm.drawing import Asked
from holdfast.engines.vllm.requests import ASKED, OpenRequests, priority_of, sampling_fields, stops_of

EOS = 2
SETTINGS = SchedulerSettings(100, frozenset({EOS}), context_tokens_max=64, concurrency=2, queue=1)


@dataclass(frozen=True)
class Room:
    count: int = 8
    block_tokens: int = 16


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(name: str, number: int, request: GenerateRequest, settings: SchedulerSettings, **given: Any) -> Any:
        return SimpleNamespace(request_id=name, number=number, **given)

    monkeypatch.setattr(requests, "engine_request", plain)


def ask(tokens: list[int], max_tokens: int = 10, prompt_len: int = 0, **given: Any) -> GenerateRequest:
    outer = {key: given.pop(key) for key in ("stop_token_ids", "tier") if key in given}
    sampling = Sampling(max_tokens, given.pop("seed", 7), **given)
    return GenerateRequest("r", tokens, prompt_len or len(tokens), sampling, **outer)


def fields(request: GenerateRequest, *, native: bool, end: int = 40) -> dict[str, Any]:
    return sampling_fields(request, stops_of(request, SETTINGS), SETTINGS.vocabulary, end=end, native=native)


def said(name: str, tokens: list[int], **given: Any) -> Any:
    nothing = {"new_logprobs": None, "prefill_stats": None, "finish_reason": None}
    return SimpleNamespace(request_id=name, new_token_ids=tokens, **nothing | given)


def orders(native: bool = False, room: Room | None = None) -> OpenRequests:
    return OpenRequests(SETTINGS, room or Room(), native=native)


def test_the_likeliest_token_is_vllms_own_business() -> None:
    """A plain greedy request carries nothing for our draws; one with anything else does, and vLLM draws nothing."""
    assert fields(ask([1, 2], temperature=0.0), native=False)["extra_args"] is None
    for given in ({}, {"temperature": 0.0, "min_tokens": 3}, {"temperature": 0.0, "presence_penalty": 0.5}):
        request = ask([1, 2], **given)
        made = fields(request, native=False)
        assert made["extra_args"] == {ASKED: Asked(request.sampling, 2, frozenset({EOS}))}
        assert made["temperature"] == 0.0
        assert "seed" not in made


def test_lengths_count_from_where_vllm_counts() -> None:
    """Of a text of 5 with a prompt of 3 that ends at 40: 35 are left, and natively 37 count from the prompt's end."""
    resumed = ask([1, 2, 3, 4, 5], 50, prompt_len=3, min_tokens=90)
    assert fields(resumed, native=False)["max_tokens"] == 35
    native = fields(resumed, native=True)
    assert (native["max_tokens"], native["min_tokens"]) == (37, 37)


def test_a_seed_is_always_sent() -> None:
    """0 is a seed like any other, natively, and what vLLM would take for no seed is refused with the others."""
    assert fields(ask([1], seed=0), native=True)["seed"] == 0
    for seed in (-1, SEED_MAX + 1):
        with pytest.raises(HoldfastError, match="seed"):
            orders().take(1, ask([1], seed=seed))


def test_stops_are_the_models_and_the_requests() -> None:
    """Ids outside the vocabulary are left out; a request may ignore the model's own."""
    assert fields(ask([1], stop_token_ids=[9, 5, 100, -1]), native=False)["stop_token_ids"] == [EOS, 5, 9]
    assert fields(ask([1], stop_token_ids=[9], ignore_eos=True), native=True)["stop_token_ids"] == [9]
    beyond = replace(SETTINGS, eos_token_ids=frozenset({EOS, 100, -1}))
    assert stops_of(ask([1], stop_token_ids=[9]), beyond) == {EOS, 9}


def test_what_does_not_fit_natively_is_refused() -> None:
    """More than the second runner has room for would end its engine."""
    many = dict.fromkeys(range(1025), 1.0)
    with pytest.raises(HoldfastError, match="logit_bias"):
        fields(ask([1], logit_bias=many), native=True)
    with pytest.raises(HoldfastError, match="stop_token_ids"):
        sampling_fields(ask([1], min_tokens=1), frozenset(range(129)), 200, end=40, native=True)
    assert len(fields(ask([1], logit_bias=many), native=False)["extra_args"][ASKED].sampling.logit_bias) == 1025


def test_turns() -> None:
    """A canary first, then who has shown something, then tiers, of which the lowest has its turn too."""
    late_canary = priority_of(ask([1], tier=CANARY_TIER), 9000)
    shown = priority_of(ask([1, 2], prompt_len=1, tier=Tier.BEST_EFFORT), 8000)
    early = priority_of(ask([1], tier=Tier.BEST_EFFORT), 1)
    premium = priority_of(ask([1], tier=Tier.PREMIUM), 2)
    later = priority_of(ask([1], tier=Tier.PREMIUM), 2000)
    assert late_canary < shown < premium < early < later


def test_what_cannot_be_is_refused_and_leaves_no_trace() -> None:
    """As every engine does, by the field's name."""
    book = orders()
    for request, word in (
        (ask([]), "tokens"),
        (ask([100]), "tokens"),
        (ask([-1]), "tokens"),
        (ask([1] * 65), "tokens"),
        (ask([1, 2], prompt_len=3), "prompt_len"),
        (ask([1], logit_bias={100: 1.0}), "logit_bias"),
        (ask([1], repetition_penalty=0.0), "repetition_penalty"),
    ):
        with pytest.raises(HoldfastError, match=word) as caught:
            book.take(1, request)
        assert caught.value.code == Code.INVALID_REQUEST
    assert len(book) == 0


def test_nothing_left_to_make_ends_at_once() -> None:
    """No tokens wanted, all of them there, or no room: a last output that vLLM never hears of."""
    book = orders(room=Room(count=1))
    assert book.take(1, ask([5, 6], 0)) is None
    assert book.take(2, ask([5, 6, 7], 1, prompt_len=2)) is None
    assert book.take(3, ask([5] * 16, 9, prompt_len=4)) is None
    assert book.take_early() == [Output(number, [], "length") for number in (1, 2, 3)]
    assert book.take_early() == []
    assert book.take(4, ask([5] * 15, 20, prompt_len=4)).end == 16
    assert book.take(5, ask([5, 6], 0)) is None
    assert sorted(book.clear()) == [4, 5]  # nobody has heard of its end, either
    assert book.take_early() == []


def test_places() -> None:
    """Concurrency and queue, one canary beside them, and a number once."""
    book = orders()
    for number in (1, 2, 3):
        book.take(number, ask([1]))
    book.take(9, ask([1], tier=CANARY_TIER))
    for number, tier in ((4, Tier.PREMIUM), (8, CANARY_TIER)):
        with pytest.raises(HoldfastError) as caught:
            book.take(number, ask([1], tier=tier))
        assert caught.value.code == Code.WORKER_OVERLOADED
    book.cancel(9)
    book.take(8, ask([1], tier=CANARY_TIER))
    with pytest.raises(HoldfastError, match="stream 1"):
        book.take(1, ask([1]))
    assert book.clear() == [1, 2, 3, 8]


def test_a_cancelled_streams_tokens_are_nobodys() -> None:
    """Neither while it is gone nor when its number is used again, by a later book too: what is in flight has the old
    name."""
    book = orders()
    old = book.take(1, ask([1])).request_id
    assert book.cancel(1) == old
    assert book.cancel(1) is None
    new = book.take(1, ask([1])).request_id
    assert new != old
    assert book.translate([said(old, [4]), said(new, [5])]) == [Output(1, [5])]
    later = orders()
    assert later.take(1, ask([1])).request_id not in (old, new)
    assert later.translate([said(new, [6])]) == []


def test_a_last_output_is_the_last() -> None:
    """Ends by name; any that is not an end of ours is a failure, which another engine may mend."""
    book = orders()
    names = [book.take(number, ask([1])).request_id for number in (1, 2)]
    ends = [said(names[0], [2], finish_reason="stop"), said(names[1], [3], finish_reason="length")]
    assert [output.finish for output in book.translate(ends)] == ["stop", "length"]
    assert book.translate(ends) == []
    for reason, code in (("abort", Code.STREAM_INCOMPLETE), ("error", Code.STREAM_INCOMPLETE), ("odd", Code.INTERNAL)):
        (output,) = book.translate([said(book.take(3, ask([1])).request_id, [], finish_reason=reason)])
        assert output.failure is not None
        assert (output.finish, output.failure.code) == (None, code)
        assert reason in output.failure.message
    assert len(book) == 0


def test_logprobs_and_what_was_found() -> None:
    """The chosen one's, then as many as this stream asked for, best first, whatever its neighbours asked for."""
    lists = SimpleNamespace(
        logprob_token_ids=np.array([[9, 4, 9, 1]]), logprobs=np.array([[-1.5, -0.5, -1.5, -2.0]], dtype=np.float32)
    )
    stats = SimpleNamespace(num_cached_tokens=32)
    for top, listed in ((0, []), (2, [(4, -0.5), (9, -1.5)])):
        book = orders()
        name = book.take(1, ask([1], top_logprobs=top)).request_id
        (output,) = book.translate([said(name, [9], new_logprobs=lists, prefill_stats=stats)])
        assert output == Output(1, [9], logprobs=[TokenLogprobs(-1.5, listed)], cached=32)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=Output) == output
