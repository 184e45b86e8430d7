"""A GPU's step graphs on a CPU: the same inputs, kept and sent as on a GPU, read by plain torch instead of kernels.

What a graph would replay is called. Its forward pass writes where the rows' blocks say and reads what the block tables
say, as the kernels do: a table that is not its stream's gives other tokens here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from holdfast.engines.torch import computer as computers
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.gpu import graphs
from holdfast.engines.torch.gpu.graphs import GraphInputs
from holdfast.engines.torch.model.batch import Batch, step_batch
from holdfast.engines.torch.model.decoder import BoundModel, forward
from holdfast.engines.torch.ranks.share import SharePiece
from tests.rigs.engines.torch_engine import Rig

TILE = 16


@dataclass(frozen=True, slots=True)
class _Replayed:
    replay: Callable[[], None]


class PlainGraphs(graphs.StepGraphs):
    """Graphs that are called, and counted."""

    def __init__(self, *given: Any, **sizes: int) -> None:
        super().__init__(*given, **sizes)
        self.replays = 0

    @torch.inference_mode()
    def capture(self) -> None:
        self._positions[3].fill_(self._inputs.filler)
        self._chunk_graphs = {length: self._graph(self._chunk_step, length) for length in self._lengths}
        self._decode_graphs = {size: self._graph(self._decode_step, size) for size in self._sizes}

    def _graph(self, step: Callable[[int], None], size: int) -> Any:
        def replay() -> None:
            self.replays += 1
            step(size)

        return _Replayed(replay)


def forward_by_tables(model: BoundModel, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """`model.forward` of a batch that graphs have laid out."""
    if batch.tiles is None:
        assert batch.tables is not None
        places = [(row, 1, start, row) for row, start in enumerate(batch.positions.tolist())]
        tables, wanted = batch.tables.tolist(), list(range(len(places)))
    else:
        assert batch.last is not None
        places = sorted(place for place in zip(*batch.tiles.places.tolist(), strict=True) if place[1])
        tables, wanted = batch.tiles.tables.tolist(), batch.last.tolist()
    tokens = batch.tokens.tolist()
    pieces = [SharePiece(tokens[first : first + count], start, tables[row]) for first, count, start, row in places]
    rows = sum(count for _, count, _, _ in places)
    laid = step_batch(pieces, kv.shape[3], kv.dtype, kv.device, exact=model.exact)
    hidden = forward(model, replace(laid, blocks=batch.blocks[:rows], begun=None), kv)
    ends = {first + count - 1: at for at, (first, count, _, _) in enumerate(places)}
    return hidden.index_select(0, torch.tensor([ends.get(place, 0) for place in wanted]))


def graphs_for(computer: Computer, filler: int, positions_max: int, step_tokens_max: int) -> PlainGraphs:
    width = -(-positions_max // computer.block_tokens)
    inputs = GraphInputs(computer.latest.rows, width, filler, computer.words)
    sizes = {"step_tokens_max": step_tokens_max, "tile": TILE}
    made = PlainGraphs(computer.model, computer.kv, inputs, computer.latest, **sizes)
    made.capture()
    return made


async def by_graphs(r: Rig, monkeypatch: pytest.MonkeyPatch) -> PlainGraphs:
    """The engine rests, and wakes as one that has graphs and is a step ahead, as on a GPU."""
    monkeypatch.setattr(graphs, "forward", forward_by_tables)
    sizes = r.hosted.context_tokens_max, r.hosted.settings.step_tokens_max
    made = graphs_for(r.ready.computer, r.ready.blocks.stop, *sizes)
    await r.wake_again(graphs=made, ahead=1)
    return made


def counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Steps that are laid out by the host from now on, as they come."""
    found: list[Batch] = []
    real = computers.forward

    def forward(model: BoundModel, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        found.append(batch)
        return real(model, batch, kv)

    monkeypatch.setattr(computers, "forward", forward)
    return found
