"""What the link between pinned host memory and the first GPU carries, by torch's plain copy of a large piece."""

from __future__ import annotations

import time

GIB = 2**30
SIZE = 4 * GIB
TIMES = 5


def gb_per_s() -> float:
    """Return the best of several copies to the device."""
    import torch

    pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    best_ms = float("inf")
    for _ in range(TIMES):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        best_ms = min(best_ms, 1000 * (time.perf_counter() - began_s))
    del pinned, device
    torch.cuda.empty_cache()
    return round(SIZE / 1e6 / best_ms, 1)
