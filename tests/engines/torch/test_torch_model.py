"""The forward pass says what transformers says, for every family; `exact` gives the same bits however a text is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from holdfast.core.errors import UserError
from holdfast.engines.torch.model.decoder import _pieces, arithmetic_for, bind
from holdfast.engines.torch.model.linear import EXACT, FAST, AllReduce, Arithmetic, gated, linear, tree_sum
from holdfast.engines.torch.model.parameters import count
from tests.rigs.engines.torch_models import FAMILIES, Run, SharePiece, computed, reference, run, table, tensors, text

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
        target.step([SharePiece(tokens[:-1], 0, table(number))])
    decodes = [SharePiece(tokens[-1:], len(tokens) - 1, table(number)) for number, tokens in enumerate(texts)]
    fresh = text(21, 99)
    found = target.step([*decodes, SharePiece(fresh, 0, table(8))])
    for row, tokens in zip(found, [*texts, fresh], strict=True):
        assert (row - theirs(family, tokens)[-1]).abs().max() <= DIFFERENCE_MAX


def test_a_step_writes_its_own_places_only() -> None:
    """A step changes the KV of its rows' positions, and not one byte of any other block or token."""
    target = run("llama2")
    target.kv.zero_()
    target.step([SharePiece(text(11), 0, table(0))])
    before = target.kv.clone()
    target.step([SharePiece([5, 6], 11, table(0)), SharePiece([7], 0, table(1))])
    changed = (target.kv != before).any(-1).any(-1).any(1).any(1).nonzero().tolist()
    first, other = table(0)[1], table(1)[0]
    assert sorted(changed) == sorted([[first, 3], [first, 4], [other, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_name_all_of_a_model(family: str) -> None:
    """They add up to the reference's numbers; a tied head is counted once."""
    theirs_model, config = reference(family)
    assert count(config) == sum(parameter.numel() for parameter in theirs_model.parameters())


EXACT_LENGTH = 37
WAIT_S = 60  # a rank that dies must not leave the other waiting for good


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("family", "threads"), [*((family, 1) for family in FAMILIES), ("llama3", 2)])
def test_chunking_changes_no_bit(family: str, threads: int) -> None:
    """Logits of a position are bitwise equal token by token, in odd chunks and in one go."""
    torch.set_num_threads(threads)
    tokens = text(EXACT_LENGTH)
    single = computed(run(family, EXACT), tokens, (1,) * (EXACT_LENGTH - 1))
    for cuts in ((), (36,), (5, 1, 1, 17), (2, 3, 4, 5, 6), (16, 16)):
        for position, found in computed(run(family, EXACT), tokens, cuts).items():
            assert same(found, single[position]), (cuts, position)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ahead", [0, EXACT_LENGTH], ids=["short company", "company of its length"])
def test_company_changes_no_bit(family: str, ahead: int) -> None:
    """Logits of a stream are bitwise equal alone and with 1 to 8 others, whatever its place among them."""
    tokens = text(EXACT_LENGTH)
    alone = computed(run(family, EXACT), tokens, (EXACT_LENGTH - 1,))[EXACT_LENGTH - 1]
    for others, place in ((1, 0), (2, 2), (4, 1), (8, 5)):
        target = run(family, EXACT)
        target.kv.normal_(generator=torch.Generator().manual_seed(1))  # the others' past
        target.step([SharePiece(tokens[:-1], 0, table(0))])
        company = [SharePiece(text(1, seed), ahead + min(seed, ahead), table(seed)) for seed in range(1, others + 1)]
        company.insert(place, SharePiece(tokens[-1:], EXACT_LENGTH - 1, table(0)))
        company.append(SharePiece(text(13, 77), 0, table(9)))
        assert same(target.step(company)[place], alone), (others, place)


def test_resuming_on_found_blocks_changes_no_bit() -> None:
    """A text continued from another run's blocks, under other ids, goes on bitwise as the unbroken one."""
    tokens = text(EXACT_LENGTH)
    unbroken = computed(run("llama3", EXACT), tokens, (29,))[EXACT_LENGTH - 1]
    first, second = run("llama3", EXACT), run("llama3", EXACT)
    first.step([SharePiece(tokens[:24], 0, table(0))])
    second.kv[table(4)[:3]] = first.kv[table(0)[:3]]
    found = second.step([SharePiece(tokens[24:], 24, table(4))])[0]
    assert same(found, unbroken)


@pytest.mark.parametrize("threads", [1, 2])
def test_real_sizes_change_no_bit(threads: int) -> None:
    """The products of a real model's sizes, where libraries thread and block, are row by row the same, too."""
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    rows, weight = torch.randn(80, 576), torch.randn(3072, 576) * 0.05
    norm = torch.randn(576)
    everything = _mlp_like(rows, weight, norm)
    for first, end in ((0, 1), (3, 4), (2, 7), (70, 80), (11, 72)):
        assert same(_mlp_like(rows[first:end], weight, norm), everything[first:end])


def _mlp_like(rows: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    normed = torch.rms_norm(rows, (576,), norm, 1e-5)
    return gated(linear(normed, weight, None, True, (0, 1000, 3072)), True, 1)


class Ranks:
    """Ranks as threads: `all_reduce` waits for all of them and gives each the tree's sum."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count)
        self.given: list[torch.Tensor] = [torch.empty(0)] * count

    def of(self, rank: int) -> AllReduce:
        def all_reduce(partial: torch.Tensor) -> torch.Tensor:
            self.given[rank] = partial
            self.barrier.wait(WAIT_S)
            total = tree_sum(self.given).clone()
            self.barrier.wait(WAIT_S)
            return total

        return all_reduce


def shared_out(
    family: str, ranks: int, virtual: int, steps: Sequence[Sequence[SharePiece]]
) -> list[list[torch.Tensor]]:
    """Each rank's logits of each step."""
    group = Ranks(ranks)

    def of_rank(rank: int) -> list[torch.Tensor]:
        reduce = group.of(rank) if ranks > 1 else None
        target: Run = run(family, Arithmetic(True, virtual), rank, ranks, reduce)
        return [target.step(step) for step in steps]

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks)))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_change_no_bit(family: str) -> None:
    """With the same virtual ranks, every rank of TP=2 has bitwise the logits of TP=1, in prefill and in decode."""
    tokens = text(EXACT_LENGTH)
    steps = [
        [SharePiece(tokens[:20], 0, table(0))],
        [SharePiece(tokens[20:21], 20, table(0)), SharePiece(text(9, 4), 0, table(1))],
        [SharePiece(tokens[21:], 21, table(0))],
    ]
    [one] = shared_out(family, 1, 2, steps)
    for rank in shared_out(family, 2, 2, steps):
        assert all(same(found, expected) for found, expected in zip(rank, one, strict=True))


def test_a_tree_of_four_is_a_tree_of_two_and_two() -> None:
    """Slices summed on one rank and on several end with the same bits, on three ranks too; another order does not."""
    torch.manual_seed(1)
    six = [torch.randn(1000) for _ in range(6)]
    assert same(tree_sum([tree_sum(six[at : at + 2]) for at in (0, 2, 4)]), tree_sum(six))
    slices = six[:4]
    one = tree_sum(slices)
    assert same(tree_sum([tree_sum(slices[:2]), tree_sum(slices[2:])]), one)
    assert not same(slices[0] + slices[1] + slices[2] + slices[3], one)


def test_ranks_that_cannot_share_are_refused() -> None:
    """Virtual ranks that cut a head, or make no tree, are refused when the model is bound."""
    held, config = tensors("llama3"), reference("llama3")[1]
    with pytest.raises(UserError, match="4 ranks cannot share the model's 2 KV heads"):
        bind(held, config, positions_max=8, arithmetic=Arithmetic(True, 4))
    config = replace(config, heads=12, kv_heads=12, intermediate=48)
    with pytest.raises(ValueError, match="12 slices cannot be summed by 4 ranks as one tree: use 4 times 1, 2, 4"):
        _pieces(config, Arithmetic(True, 12), 4)


def test_one_rank_sums_as_two_would_where_two_could() -> None:
    """Under `exact` the arithmetic of one rank is that of two if the model can be halved; else each has its own."""
    config = reference("llama3")[1]
    assert arithmetic_for(config, True, 1) == arithmetic_for(config, True, 2) == Arithmetic(True, 2)
    thirds = replace(config, heads=9, kv_heads=3)
    assert arithmetic_for(thirds, True, 1) == Arithmetic(True, 1)
    assert arithmetic_for(thirds, True, 3) == Arithmetic(True, 3)
    assert arithmetic_for(config, False, 1) == Arithmetic(False, 1)
