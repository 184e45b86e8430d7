"""The same model by `transformers`, with its cache, as a person would call `generate`.

Always true: its weights are the checkpoint's own, fp32; texts that are not alike are padded on the left, as its
documentation asks; attention is the one it chooses itself; nothing ends a text early. Its tokens are timed as they
are handed to a streamer, which it calls after each step.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Checkpoint, tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig
from tests.rigs.engines.decoded import Decode, Tell

PAD = 0  # any id will do: the mask keeps it out


class _Stamps:
    """A streamer that keeps no text, only when each step's tokens came."""

    def __init__(self) -> None:
        self.at_s: list[tuple[float, float]] = []  # wall and CPU

    def put(self, tokens: torch.Tensor) -> None:
        self.at_s.append((time.perf_counter(), time.process_time()))

    def end(self) -> None:
        """Nothing is held back."""


class TheirModel:
    """Runs a causal model of `transformers` over a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint, source: str, tell: Tell) -> None:
        library = _library("transformers")
        tell("loading the model into transformers")
        folder = Path(source).expanduser()
        self._model = _of_directory(library, folder) if folder.is_dir() else _of_checkpoint(library, checkpoint)
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = PAD

    def decode(self, prompts: list[list[int]], tokens: int) -> Decode:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stamps = _Stamps()
        whole = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, use_cache=True, streamer=stamps
        )
        _, first, *_, last = stamps.at_s  # the prompts come first
        said = whole[:, width:].tolist()
        assert len(stamps.at_s) == 1 + tokens, "a step was not told"
        assert {len(one) for one in said} == {tokens}, "a text ended early"
        return Decode(said, last[0] - first[0], last[1] - first[1])


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)  # lazy: a test dependency, and seconds to load
    except ImportError as error:
        raise UserError(
            f"--compare transformers needs it ({error}): pip install 'transformers>=5.0', or leave --compare out"
        ) from error


def _of_directory(library: Any, folder: Path) -> Any:
    loaded = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def _of_checkpoint(library: Any, checkpoint: Checkpoint) -> Any:
    """A GGUF file, or weights from nowhere: its shape told in their words, its tensors under their names."""
    config = checkpoint.config
    shape = library.AutoConfig.for_model(config.family, **_shape(config))
    # Random numbers that are replaced at once take seconds.
    with _library("transformers.initialization").no_init_weights():
        made = library.AutoModelForCausalLM.from_config(shape)
    state = {name: checkpoint.read(name).float() for name in tensor_shapes(config)}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, f"not loaded: {missing}"
    assert not unexpected, f"unknown there: {unexpected}"
    made.tie_weights()
    return made.eval()


def _shape(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling is not None:
        raise UserError(
            f"a GGUF model with {config.rope_scaling.kind} rope scaling cannot be compared; give --model the directory "
            "of its safetensors"
        )
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context_tokens_max,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
    }
