"""How fast stock vLLM decodes the same shape: `python -m bench.engine_gpu.vllm_speed --out DIR`.

Beside the standard library it needs vLLM only. Dummy weights, CUDA graphs and compilation as they come, no prefix
cache, no tokenizer. Always true: the prompts' lengths, the answers' lengths and the rule are those of our half
(`engine_gpu_speed`): a short run and a long one, the difference of their times for the difference of their tokens, the
quicker of each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_gpu.words import CASES, LLAMA_8B, LONG, SHORT, Case, Row, decode_rate, prompt_ids

WARM_TOKENS = 16
CONTEXT = 4096
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


def run(mode: str, cases: tuple[Case, ...], repeats: int, keep: Callable[[Row], None]) -> Row:
    """All cases; `keep` hears the row as it grows."""
    head: Row = {"version": importlib.import_module("vllm").__version__, "mode": mode, "tokens": [SHORT, LONG]}
    head["cases"] = {}
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        llm = _load(folder, mode, max(case.batch for case in cases))
        head["load_s"] = round(time.monotonic() - began_s, 1)
        keep(head)
        last = 0
        for case in cases:
            took_s: dict[int, list[float]] = {SHORT: [], LONG: []}
            for tokens in (WARM_TOKENS, *(SHORT, LONG) * repeats):
                last += 1
                took_s.setdefault(tokens, []).append(_batch(llm, case, tokens, last))
            rate = decode_rate(case.batch, (SHORT, LONG), (min(took_s[SHORT]), min(took_s[LONG])))
            shown = {str(tokens): [round(one, 3) for one in took_s[tokens]] for tokens in (SHORT, LONG)}
            head["cases"][case.name] = rate | {"took_s": shown}
            print(f"{case.name}: {json.dumps(head['cases'][case.name])}", file=sys.stderr, flush=True)
            keep(head)
    return head


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_vllm_speed", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder: vllm.json goes there")
    parser.add_argument("--mode", choices=MODES, default="stock")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)

    def keep(row: Row) -> None:
        (asked.out / "vllm.json").write_text(json.dumps({"vllm": row}, indent=1) + "\n")

    print(json.dumps(run(asked.mode, CASES, asked.repeats, keep)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
