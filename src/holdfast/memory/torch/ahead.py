"""Memory that steps will ask the driver for, asked for ahead, and kept by torch.

To ask the driver takes a lock, which a dying engine's driver holds for up to 0.2 s (fact 1): just while its standby
makes its first steps.
"""

from __future__ import annotations

import torch

PINNED = range(6, 22)  # powers of two, bytes: up to the block tables of a whole batch
PINNED_EACH = 8  # of a step's handful of lists, for the steps in flight


def pin_ahead() -> None:
    """Pinned memory of every size that a step's numbers may need."""
    held = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in PINNED for _ in range(PINNED_EACH)]
    del held


def take_ahead(device: torch.device, size: int) -> None:
    """As many bytes of the device in one piece, which torch cuts smaller ones from."""
    held = torch.empty(size, dtype=torch.uint8, device=device)
    del held
