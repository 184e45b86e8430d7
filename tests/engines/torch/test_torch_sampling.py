"""Tokens from logits: each setting does what it says, draws follow the softmax, and rows do not see each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.sequences import PagedStream, Segment
from holdfast.engines.sampling import token_hashes, truncation
from holdfast.engines.torch.sampling import SamplingRows, draw, logprobs_by_stream, rows_for

EOS = 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def segment(number: int = 0, tokens: list[int] | None = None, prompt_len: int = 0, **given: Any) -> Segment:
    text = tokens or [1, 5, 1]
    stops = given.pop("stops", [])
    sampling = Sampling(given.pop("max_tokens", 99), given.pop("seed", number), **given)
    asked = GenerateRequest("r", text, prompt_len or len(text), sampling, stops)
    stream = PagedStream(number, asked, 10_000, frozenset({EOS}))
    return Segment(stream, text, 0, [], True)


def rows(vocabulary: int, *segments: Segment) -> SamplingRows:
    return rows_for(segments, token_hashes(vocabulary))


def kept(logits: list[float], **given: Any) -> list[int]:
    """Ids that may be drawn."""
    part = torch.tensor([logits])
    made = truncation([Sampling(9, 0, **given)], len(logits), CPU)
    if made is not None:
        made.apply_(part)
    return [token for token, logit in enumerate(part[0].tolist()) if logit > -math.inf]


def logs(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),  # the token that crosses the line stays
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        ({"top_p": 0.0}, [1]),  # at least one
        ({"min_p": 0.4}, [0, 1, 3]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 2.0}, [1]),
        ({"top_k": 2, "top_p": 0.56}, [1]),  # of what top_k left: 0.4 of 0.7 is 0.571
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"min_p": 0.6, "top_p": 0.56}, [1]),
        ({"min_p": 0.4, "top_k": 3, "top_p": 0.99}, [0, 1, 3]),
    ],
)
def test_what_may_be_drawn(given: dict[str, Any], ids: list[int]) -> None:
    """min_p, then top_k, then top_p over what those left."""
    assert kept(logs(0.2, 0.4, 0.1, 0.3), **given) == ids


def test_ties_on_the_line_are_kept() -> None:
    """Equally likely tokens are treated alike, wherever they stand."""
    shares = logs(0.2, 0.2, 0.2, 0.2, 0.2)
    assert kept(shares, top_k=2) == [0, 1, 2, 3, 4]
    assert kept(shares, top_p=0.3) == [0, 1, 2, 3, 4]
    assert kept(logs(0.5, 0.25, 0.25), top_p=0.6) == [0, 1, 2]


@pytest.mark.parametrize("spread", [0.5, 8.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
def test_the_short_way_masks_what_the_long_way_does(top_p: float, spread: float) -> None:
    """Looking at the likeliest few first gives exactly the mask of a full sort, flat or peaked, beside any others."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 5003, generator=generator) * spread
    settings = [
        Sampling(9, 0, top_p=top_p),
        Sampling(9, 0, top_p=top_p, top_k=3000),
        Sampling(9, 0, top_k=50),
        Sampling(9, 0, min_p=0.05),
        Sampling(9, 0, top_p=top_p, min_p=0.001, top_k=40),
    ]
    together = truncation(settings, 5003, CPU)
    assert together is not None
    got = logits.clone()
    together.apply_(got)
    for row, each in enumerate(settings):
        assert torch.equal(got[row], by_sorting(logits[row], each))
        alone = truncation([each], 5003, CPU)
        assert alone is not None
        single = logits[row : row + 1].clone()
        alone.apply_(single)
        assert torch.equal(single[0], got[row])


def by_sorting(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The rules, the plain way, in double precision."""
    values = logits.clone()
    if sampling.min_p > 0:
        values[values < values.max() + math.log(sampling.min_p)] = -math.inf
    ranked = values.sort(descending=True).values
    if sampling.top_k:
        values[values < ranked[sampling.top_k - 1]] = -math.inf
    if sampling.top_p < 1:
        ranked = values.sort(descending=True).values
        mass = ranked.double().softmax(0)
        crossed = int((mass.cumsum(0) - mass < sampling.top_p).sum())
        values[values < ranked[crossed - 1]] = -math.inf
    return values


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 10,000 draws of each kind over seeds and positions: two temperatures, truncated, beside greedy."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -30.0, 1.0])
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 4}
    ]  # fmt: skip
    made = rows(8, *(segment(row, **kinds[row % 4]) for row in range(400)))
    counts = torch.zeros(4, 8)
    for _ in range(100):
        tokens = draw(logits.repeat(400, 1), made).tokens
        for kind in range(4):
            counts[kind] += tokens[kind::4].bincount(minlength=8)
        made.advance(tokens)
    four = logits.clone()
    four[four < 1.0] = -math.inf
    for kind, expected in ((0, logits.softmax(0)), (1, (logits / 0.5).softmax(0)), (3, (four / 2.0).softmax(0))):
        mass = expected * 10_000
        seen = mass > 1
        assert counts[kind][~seen].sum() <= 5
        chi = ((counts[kind] - mass)[seen] ** 2 / mass[seen]).sum().item()
        assert chi < 24.3, f"kind {kind}: {counts[kind].tolist()}"  # 7 degrees of freedom, p = 0.001
    assert counts[2].tolist() == [10_000, 0, 0, 0, 0, 0, 0, 0]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "top_logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 0.7, "top_logprobs": 0},
    {"temperature": 1.0, "logit_bias": {4: 3.0, 5: -100.0}},
    {"temperature": 1.0, "min_tokens": 50, "stops": [9, 10]},
]


def test_rows_do_not_see_each_other() -> None:
    """A row's token and logprobs are the same bits alone, in any order, and in a larger batch, step after step."""
    vocabulary = 2051
    generator = torch.Generator().manual_seed(2)
    all_logits = torch.randn(6, len(MIXED), vocabulary, generator=generator) * 3
    together = rows(vocabulary, *(segment(row, **given) for row, given in enumerate(MIXED)))
    backwards = rows(vocabulary, *(segment(row, **given) for row, given in reversed(list(enumerate(MIXED)))))
    single = [rows(vocabulary, segment(row, **given)) for row, given in enumerate(MIXED)]
    for logits in all_logits:
        before = logits.clone()
        drawn, other = draw(logits, together), draw(logits.flip(0), backwards)
        assert torch.equal(logits, before)
        assert torch.equal(drawn.tokens, other.tokens.flip(0))
        told = logprobs_by_stream(drawn, together)
        for row, alone in enumerate(single):
            one = draw(logits[row : row + 1], alone)
            assert one.tokens.tolist() == drawn.tokens[row : row + 1].tolist()
            assert logprobs_by_stream(one, alone).get(row) == told.get(row)
            alone.advance(one.tokens)
        together.advance(drawn.tokens)
        backwards.advance(other.tokens)


def test_a_resumed_stream_draws_what_the_unbroken_one_would() -> None:
    """Made anew from prompt and answer at any point, rows go on with the same tokens: penalties and positions included,
    for streams that join and leave too."""
    vocabulary = 64
    words = token_hashes(vocabulary)
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(len(MIXED), vocabulary, generator=generator) * 2
    segments = [segment(row, **given) for row, given in enumerate(MIXED)]
    made = rows_for(segments, words)
    texts = [list(each.tokens) for each in segments]
    for step in range(30):
        tokens = draw(base, made).tokens
        made.advance(tokens)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        if step % 7 == 3:  # a batch of other streams, resumed from their text
            again = rows_for([segment(row, texts[row], 3, **MIXED[row]) for row in range(len(MIXED))], words)
            assert torch.equal(draw(base, again).tokens, draw(base, made).tokens)
        if step % 5 == 2:  # the same streams, one of them away: what was counted on the device is carried over
            some = [5, 1, 6]
            later = [Segment(segments[row].owner, [-1], len(texts[row]) - 1, [], True) for row in some]
            got = draw(base[some], rows_for(later, words, made)).tokens
            assert got.tolist() == draw(base, made).tokens[some].tolist()


def test_the_same_streams_use_the_same_rows() -> None:
    """Between steps of the same streams nothing is built."""
    words = token_hashes(32)
    first, second = segment(0), segment(1)
    made = rows_for([first, second], words)
    made.advance(torch.tensor([4, 4]))
    later = [Segment(each.owner, [4], 3, [], True) for each in (first, second)]
    assert rows_for(later, words, made) is made
    assert rows_for([second, first], words, made) is not made


def test_penalties_by_hand() -> None:
    """Repetition is over prompt and answer; frequency and presence over the answer alone."""
    given = {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    made = rows(6, segment(0, [1, 2, 3, 3], 2, **given))
    logits = torch.tensor([[1.0, 4.0, -1.0, 4.0, 0.0, -9.0]])
    assert made.penalties is not None
    shaped = logits.clone()
    made.penalties.apply_(shaped)
    assert shaped[0].tolist() == [1.0, 2.0, -2.0, 2.0 - 1.0 - 0.25, 0.0, -9.0]
    made.advance(torch.tensor([4]))
    shaped = logits.clone()
    made.penalties.apply_(shaped)
    assert shaped[0].tolist() == [1.0, 2.0, -2.0, 0.75, -0.75, -9.0]


def test_bias_and_bans() -> None:
    """A bias moves one token; a stop token cannot come before min_tokens were made, and can right after."""
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 7] = 9.0, 5.0
    made = rows(8, segment(0, temperature=0.0, min_tokens=2, stops=[7, 100], logit_bias={7: 1.0, 3: 0.5}))
    tokens = []
    for _ in range(3):
        tokens.append(draw(logits, made).tokens)
        made.advance(tokens[-1])
    assert [int(token) for token in tokens] == [3, 3, EOS]
    ignoring = rows(8, segment(0, temperature=0.0, min_tokens=2, ignore_eos=True))
    assert int(draw(logits, ignoring).tokens) == EOS


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature; the chosen token's, and as many alternatives as asked, best first."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [0.0, 2.0, 1.0, -1.0], [0.0, 2.0, 1.0, -1.0]])
    made = rows(
        4,
        segment(0, temperature=0.0, logit_bias={3: 50.0}, top_logprobs=2),
        segment(1, temperature=5.0),
        segment(2, temperature=0.0, top_logprobs=0),
    )
    told = logprobs_by_stream(draw(logits, made), made)
    expected = logits[0].log_softmax(0).tolist()
    assert set(told) == {0, 2}
    assert told[0].logprob == pytest.approx(expected[3])
    assert [token for token, _ in told[0].top] == [1, 2]
    assert [value for _, value in told[0].top] == pytest.approx([expected[1], expected[2]])
    assert told[2].logprob == pytest.approx(expected[1])
    assert told[2].top == []


def test_rows_of_a_graph_draw_alike() -> None:
    """Which rows are greedy may be told by a mask in place of places: the tokens are the same."""
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(4))
    made = rows(512, *(segment(row, temperature=each) for row, each in enumerate([0.8, 0.0, 1.0])))
    masked = replace(made, greedy=None, random=None, likeliest=torch.tensor([[False], [True], [False]]))
    assert draw(logits, masked).tokens.tolist() == draw(logits, made).tokens.tolist()


def test_a_step_taken_elsewhere_is_noticed() -> None:
    """Rows of the same streams are used again only if nobody drew for them meanwhile."""
    before = rows(512, segment(0, temperature=0.8))
    before.advance(torch.tensor([5]))
    stream = before.streams[0]
    place = before.next_positions[0]
    words = before.words
    assert rows_for([Segment(stream, [5], place, [], True)], words, before) is before
    later = rows_for([Segment(stream, [5], place + 3, [], True)], words, before)
    assert later is not before
    assert later.positions.tolist() == [place + 4]


def test_bfloat16_logits_are_taken_as_they_are() -> None:
    """A row of the device's own precision gives the token of its float32 copy."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    given = [segment(0, temperature=0.9, top_p=0.9), segment(1, temperature=0.0)]
    assert torch.equal(draw(logits, rows(300, *given)).tokens, draw(logits.float(), rows(300, *given)).tokens)


def test_nothing_waits_for_the_device() -> None:
    """On a device that has no values at all a whole step goes through: nothing looks at one, so a graph can hold it."""
    words = token_hashes(3000, "meta")
    for chosen in ([0], [1], [2], [3], [4, 5, 6], [7, 8], list(range(len(MIXED)))):
        made = rows_for([segment(row, **MIXED[row]) for row in chosen], words)
        logits = torch.empty(len(chosen), 3000, dtype=torch.bfloat16, device="meta")
        for _ in range(2):
            drawn = draw(logits, made)
            made.advance(drawn.tokens)
            assert drawn.tokens.shape == (len(chosen),)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(1, device="meta").item()
