"""Allocates memory that steps will need in advance; torch keeps it in its caches.

A driver allocation takes a lock that a dying engine's driver holds for up to 0.2 s (fact 1), exactly while its standby
runs its first steps.
"""

from __future__ import annotations

import torch

PINNED = range(6, 22)  # powers of two, bytes: up to the block tables of a whole batch
PINNED_EACH = 8  # buffers per size: a step has a few lists, and several steps are in flight


def pin_ahead() -> None:
    """Allocate pinned memory of every size that a step's inputs may need."""
    held = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in PINNED for _ in range(PINNED_EACH)]
    del held


def take_ahead(device: torch.device, size: int) -> None:
    """Allocate `size` bytes of device memory in one piece, from which torch serves smaller allocations."""
    held = torch.empty(size, dtype=torch.uint8, device=device)
    del held
