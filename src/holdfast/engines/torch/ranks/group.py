"""The ranks of one engine as a group: sums of what each computed, and bytes that all tell all.

Always true: every rank calls the same things in the same order; sums and bytes have a group of their own each, so that
one may wait while the other works; under `exact` a sum is a tree in the order of ranks (linear.py), and on a CPU it is
so always: to gather two small tensors takes half the time of gloo's sum. A peer that dies is an error at once, one
that is stuck an error when its time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as _distributed

from holdfast.engines.torch.model.linear import tree_sum
from holdfast.engines.torch.ranks.share import RankWork
from holdfast.kv.adopt import Survey, agree, packed, unpacked

dist: Any = _distributed  # its stubs leave out what the groups themselves are made of
COLLECTIVE_S = 60.0  # the longest step there may be: within it every rank has come to the same sum
HERE = "127.0.0.1"  # the ranks of an engine are on one machine


class Group:
    """One rank's end. `join` waits for the others. `gathers`: whether a sum is made here, of everyone's."""

    def __init__(self, sums: Any, words: Any, rank: int, ranks: int, gathers: bool) -> None:
        self.rank, self.ranks = rank, ranks
        self._sums, self._words, self._gathers = sums, words, gathers

    @classmethod
    def join(cls, folder: Path, work: RankWork, device: torch.device) -> Group:
        """All ranks meet in a folder that nobody else may read. Blocks: not for an event loop."""
        rank, ranks = work.geometry.rank, work.geometry.rank_count
        store = dist.FileStore(str(folder / "store"), ranks)
        # At a wake one rank's vault may grant its pool at once, another's only when that time is all but over.
        words = _gloo(dist.PrefixStore("words", store), rank, ranks, work.place.wake_s + COLLECTIVE_S)
        if device.type == "cpu":
            sums = _gloo(dist.PrefixStore("sums", store), rank, ranks, COLLECTIVE_S)
            return cls(sums, words, rank, ranks, True)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_S)
        sums = dist.ProcessGroupNCCL(dist.PrefixStore("sums", store), rank, ranks, options)
        return cls(sums, words, rank, ranks, work.settings.exact)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        if not self._gathers:
            self._sums.allreduce([partial]).wait()
            return partial
        parts = [torch.empty_like(partial) for _ in range(self.ranks)]
        self._sums.allgather([parts], [partial.contiguous()]).wait()
        return tree_sum(parts)

    def gather(self, mine: bytes) -> list[bytes]:
        """Everyone's, in the order of ranks; all of one length. Blocks: not for an event loop."""
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        parts = [torch.empty_like(given) for _ in range(self.ranks)]
        self._words.allgather([parts], [given]).wait()
        return [part.numpy().tobytes() for part in parts]


class GroupPeers:
    """Every rank hears every survey and comes to the same answer by itself: nothing of a pool is believed before."""

    def __init__(self, group: Group, fenced: Callable[[], Awaitable[None]] | None = None) -> None:
        self._group, self._fenced = group, fenced

    async def agree(self, found: Survey) -> Survey:
        ranks = await asyncio.to_thread(self._group.gather, packed(found))
        return agree([unpacked(data) for data in ranks])[self._group.rank]

    async def fenced(self) -> None:
        """The leader alone waits for the others: it alone gives blocks to anybody."""
        if self._fenced is not None:
            await self._fenced()


def _gloo(store: Any, rank: int, ranks: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HERE)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, ranks, options)
