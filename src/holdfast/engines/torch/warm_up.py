"""What a GPU does slowly the first time, done before anybody waits for it: kernels, products of all sizes, graphs.

Always true: only `filler` is written, the one block that is nobody's.
"""

from __future__ import annotations

import torch

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.torch.checkpoint import Progress
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.graph_inputs import GraphInputs
from holdfast.engines.torch.graphs import StepGraphs
from holdfast.engines.torch.sequences import Segment, StepPlan, Stream

PINNED = range(6, 22)  # powers of two, bytes: up to the block tables of a whole batch
PINNED_EACH = 8  # of a step's handful of lists, for the steps in flight
WORK = "compiling kernels and capturing graphs"


def warm_up(computer: Computer, step_tokens_max: int, table_width: int, filler: int, progress: Progress) -> None:
    """Chunks of every power of two blocks up to the largest step, then all graphs."""
    progress(WORK, 0, None)
    _pin()
    most = max(1, step_tokens_max // computer.block_tokens)
    for count in [*(1 << power for power in range(most.bit_length() - 1)), most]:
        computer.compute(_plan(count, computer.block_tokens, filler))
    if not computer.model.exact:
        inputs = GraphInputs(computer.latest.rows, table_width, filler, computer.words)
        tile = computer.tile_tokens
        graphs = StepGraphs(computer.model, computer.kv, inputs, computer.latest, step_tokens_max, tile)
        graphs.capture()
        computer.graphs = graphs
    progress(WORK, 1, 1)


def _pin() -> None:
    """Pinned memory of every size a step's numbers may need: the allocator keeps it. To ask the driver for some takes
    a lock, which a dying engine's driver holds for up to 0.2 s (fact 1)."""
    held = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in PINNED for _ in range(PINNED_EACH)]
    del held


def _plan(count: int, tokens: int, filler: int) -> StepPlan:
    """As many whole blocks of different texts; the first of them draws."""
    request = GenerateRequest("warm-up", [0] * tokens, tokens, Sampling(2, 0))
    streams = [Stream(-1 - number, request, tokens + 2, frozenset()) for number in range(count)]
    return StepPlan(0, [Segment(each, [0] * tokens, 0, [filler], number == 0) for number, each in enumerate(streams)])
