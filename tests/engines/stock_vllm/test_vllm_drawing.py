"""Draws inside vLLM, without vLLM: its largest value is the torch engine's token, whoever is where in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.sequences import PagedStream, Segment
from holdfast.engines.sampling import token_hashes
from holdfast.engines.torch.sampling import draw, rows_for
from holdfast.engines.vllm.drawing import Asked, Drawing, Row

VOCABULARY = 211
CPU = torch.device("cpu")
EOS = 2
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"presence_penalty": 1.1, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.4, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -9.0}},
    {"min_tokens": 6, "logit_bias": {EOS: 8.0, 11: 3.0}},
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def logits_of(tokens: list[int]) -> torch.Tensor:
    """A model: what comes next is a function of the text."""
    generator = torch.Generator().manual_seed(sum(token * (place + 1) for place, token in enumerate(tokens)))
    return torch.randn(VOCABULARY, generator=generator) * 2


def sampling(which: int, seed: int) -> Sampling:
    return Sampling(99, seed, **SETTINGS[which])


def right(tokens: list[int], prompt_len: int, asked: Sampling) -> int:
    """The torch engine's token."""
    stream = PagedStream(1, GenerateRequest("r", tokens, prompt_len, asked), 10_000, frozenset({EOS}))
    rows = rows_for([Segment(stream, tokens, 0, [], True)], token_hashes(VOCABULARY))
    return int(draw(logits_of(tokens).unsqueeze(0), rows).tokens[0])


class Stood:
    """A stream in a batch; `made` is the list that a runner appends to."""

    def __init__(self, which: int, seed: int, prompt: list[int], emitted: list[int]) -> None:
        self.asked, self.prompt, self.emitted = sampling(which, seed), prompt, emitted
        self.made: list[int] = []
        self.row = self.fresh()

    def fresh(self) -> Row:
        """As it is handed over when it enters a batch."""
        asked = Asked(self.asked, len(self.prompt), frozenset({EOS}))
        self.row = Row(asked, [*self.prompt, *self.emitted], self.made)
        return self.row

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.emitted, *self.made]


def step(drawing: Drawing, batch: list[Stood | None], chunks: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """One forward pass; None is a row that is nobody's here. Those in `chunks` are not through their prompt."""
    logits = torch.stack([logits_of(stood.text if stood else [1, 2, 3]) for stood in batch])
    plain = logits.clone()
    tokens = drawing.apply(logits).max(-1).indices.tolist()
    for place, (stood, token) in enumerate(zip(batch, tokens, strict=True)):
        if stood is None:
            assert torch.equal(logits[place], plain[place]), "a row that takes the likeliest is left as it is"
        elif place not in chunks:
            assert token == right(stood.text, len(stood.prompt), stood.asked)
            stood.made.append(token)


@pytest.mark.parametrize("which", range(len(SETTINGS)))
def test_a_resumed_row_draws_as_the_unbroken_one(which: int) -> None:
    """Wherever it is taken up again: the same tokens to the end."""
    whole = Stood(which, 11, [5, 9, 7], [])
    drawing = Drawing(CPU)
    drawing.arrange({0: whole.row})
    for _ in range(24):
        step(drawing, [whole])
    for at in range(1, 24):
        again = Stood(which, 11, [5, 9, 7], whole.made[:at])
        other = Drawing(CPU)
        other.arrange({0: again.row})
        for _ in range(24 - at):
            step(other, [again])
        assert [*again.emitted, *again.made] == whole.made


@given(st.data())
def test_rows_come_go_and_move(data: st.DataObject) -> None:
    """Streams with any settings enter, leave, are preempted and change places, beside rows that are nobody's, and some
    are not through their prompts: each draws what it draws alone."""
    drawing, batch = Drawing(CPU), list[Stood | None]()
    for turn in range(data.draw(st.integers(2, 8))):
        for _ in range(data.draw(st.integers(0, 2))):
            which, seed = data.draw(st.integers(-1, len(SETTINGS) - 1)), data.draw(st.integers(0, 3))
            emitted = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
            batch.append(Stood(which, seed, [turn + 1, 4], emitted) if which >= 0 else None)
        if batch and data.draw(st.booleans()):
            batch.pop(data.draw(st.integers(0, len(batch) - 1)))
        batch = data.draw(st.permutations(batch))
        for stood in batch:
            if stood is not None and data.draw(st.booleans()):
                stood.made = list(stood.made)  # it was preempted, and is handed over anew
                stood.fresh()
        drawing.arrange({place: stood.row for place, stood in enumerate(batch) if stood is not None})
        for _ in range(data.draw(st.integers(1, 3)) if batch else 0):
            step(drawing, batch, data.draw(st.sets(st.integers(0, len(batch) - 1), max_size=2)))


def test_a_placeholder_is_not_counted() -> None:
    """The newest token may be unknown when the batch is arranged, and is known when it is drawn with."""
    stood, beside = Stood(3, 5, [3, 1], []), Stood(4, 6, [8], [])
    drawing = Drawing(CPU)
    drawing.arrange({0: stood.row})
    for _ in range(4):
        step(drawing, [stood])
    known, stood.made[-1] = stood.made[-1], -1
    drawing.arrange({0: stood.row, 1: beside.row})
    stood.made[-1] = known
    for _ in range(4):
        step(drawing, [stood, beside])


def test_draws_follow_the_softmax() -> None:
    """Over 4,000 seeds, the first token is drawn as often as it is likely: chi-square, of 20 tokens, below its 1 in
    100,000."""
    count, size = 4000, 20
    logits = torch.linspace(-1.5, 1.5, size)
    drawing = Drawing(CPU)
    rows = {seed: Row(Asked(Sampling(9, seed, temperature=0.8), 1, frozenset()), [1], []) for seed in range(count)}
    drawing.arrange(rows)
    tokens = drawing.apply(logits.repeat(count, 1)).max(-1).indices
    expected = (logits / 0.8).softmax(-1) * count
    seen = torch.bincount(tokens, minlength=size)
    assert float(((seen - expected) ** 2 / expected).sum()) < 59.0  # of 19 degrees of freedom
