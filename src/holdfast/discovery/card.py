"""Defines the model card: everything that determines a model's answers, under one checksum.

Always true: two workers with the same card checksum give the same tokens for the same request, as far as their engine
is deterministic. So a stream may be replayed from one to the other; with different checksums it may not. A card names
large artefacts by content hash; workers send them (an etcd value must be small).
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.spec.names import canonical_hash

# Larger cards would approach etcd's value limit (1.5 MiB) with many workers; a template has a few kB.
CHAT_TEMPLATE_BYTES_MAX = 256 * 1024


class WeightsIdentity(msgspec.Struct, frozen=True):
    """The identity of weights: a revision or content hash, and how they are stored."""

    revision: str
    quantization: str = "none"
    dtype: str = "float32"


class CardCanary(msgspec.Struct, frozen=True):
    """A question with a known answer (`spec.canaries.CanaryPrompt`), in the model's own tokens."""

    prompt: tuple[int, ...]
    expected_tokens: tuple[int, ...]  # at temperature 0, continued past an end of text
    logprob_range: tuple[float, float] | None = None  # each expected token's logprob is in it


class ModelCard(msgspec.Struct, frozen=True):
    """The description of a model that clients see and that replays depend on."""

    name: str
    weights: WeightsIdentity
    tokenizer_sha256: str
    chat_template: str | None
    context_tokens_max: int
    block_size: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, Any] = {}
    model_type: str = "chat"  # "chat" serves chat and completions; "completions" only completions
    root: str = ""  # where the worker loaded it from, for people; it may differ between equal models
    canary_prompts: tuple[CardCanary, ...] = ()  # known questions for control's checks; no answer depends on them

    def checksum(self) -> str:
        """Return 16 hex digits over every field that can change an answer: all but `root` and `canary_prompts`."""
        fields = msgspec.to_builtins(self)
        del fields["root"], fields["canary_prompts"]
        return canonical_hash(fields)[:16]

    def canaries_name(self) -> str:
        """Return a hash that names this list of `canary_prompts`; "" if there are none."""
        return canonical_hash(msgspec.to_builtins(self.canary_prompts))[:16] if self.canary_prompts else ""

    def problem(self) -> str | None:
        """Return why this card cannot be admitted, or None."""
        if not self.name:
            return "card has no model name"
        if self.context_tokens_max < 2:
            return f"card's context_tokens_max is {self.context_tokens_max}, must be at least 2"
        if self.model_type not in ("chat", "completions"):
            return f"card's model_type is {self.model_type!r}, must be 'chat' or 'completions'"
        if self.model_type == "chat" and not self.chat_template:
            return "card of a chat model has no chat_template"
        if self.chat_template and len(self.chat_template.encode()) > CHAT_TEMPLATE_BYTES_MAX:
            return f"card's chat_template is over {CHAT_TEMPLATE_BYTES_MAX} bytes"
        if any(not (one.prompt and one.expected_tokens) for one in self.canary_prompts):
            return "one of the card's canary_prompts has no prompt, or expects no token"
        return None


decode_card = msgspec.json.Decoder(ModelCard).decode  # ValueError names the field that is wrong
