"""Whether stock vLLM says the same again, asked what the chain of kills asks: what identical answers may be hoped for.

    python -m bench.engine_gpu.vllm_again FOLDER

All requests at once, three times: the first finds no prefix, the others find all of it. Beside the standard library it
needs vLLM only. Always true: prompts, seeds and temperatures are `chain`'s.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from bench.engine_gpu.chain import ChainBench
from bench.engine_gpu.words import CONTEXT, Row, common

TIMES = 3


def _ask(llm: Any, bench: ChainBench) -> list[list[int]]:
    bodies = [bench.body(number)[1] for number in range(bench.streams)]
    params = importlib.import_module("vllm").SamplingParams
    how = [
        params(
            temperature=body["temperature"],
            seed=body["seed"],
            max_tokens=bench.tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for body in bodies
    ]
    answers = llm.generate([{"prompt_token_ids": body["prompt"]} for body in bodies], how, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def run(folder: str, bench: ChainBench) -> Row:
    llm = importlib.import_module("vllm").LLM(
        model=folder, max_model_len=CONTEXT, max_num_seqs=bench.streams, skip_tokenizer_init=True
    )
    asked = [_ask(llm, bench) for _ in range(TIMES)]
    row: Row = {"model": folder, "streams": bench.streams, "prompt_tokens": bench.prompt, "answer_tokens": bench.tokens}
    for later in range(1, TIMES):
        same = [common(one, other) for one, other in zip(asked[later - 1], asked[later], strict=True)]
        share = sum(count == bench.tokens for count in same) / bench.streams
        row[f"{later}_and_{later + 1}"] = {"identical_share": round(share, 4), "same_tokens": same}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's directory")
    usual = ChainBench()
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--prompt", type=int, default=usual.prompt)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    asked = parser.parse_args()
    print(json.dumps(run(asked.folder, ChainBench(streams=asked.streams, prompt=asked.prompt, tokens=asked.tokens))))


if __name__ == "__main__":
    main()
