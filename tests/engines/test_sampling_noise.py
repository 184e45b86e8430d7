"""The noise is a pure function with good statistics: same bits everywhere, and no visible tie to its inputs."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.engines import sampling as noise

VOCABULARY = 4099  # odd: rows are not aligned, and vector loops have tails


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return noise.row_keys(torch.tensor([noise.seed_key(seed) for seed in seeds]), torch.tensor(positions))


def gumbel(seeds: list[int], positions: list[int], vocabulary: int = VOCABULARY) -> torch.Tensor:
    return noise.gumbel(keys(seeds, positions), noise.token_hashes(vocabulary))


def mix_32(value: int, multipliers: tuple[int, int]) -> int:
    for by, multiplier in zip((16, 15), multipliers, strict=True):
        value = (value ^ value >> by) * multiplier & 0xFFFFFFFF
    return value ^ value >> 16


def reference(seed: int, position: int, token: int) -> float:
    """The same function in whole numbers of any size."""
    key = (noise.seed_key(seed) + position * noise.GOLDEN) % noise.WORD
    for by, multiplier in zip((30, 27), noise.MIX_64, strict=True):
        key = (key ^ key >> by) * multiplier % noise.WORD
    key ^= key >> 31
    word = mix_32((token * (noise.GOLDEN >> 32) + noise.GOLDEN) & 0xFFFFFFFF, noise.MIX_32)
    mixed = mix_32(word ^ key & 0xFFFFFFFF, noise.MIX_32)
    mixed = mix_32((mixed + (key >> 32)) & 0xFFFFFFFF, noise.LAST_32)
    return ((mixed & 0x7FFFFFFF) + 0.5) * 2.0**-31


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 12345678901234567])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_tensors_compute_what_whole_numbers_do(seed: int, position: int) -> None:
    """Wrapping and shifting signed words changes nothing: the generator is the one written down."""
    got = noise.uniform(keys([seed], [position]), noise.token_hashes(300))[0].tolist()
    assert got == pytest.approx([reference(seed, position, token) for token in range(300)], rel=1e-6)


def test_the_bits_do_not_depend_on_the_batch() -> None:
    """A row's noise is the same alone, anywhere among others, with more threads, and in a larger vocabulary."""
    seeds, positions = list(range(9)), [7 * row for row in range(9)]
    whole = gumbel(seeds, positions)
    for row in range(9):
        assert torch.equal(gumbel([row], [7 * row])[0], whole[row])
    assert torch.equal(gumbel(seeds[::-1], positions[::-1]), whole.flip(0))
    assert torch.equal(gumbel(seeds, positions, VOCABULARY + 13)[:, :VOCABULARY], whole)
    torch.set_num_threads(2)
    assert torch.equal(gumbel(seeds * 9, positions * 9)[-9:], whole)


def test_it_is_gumbel() -> None:
    """Mean, variance and the whole distribution function agree with the standard Gumbel's; nothing is infinite."""
    values = gumbel(list(range(64)), [5] * 64).flatten()
    count = values.numel()
    assert bool(values.isfinite().all())
    assert abs(values.mean().item() - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(values.var().item() - math.pi**2 / 6) < 0.03
    ordered = torch.exp(-torch.exp(-values.double())).sort().values
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert (ordered - steps).abs().max().item() < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, p = 0.001


def test_the_ends_of_the_uniform_are_finite() -> None:
    """The largest value there is would round to 1, and the least makes the largest noise: a masked token never wins."""
    rare = noise.uniform(keys([9], [6363]), noise.token_hashes(VOCABULARY))[0, 3040].item()
    assert reference(9, 6363, 3040) > 1 - 2.0**-25
    assert rare == noise.UNIFORM_MAX < 1.0
    assert gumbel([9], [6363])[0, 3040].item() > -4
    assert -math.log(-math.log1p(-(0.5 * 2.0**-noise.UNIFORM_BITS))) > 21


def correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    """In standard errors."""
    left, right = left.flatten().double(), right.flatten().double()
    both = torch.corrcoef(torch.stack([left, right]))[0, 1].item()
    return abs(both) * math.sqrt(left.numel())


def test_neighbours_are_independent() -> None:
    """Noise of neighbouring positions, seeds and ids has no correlation, straight or squared."""
    base = noise.uniform(keys([3] * 64, list(range(64))), noise.token_hashes(VOCABULARY)) - 0.5
    later = noise.uniform(keys([3] * 64, list(range(1, 65))), noise.token_hashes(VOCABULARY)) - 0.5
    assert torch.equal(base[1:], later[:-1])
    pairs = [(base, noise.uniform(keys([3] * 64, list(range(100, 164))), noise.token_hashes(VOCABULARY)) - 0.5)]
    for shift in (1, 2, 16, 32):
        pairs.append((base[shift:], base[:-shift]))
        pairs.append((base[:, shift:], base[:, :-shift]))
    seeds = noise.uniform(keys(list(range(100, 164)), [3] * 64), noise.token_hashes(VOCABULARY)) - 0.5
    pairs += [(seeds[1:], seeds[:-1]), (base, seeds)]
    for left, right in pairs:
        assert correlation(left, right) < 4.5
        assert correlation(left**2, right**2) < 4.5


def test_every_bit_depends_on_every_input() -> None:
    """One bit changed in seed or position changes about half of the noise's bits."""
    words = noise.token_hashes(2000)

    def bits(seed: int, position: int) -> torch.Tensor:
        return (noise.uniform(keys([seed], [position]), words)[0].double() * 2**20).long()

    start = bits(77, 1000)
    for other in [bits(77 ^ 1 << bit, 1000) for bit in (0, 1, 31, 62)] + [bits(77, 1000 ^ 1 << bit) for bit in (0, 9)]:
        changed = start ^ other
        shares = [((changed >> bit) & 1).double().mean().item() for bit in range(20)]
        assert all(abs(share - 0.5) < 0.06 for share in shares)
