"""Which sizes of steps are captured as CUDA graphs. Pure, and without torch: who plans memory for them has none."""

from __future__ import annotations

# Steps of up to so many positions are captured: 64 streams that come back with a block to compute each. Beyond it a
# step computes for longer than the host takes to lay it out.
POSITIONS_MAX = 1024
POSITIONS_MIN = 32


def sizes_for(rows_max: int) -> list[int]:
    """Decodes to capture: a batch is filled up to the next size, by seven rows at most, which cost next to nothing."""
    sizes = [size for size in (1, 2, 4) if size < rows_max]
    return [*sizes, *range(8, rows_max, 8), rows_max]


def positions_for(step_tokens_max: int) -> list[int]:
    """Positions of captured steps with chunks: powers of two."""
    powers = [1 << power for power in range(POSITIONS_MIN.bit_length() - 1, POSITIONS_MAX.bit_length())]
    return [size for size in powers if size <= step_tokens_max]
