"""`holdfast up --engine vllm … -- --tensor-parallel-size 2`: one rank's process ends or stands still under streams, and
every client gets what it would have got."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.testing.answers import difference
from holdfast.testing.clients import Stream
from holdfast.testing.processes import children_of
from holdfast.testing.supervised import Supervised
from tests.rigs.engines.vllm_models import SHAPE

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(1800)]

STREAMS = 4
TOKENS = 300
BREAK_AFTER = 20  # pieces of the first stream
START_S = 400.0  # four processes import vLLM, beside whatever else the machine does
RANK = "holdfast.engines.vllm.ranks.rank"
SIZES = ("--kv-gib", "0.03", "--context", "1024", "--streams-max", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from holdfast.engines.torch.files.resolve import tiny

    words = tiny()
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    shape = SHAPE | {"vocab_size": words.config.vocabulary}
    LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **shape)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(words.tokenizer_json)
    return folder


def asked(port: int) -> list[Stream]:
    more = {"model": "tiny", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    varied = [
        {"seed": number, "prompt": f"stream {number} " * (1 + 9 * number), "temperature": 0.8 if number % 2 else 0.0}
        for number in range(STREAMS)
    ]
    return [Stream(port, more | each, "/v1/completions") for each in varied]


@pytest.mark.parametrize("kv", ["vault", "direct"])
def test_a_lost_rank_is_not_noticed_by_clients(model: Path, kv: str) -> None:
    """SIGKILL the active engine's second rank, then stop the next one's: the engine ends with all its processes, the
    standby goes on with every stream, the texts are those of the unbroken run, and redundancy comes back."""
    options = ("--engine", "vllm", "--model", str(model), "--served-name", "tiny", *SIZES, "--kv", kv)
    with Supervised(*options, "--", "--enforce-eager", "--tensor-parallel-size", "2", start_s=START_S) as up:
        unbroken = [stream.answer() for stream in asked(up.port)]
        for how in (signal.SIGKILL, signal.SIGSTOP):
            active = up.active().pid
            (rank,) = [pid for pid, words in children_of(active).items() if RANK in words]
            streams = asked(up.port)
            streams[0].wait_tokens(BREAK_AFTER)
            os.kill(rank, how)
            broken = [stream.answer() for stream in streams]
            differences = [difference(right, got) for right, got in zip(unbroken, broken, strict=True)]
            assert differences == [""] * STREAMS, up.logs()
            assert all(len(answer.tokens) == TOKENS for answer in broken)
            assert sum(answer.resumed for answer in broken) >= 1, "the end came too late to mean anything"
            up.wait_restored(active, START_S)
            assert not children_of(active)
            assert not Path(f"/proc/{rank}").exists()
