"""Words after `--`: which of vLLM's options are a person's to set, told before vLLM is loaded."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Refused
from holdfast.engines.vllm.reserved_options import PASSED, RESERVED, check_arguments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--worker-cls x.Y", "--worker-cls of vLLM is not to be set here: that is how Holdfast is inside vLLM"),
        ("--scheduler_cls=x.Y", "--scheduler-cls of vLLM"),
        ("--seed 1 --kv-cache-memory-bytes 4096", "--kv-gib"),
        ("--gpu-memory-utilization 0.9", "--kv-gib"),
        ("--num-gpu-blocks-override 9", "--kv-gib"),
        ("--max-model-len 4096", "with --context"),
        ("--max-num-seqs 4", "with --streams-max"),
        ("--max-num-active-seqs 4", "with --streams-max"),
        ("--prefix-caching-hash-algo xxhash", "the names that Holdfast gives them"),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching of vLLM"),
        ("--load-format dummy", "--load-format of vLLM"),
        ('--kv-transfer-config {"kv_connector":"x"}', "no connector"),
        ("--kv-transfer-config.kv_connector x", "no connector"),
        ("--kv-events-config {}", "no connector"),
        ("--speculative-config {}", "drafts are not served yet"),
        ("--enable-lora", "adapters are not served yet"),
        ("--pipeline-parallel-size 2", "only --tensor-parallel-size is served"),
        ("--pipeline_parallel_size=2", "only --tensor-parallel-size is served"),
        ("-pp 2", "--pipeline-parallel-size of vLLM"),
        ("--data-parallel-size 2", "--workers"),
        ("--model /m", "before --, with --model"),
        ("--served-model-name a b", "with --served-name"),
        ("--runner pooling", "generate text"),
        ("--mm-processor-kwargs {}", "requests are text"),
        ("--cpu-offload-gb 4", "the weights are in the vault"),
        ("--enable-sleep-mode", "the weights are in the vault"),
        ("--kv-cache-dtype fp8", "a quantised KV cache"),
        ("--logits-processors x.Y", "every engine draws alike"),
        ("--help", "`vllm serve --help=all`"),
        ("--config a.yaml", "word by word"),
    ],
)
def test_what_is_ours_is_refused_with_its_reason(words: str, said: str) -> None:
    """By the name it was given under, and with what to do instead."""
    with pytest.raises(Refused) as refused:
        check_arguments(words.split())
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--enforce-eager --max-num-batched-tokens 4096 --seed -1",
        "--tensor-parallel-size 1 -tp 1 --pipeline-parallel-size=1",
        "--load-format auto --enable-prefix-caching",
        "--dtype float16 --quantization fp8 --compilation-config.mode 0 -O1",
        "--an-option-of-tomorrow 3",
    ],
)
def test_what_changes_nothing_of_ours_is_taken(words: str) -> None:
    """Arithmetic, kernels and steps are a person's; so is what says only what is so anyway."""
    check_arguments(words.split())


@pytest.mark.parametrize(
    "words",
    ["--no-enable-prefix-caching", "--kv-cache-dtype fp8", "--prefix-caching-hash-algo=xxhash", "--mamba-block-size 8"],
)
def test_what_is_ours_for_kvs_sake_is_a_persons_where_kv_is_direct(words: str) -> None:
    """Nobody takes it over; who wants that is told of the other way, but for what only names blocks."""
    check_arguments(words.split(), direct=True)
    with pytest.raises(Refused):
        check_arguments(words.split())
    with pytest.raises(Refused, match="--kv-gib"):
        check_arguments([*words.split(), "--num-gpu-blocks-override", "9"], direct=True)


def test_every_reason_says_what_to_do() -> None:
    """A person reads it once, and knows."""
    assert not RESERVED.keys() & PASSED
    for name, ours in RESERVED.items():
        mend = any(word in ours.why for word in ("leave it out", "before --", "change", "$HF", "worker"))
        assert mend, f"{name}: {ours.why}"
        assert not ours.why.endswith(".")
