"""Models out of thin air: random weights from a seed, always at hand, the same everywhere."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.errors import UserError
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, asset
from holdfast.engines.torch.files.checkpoint import RandomCheckpoint
from holdfast.engines.torch.files.config import ModelConfig

TINY_SEED = 20_261

# Two ranks can share it evenly; the words are the sim's, so that what it says can at least be read.
TINY = ModelConfig(
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate=160,
    vocabulary=6144,
    context_tokens_max=4096,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(EOS_TOKEN_ID,),
    bos_token_id=None,
)

# Shapes of known models, for trials without their files. Their words are the sim's, so most of what they say means
# nothing; what a step costs, and what memory it needs, is the known model's.
_LLAMA_3 = replace(
    TINY,
    heads=32,
    kv_heads=8,
    vocabulary=128_256,
    context_tokens_max=8192,
    rope_theta=500_000.0,
)
SHAPES = {
    "1b": replace(_LLAMA_3, layers=16, hidden=2048, head_size=64, intermediate=8192, tied=True),
    "8b": replace(_LLAMA_3, layers=32, hidden=4096, head_size=128, intermediate=14_336),
}
RANDOM = "random:"


def tiny(seed: int = TINY_SEED) -> RandomCheckpoint:
    """The smallest model that chats."""
    return random_checkpoint(TINY, seed)


def random_checkpoint(config: ModelConfig, seed: int = TINY_SEED) -> RandomCheckpoint:
    """Any shape with the sim's words; ids beyond them are never in a prompt, and mean nothing in an answer."""
    return RandomCheckpoint(config, seed, asset("tokenizer.json"), asset("chat_template.jinja").decode())


def shaped(name: str, seed: int = TINY_SEED) -> RandomCheckpoint:
    """The model of `random:SHAPE`; UserError names the shapes there are."""
    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        there = ", ".join(f"{RANDOM}{known}" for known in SHAPES)
        raise UserError(f"--model {name}: there is no shape {shape!r}; there are {there}")
    return random_checkpoint(SHAPES[shape], seed)
