"""Makes vLLM's draws reproducible, so that a resumed stream continues with the tokens of the unbroken one.

There are two ways, by vLLM's model runner:
- The first runner draws from a generator whose state dies with its engine. So vLLM takes the likeliest token, and
  `HoldfastDraws` puts the draw into the logits (drawing.py).
- The second runner's noise already depends only on seed and position. So vLLM draws itself ("native"). `bring_back`
  gives it a resumed stream's generated tokens as generated, as after one of vLLM's own preemptions.

Always true: a request has a seed. A request for the likeliest token of the unchanged logits costs nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from holdfast.core.errors import Refused
from holdfast.core.requests import GenerateRequest
from holdfast.engines.vllm.drawing import Asked, Drawing, Row
from holdfast.engines.vllm.requests import ASKED


class HoldfastDraws(LogitsProcessor):
    """The last logits processor that may change the likeliest token; it runs before vLLM's own penalties, which are
    off."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}
        self._drawing = Drawing(torch.device(device))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._rows, batch_update, _row):
            self._drawing.arrange(self._rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self._drawing.apply(logits)


def _row(params: SamplingParams, given: list[int] | None, made: list[int]) -> Row | None:
    asked = (params.extra_args or {}).get(ASKED)
    return Row(asked, given or [], made) if isinstance(asked, Asked) else None


def take_over(config: Any) -> bool:
    """Prepare a VllmConfig before its engine is made; return True if vLLM draws natively. Raise Refused for options
    with which a resumed stream or its logprobs would differ."""
    model = config.model_config
    if model.logits_processors:
        raise Refused("--logits-processors: a resumed stream would not go on as the unbroken one")
    if model.logprobs_mode != "raw_logprobs":
        raise Refused(f"--logprobs-mode {model.logprobs_mode}: logprobs are the model's own here, raw_logprobs")
    if config.use_v2_model_runner:
        return True
    model.logits_processors = [HoldfastDraws]
    return False


def bring_back(request: Any, asked: GenerateRequest) -> None:
    """Give a natively drawn vLLM `Request`, not yet scheduled, the tokens generated for it before."""
    emitted = asked.tokens[asked.prompt_len :]
    if emitted:
        request.append_output_token_ids(emitted)
        # As after a preemption: vLLM asserts of any other that no more is found of it than its prompt.
        request.num_preemptions = 1


def note_found(scheduler: Any, scheduled: Any) -> None:
    """Add to vLLM's outputs how many tokens were found for resumed streams: vLLM counts that only for streams that were
    never preempted. Called after each `schedule` if vLLM draws natively."""
    for new in scheduled.scheduled_new_reqs:
        stats = scheduler.requests[new.req_id].prefill_stats
        if stats is not None and not stats.num_prompt_tokens:
            stats.set(len(new.prefill_token_ids), new.num_computed_tokens, 0)
