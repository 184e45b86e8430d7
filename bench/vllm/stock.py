"""`python -m bench.vllm.stock MODEL`: what vLLM says by itself, with nothing of Holdfast's in it.

Requests come as JSON on stdin, by number; their tokens go to stdout. Run in a process of its own: vLLM is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import ROOT
from holdfast.engines.vllm.environment import needed, usual

STOCK_S = 600.0  # it is imported beside others that are
DEVICE = "host-0"


def stock_tokens(model: Path, asked: dict[int, dict[str, Any]]) -> dict[int, list[int]]:
    own = {name: value for name, value in needed(DEVICE).items() if value is not None}
    environ = usual(DEVICE, 2, "error") | dict(os.environ) | own | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "bench.vllm.stock", str(model)]
    done = subprocess.run(
        command, input=json.dumps(asked), env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        timeout=STOCK_S, check=True,
    )  # fmt: skip
    return {int(number): tokens for number, tokens in json.loads(done.stdout.splitlines()[-1]).items()}


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    asked: dict[str, dict[str, Any]] = json.load(sys.stdin)
    llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=16)
    prompts = [{"prompt_token_ids": body.pop("prompt")} for body in asked.values()]
    sampling = [SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **body) for body in asked.values()]
    made = llm.generate(prompts, sampling, use_tqdm=False)
    told = {number: list(one.outputs[0].token_ids) for number, one in zip(asked, made, strict=True)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
