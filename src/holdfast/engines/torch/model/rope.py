"""Rotary positions: how far each pair of a head's numbers is turned at each position, worked out once as two tables.

Always true: a position's row depends on the position and the model alone, never on the batch: the tables are made once
in fp32 and only looked up afterwards. A pair is (i, i + head_size / 2), as Hugging Face lays heads out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from holdfast.engines.torch.files.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """`cos` and `sin`, [positions, 1, head_size]; sin's first half is negative, so that one `roll` rotates a head."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rope_tables(config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> Rope:
    """For positions 0 up to `positions`: what the engine lets a text grow to, not what the model could."""
    frequencies, scale = _frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    tables = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return Rope(*(table.to(device, dtype).unsqueeze(1) for table in tables))


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_size], in place. Products and sums apart: a fused one rounds otherwise where a vector ends."""
    turned = heads.roll(heads.shape[-1] // 2, -1).mul_(sin)
    return heads.mul_(cos).add_(turned)


def _frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Turns per position of each pair, and what cos and sin are multiplied by."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    assert scaling.kind == "yarn", f"config.py lets no rope of the kind {scaling.kind} through"
    return _yarn(plain, scaling, config), scaling.attention_factor


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Quick turns are kept, slow ones stretched, those between are mixed."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """As llama3, but the mix is a ramp over the dimensions."""
    size, theta = config.head_size, config.rope_theta

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)
