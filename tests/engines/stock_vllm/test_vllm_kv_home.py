"""Where an engine's private blocks lie in a cache, whatever its layout."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import UserError
from holdfast.engines.vllm.kv_home import KvHomePlan, in_granules, layout_of, parts_of

BLOCKS, TOKENS, HEADS, SIZE = 12, 16, 2, 8
PAGE = 2 * TOKENS * HEADS * SIZE  # numbers in a block of one layer, keys and values


def plain(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(BLOCKS, 2, TOKENS, HEADS, SIZE)


def keys_first(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(2, BLOCKS, TOKENS, HEADS, SIZE)


def heads_first(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(BLOCKS, 2, HEADS, TOKENS, SIZE).permute(0, 1, 3, 2, 4)


def small_kernel_blocks(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(BLOCKS * 4, 2, TOKENS // 4, HEADS, SIZE)


def packed(raw: torch.Tensor) -> torch.Tensor:
    """The second of three layers that lie beside each other in every block."""
    return raw.view(BLOCKS, 3 * PAGE)[:, PAGE : 2 * PAGE].view(BLOCKS, 2, TOKENS, HEADS, SIZE)


@pytest.mark.parametrize("layout", [plain, keys_first, heads_first, small_kernel_blocks, packed])
def test_private_blocks_are_found_in_every_layout(layout: object) -> None:
    """What is written to them is within their parts, and no other block is."""
    raw = torch.zeros(BLOCKS * PAGE * (3 if layout is packed else 1), dtype=torch.bfloat16)
    view = layout(raw)  # type: ignore[operator]
    along = view.shape.index(BLOCKS * (4 if layout is small_kernel_blocks else 1))
    per = view.shape[along] // BLOCKS
    view.narrow(along, 7 * per, 3 * per).fill_(1.0)
    view.narrow(along, 0, 7 * per).fill_(2.0)
    view.narrow(along, 10 * per, 2 * per).fill_(2.0)
    inside = torch.zeros(raw.numel(), dtype=torch.bool)
    for address, size in parts_of(view, BLOCKS, 7, 3):
        start = (address - raw.data_ptr()) // 2
        inside[start : start + size // 2] = True
    assert bool(inside[raw == 1.0].all())
    assert not bool(inside[raw == 2.0].any())


def test_every_layout_has_a_name_of_its_own() -> None:
    """Pages that are laid out otherwise are noise to who adopts them, be they as many bytes of as many blocks."""
    raw = torch.zeros(BLOCKS * PAGE, dtype=torch.bfloat16)
    views = [layout(raw) for layout in (plain, keys_first, heads_first)]
    names = [layout_of([view], raw.data_ptr()) for view in views]
    assert len({*names, layout_of(views[:2], raw.data_ptr()), layout_of([views[0]], raw.data_ptr() - 512)}) == 5
    elsewhere = torch.zeros_like(raw)
    assert layout_of([plain(elsewhere)], elsewhere.data_ptr()) == names[0]


def test_granules_are_in_order_and_apart() -> None:
    """Each one whole, those that touch as one."""
    parts = [(1000 + 900, 20), (1000 + 10, 20), (1000 + 95, 10), (1000 + 300, 100)]
    assert in_granules(parts, 1000, 100) == ((0, 200), (300, 100), (900, 100))
    assert in_granules([], 1000, 100) == ()


def test_every_slot_has_blocks_of_its_own() -> None:
    """Behind the pool's, none twice."""
    plans = [KvHomePlan.of(100, 5, 8, slot) for slot in range(8)]
    private = [block for plan in plans for block in range(plan.private_first, plan.private_first + plan.private_count)]
    assert {plan.shared for plan in plans} == {59}
    assert sorted(private) == list(range(60, 100))
    with pytest.raises(UserError, match="ENGINE_ID of 0 to 7, got 8"):
        KvHomePlan.of(100, 5, 8, 8)
