"""The forward pass says what transformers says, for every family, however the text is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch_models import FAMILIES, Piece, computed, reference, run, table, text

from holdfast.engines.torch.model.linear import EXACT, FAST, Arithmetic
from holdfast.engines.torch.model.parameters import count

LENGTH = 45  # several blocks, the last one partly filled
# fp32 has 24 bits, and products are summed in another order for one row than for many: where logits reach 10, the
# worst difference measured on x86_64 is 1.3e-4 (llama3, token by token).
DIFFERENCE_MAX = 2e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def theirs(family: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(family)[0](torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("cuts", "arithmetic"),
    [((), FAST), ((7, 13, 1, 16), FAST), ((1,) * (LENGTH - 1), FAST), ((20,), EXACT)],
    ids=["whole", "chunks", "token by token", "exact"],
)
def test_logits_agree_with_transformers(family: str, cuts: tuple[int, ...], arithmetic: Arithmetic) -> None:
    """Every computed position's logits are transformers' up to the order of sums in fp32."""
    tokens = text(LENGTH)
    expected = theirs(family, tokens)
    assert expected.abs().max() > 1, "logits near zero would agree with anything"
    for position, found in computed(run(family, arithmetic), tokens, cuts).items():
        assert found.dtype is torch.float32
        assert (found - expected[position]).abs().max() <= DIFFERENCE_MAX, position


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("lengths", [(30, 33, 31), (40, 3, 17), (9, 9, 9, 9, 9)], ids=["even", "uneven", "five"])
def test_a_mixed_batch_keeps_texts_apart(family: str, lengths: tuple[int, ...]) -> None:
    """Decodes (padded or alone) and a chunk in one step each get their own text's logits, in the order given."""
    target = run(family)
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    for number, tokens in enumerate(texts):
        target.step([Piece(tokens[:-1], 0, table(number))])
    decodes = [Piece(tokens[-1:], len(tokens) - 1, table(number)) for number, tokens in enumerate(texts)]
    fresh = text(21, 99)
    found = target.step([*decodes, Piece(fresh, 0, table(8))])
    for row, tokens in zip(found, [*texts, fresh], strict=True):
        assert (row - theirs(family, tokens)[-1]).abs().max() <= DIFFERENCE_MAX


def test_a_step_writes_its_own_places_only() -> None:
    """A step changes the KV of its rows' positions, and not one byte of any other block or token."""
    target = run("llama2")
    target.kv.zero_()
    target.step([Piece(text(11), 0, table(0))])
    before = target.kv.clone()
    target.step([Piece([5, 6], 11, table(0)), Piece([7], 0, table(1))])
    changed = (target.kv != before).any(-1).any(-1).any(1).any(1).nonzero().tolist()
    first, other = table(0)[1], table(1)[0]
    assert sorted(changed) == sorted([[first, 3], [first, 4], [other, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_name_all_of_a_model(family: str) -> None:
    """They add up to the reference's numbers; a tied head is counted once."""
    theirs_model, config = reference(family)
    assert count(config) == sum(parameter.numel() for parameter in theirs_model.parameters())
