"""What a GPU does slowly the first time, done before anybody waits for it: kernels, products of all sizes, graphs.

Always true: only `filler` is written, the one block that is nobody's.
"""

from __future__ import annotations

import logging
import time

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.sequences import Segment, StepPlan, Stream
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.files.checkpoint import Progress
from holdfast.engines.torch.gpu.graph_inputs import GraphInputs
from holdfast.engines.torch.gpu.graphs import StepGraphs
from holdfast.memory.torch.ahead import pin_ahead

WORK = "compile"  # kernels, and capture graphs

log = logging.getLogger("holdfast.engine")


def warm_up(computer: Computer, step_tokens_max: int, table_width: int, filler: int, progress: Progress) -> None:
    """Chunks of every power of two blocks up to the largest step, then all graphs. Under `exact` every row is a call of
    its own, the same in any step: one block has them all."""
    progress(WORK, 0, None)
    began_s = time.perf_counter()
    pin_ahead()
    tokens = computer.block_tokens
    most = 1 if computer.model.exact else max(1, step_tokens_max // tokens)
    for count in [*(1 << power for power in range(most.bit_length() - 1)), most]:
        computer.compute(_plan(count, tokens, filler))
    if computer.model.exact:
        ready_s = time.perf_counter()
        computer.compute(_plan(1, tokens, filler))
        each_ms = (time.perf_counter() - ready_s) * 1000 / tokens
        log.warning(
            "exact on a GPU: compiled in %.1f s; every position is computed by itself, without graphs, in %.1f ms: a "
            "prompt of 1,000 tokens takes %.0f s, and so do 1,000 tokens of all streams together",
            ready_s - began_s,
            each_ms,
            each_ms,
        )
    else:
        inputs = GraphInputs(computer.latest.rows, table_width, filler, computer.words)
        sizes = {"step_tokens_max": step_tokens_max, "tile": computer.tile_tokens}
        graphs = StepGraphs(computer.model, computer.kv, inputs, computer.latest, **sizes)
        graphs.capture()
        computer.graphs = graphs


def _plan(count: int, tokens: int, filler: int) -> StepPlan:
    """As many whole blocks of different texts; the first of them draws."""
    request = GenerateRequest("warm-up", [0] * tokens, tokens, Sampling(2, 0))
    streams = [Stream(-1 - number, request, tokens + 2, frozenset()) for number in range(count)]
    return StepPlan(0, [Segment(each, [0] * tokens, 0, [filler], number == 0) for number, each in enumerate(streams)])
