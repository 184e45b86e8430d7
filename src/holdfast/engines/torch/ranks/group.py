"""The ranks of one engine as a group: sums of what each computed.

Always true: every rank calls the same things in the same order; under `exact` a sum is a tree in the order of ranks
(linear.py), and on a CPU it is so always: to gather two small tensors takes half the time of gloo's sum. A peer that
dies is an error at once, one that is stuck an error when its time is over.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as _distributed

from holdfast.engines.torch.model.linear import tree_sum
from holdfast.engines.torch.ranks.share import RankWork

dist: Any = _distributed  # its stubs leave out what the groups themselves are made of
COLLECTIVE_S = 60.0  # the longest step there may be: within it every rank has come to the same sum
HERE = "127.0.0.1"  # the ranks of an engine are on one machine


class Group:
    """One rank's end. `join` waits for the others. `gathers`: whether a sum is made here, of everyone's."""

    def __init__(self, sums: Any, ranks: int, gathers: bool) -> None:
        self.ranks = ranks
        self._sums, self._gathers = sums, gathers

    @classmethod
    def join(cls, folder: Path, work: RankWork, device: torch.device) -> Group:
        """All ranks meet in a folder that nobody else may read. Blocks: not for an event loop."""
        rank, ranks = work.geometry.rank, work.geometry.rank_count
        store = dist.FileStore(str(folder / "store"), ranks)
        if device.type == "cpu":
            return cls(_gloo(store, rank, ranks, COLLECTIVE_S), ranks, True)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_S)
        sums = dist.ProcessGroupNCCL(store, rank, ranks, options)
        return cls(sums, ranks, work.settings.exact)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        if not self._gathers:
            self._sums.allreduce([partial]).wait()
            return partial
        parts = [torch.empty_like(partial) for _ in range(self.ranks)]
        self._sums.allgather([parts], [partial.contiguous()]).wait()
        return tree_sum(parts)


def _gloo(store: Any, rank: int, ranks: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HERE)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, ranks, options)
