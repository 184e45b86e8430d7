"""Turns messages into tokens and tokens into text, as one model card defines it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.discovery.card import ModelCard
from holdfast.frontend.api.params import check_defaults
from holdfast.frontend.text.template import ChatTemplate, Templates
from holdfast.frontend.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """Turns text into tokens and back for one worker set."""

    card: ModelCard
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    eos_text: str
    eos_id: int  # the model's main end of text, -1 if none; clients see its other end tokens as `stop_reason`
    eos_ids: frozenset[int]
    generation_defaults: dict[str, Any]

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        assert self.template is not None, "only chat models are asked to chat"
        return self.template.render(messages, eos_token=self.eos_text)


class TextMaker:
    """Makes `TextSide`s from cards and tokenizers."""

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._templates = Templates(lambda: datetime.fromtimestamp(unix_s()))

    async def prepare(self, card: ModelCard, tokenizer_json: bytes) -> TextSide:
        """Return a model's text side; raise ValueError if its card cannot be served. A large tokenizer takes a second
        to read, so a thread does it."""
        tokenizer = await asyncio.get_running_loop().run_in_executor(None, TextTokenizer, tokenizer_json)
        try:
            template = self._templates.get(card.chat_template) if card.chat_template else None
        except HoldfastError as error:
            raise ValueError(error.message) from error
        defaults = check_defaults(card.generation_defaults)
        eos = card.eos_token_ids
        text = tokenizer.table.label(eos[0])[0] if eos else ""
        return TextSide(card, tokenizer, template, text, eos[0] if eos else -1, frozenset(eos), defaults)
