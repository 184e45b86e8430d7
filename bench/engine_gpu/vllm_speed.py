"""How fast stock vLLM decodes the same shape.

Beside the standard library it needs vLLM only. Dummy weights, CUDA graphs and compilation as they come, no prefix
cache, no tokenizer. Always true: the prompts' lengths, the answers' lengths and the rule are those of our half
(`engine_gpu.speed`): a short run and a long one, the difference of their times for the difference of their tokens, the
quicker of each.
"""

from __future__ import annotations

import importlib
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.engine_gpu.words import (
    CASES,
    CONTEXT,
    LLAMA_8B,
    LONG,
    SHORT,
    WARM_TOKENS,
    Case,
    Keep,
    Row,
    keep_case,
    prompt_ids,
)
from holdfast.core.errors import UserError

REPEATS = 2
# "stock" is what is measured. The others are for a host where its compiler does not run, and are told as such.
MODES: dict[str, Row] = {
    "stock": {},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
}


def _load(folder: str, mode: str, streams: int) -> Any:
    """As many places as streams: graphs of other sizes need not be captured. Autotuning is of kernels that a dense
    bf16 model on this attention does not use, and may want a compiler."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
    options: Row = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": streams,
        "enable_prefix_caching": False,
        "enable_flashinfer_autotune": False,
    }
    return importlib.import_module("vllm").LLM(model=folder, **options, **MODES[mode])


def _batch(llm: Any, case: Case, tokens: int, run: int) -> float:
    """So many streams at once, from the first submitted to the last one's end, seconds."""
    how = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt_ids(place, case.prompt, run)} for place in range(case.batch)]
    began_s = time.perf_counter()
    answers = llm.generate(prompts, how, use_tqdm=False)
    took_s = time.perf_counter() - began_s
    made = [len(answer.outputs[0].token_ids) for answer in answers]
    assert made == [tokens] * case.batch, f"{case.name}: not every answer has {tokens} tokens: {made}"
    return took_s


def run(mode: str, keep: Keep) -> Row:
    """All cases; `keep` hears the row as it grows."""
    if mode not in MODES:
        raise UserError(f"--mode can be {', '.join(MODES)}; got {mode}")
    version = importlib.import_module("vllm").__version__
    head: Row = {"version": version, "mode": mode, "tokens": [SHORT, LONG], "cases": {}}
    runs = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        llm = _load(folder, mode, max(case.batch for case in CASES))
        head["load_s"] = round(time.monotonic() - began_s, 1)
        keep(head)
        for case in CASES:
            took_s: dict[int, list[float]] = {}
            for tokens in (WARM_TOKENS, *(SHORT, LONG) * REPEATS):
                took_s.setdefault(tokens, []).append(_batch(llm, case, tokens, next(runs)))
            keep_case(head, case, took_s, keep)
    return head
