"""Noise for drawing tokens: a pure function of (seed, position, token id), and of nothing else.

A counter-based generator in integer tensor operations that wrap around: a 64-bit key from (seed, position), and under
it two rounds of a 32-bit mix of the token's id. Always true: a row's noise has the same bits whatever the batch, the
row's place in it or the number of threads, because every operation here works on one element at a time; nothing waits
for the device, so all of it can be captured in a graph. Adding the noise to logits and taking the largest draws from
their softmax (Gumbel-max), and arithmetic noise in the logits moves few draws that way (fact 4e).

The uniform value has 31 bits and is fine near 0, where the largest noise comes from: no token of a probability over
about 2**-31 is out of reach, and no noise is infinite, so a masked token (-inf) never wins.
"""

from __future__ import annotations

import torch

WORD = 1 << 64

# The finaliser of splitmix64, and the step of its counter (the golden ratio, odd).
GOLDEN = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# Multipliers of 32-bit mixes with a low bias, found by search (Wellons' lowbias32 and triple32).
MIX_32 = (0x7FEB352D, 0x846CA68B)
LAST_32 = (0xED5AD4BB, 0xAC4C1B51)

UNIFORM_BITS = 31
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 under 1


def signed(value: int, bits: int = 64) -> int:
    """The same bits as a signed number, which is what tensors hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def seed_key(seed: int) -> int:
    """Where a seed's counter starts: any whole number will do."""
    mixed = (seed + GOLDEN) % WORD
    mixed = (mixed ^ mixed >> 30) * MIX_64[0] % WORD
    mixed = (mixed ^ mixed >> 27) * MIX_64[1] % WORD
    return signed(mixed ^ mixed >> 31)


def token_words(vocabulary: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A mixed 32-bit word per token id: computed once, so that a step spends no round on telling ids apart."""
    ids = torch.arange(vocabulary, dtype=torch.int32, device=device)
    return _mix_32_(ids.mul_(signed(GOLDEN >> 32, 32)).add_(signed(GOLDEN, 32)), MIX_32)


def row_keys(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A 64-bit key per row from its seed's key and the place in the text that is drawn for."""
    mixed = seed_keys + positions * signed(GOLDEN)
    mixed = (mixed ^ _shift_64(mixed, 30)) * signed(MIX_64[0])
    mixed = (mixed ^ _shift_64(mixed, 27)) * signed(MIX_64[1])
    return mixed ^ _shift_64(mixed, 31)


def uniform(keys: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """One number inside (0, 1) for each key and token, float32 [rows, vocabulary]."""
    low = keys.to(torch.int32).unsqueeze(1)  # the low half: a conversion wraps around
    high = (keys >> 32).to(torch.int32).unsqueeze(1)
    mixed = _mix_32_(words ^ low, MIX_32)
    mixed = _mix_32_(mixed.add_(high), LAST_32)
    counts = mixed.bitwise_and_((1 << UNIFORM_BITS) - 1).float()
    return counts.add_(0.5).mul_(2.0**-UNIFORM_BITS).clamp_(max=UNIFORM_MAX)


def gumbel(keys: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, vocabulary], all of it finite."""
    # -log(1 - u) and not -log(u): it is small where u is small, and u has most of its precision there.
    return uniform(keys, words).neg_().log1p_().neg_().log_().neg_()


def _shift_64(values: torch.Tensor, by: int) -> torch.Tensor:
    """Tensors shift their sign in; a mix needs zeros there, or it loses bits."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _mix_32_(values: torch.Tensor, multipliers: tuple[int, int]) -> torch.Tensor:
    """A bijection of 32-bit words, in place."""
    for by, multiplier in zip((16, 15), multipliers, strict=True):
        values.bitwise_xor_((values >> by).bitwise_and_((1 << (32 - by)) - 1))
        values.mul_(signed(multiplier, 32))
    return values.bitwise_xor_((values >> 16).bitwise_and_(0xFFFF))
