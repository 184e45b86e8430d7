"""How a model's makers want it to be drawn from, and which token ends its texts, as the files beside its weights say.

Always true: only what can be honoured is taken, and a value that cannot be is named with its file; the tokenizer's own
end comes before all others, because that is the one clients are not told of (as in vLLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError

# field: (name in a model card, least, most). vLLM takes the same six; the rest of the file is for other ways to draw.
_FIELDS: dict[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 2.0),
    "top_p": ("top_p", 1e-9, 1.0),
    "top_k": ("top_k", -1, 2**31 - 1),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", 1e-9, 1e9),
    "max_new_tokens": ("max_tokens", 1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")


def generation_defaults(said: Mapping[str, Any], where: Path) -> dict[str, float]:
    """What a request that is silent gets, by the names of a model card."""
    defaults: dict[str, float] = {}
    for field, (name, least, most) in _FIELDS.items():
        value = said.get(field)
        if value is None:
            continue
        kinds = (int,) if field in _WHOLE else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            wanted = "whole number" if field in _WHOLE else "number"
            raise UserError(f"{where} says {field} = {value!r}: a {wanted} from {least:g} to {most:g} is needed")
        defaults[name] = value
    return defaults


def token_text(said: Any) -> str:
    """A token as tokenizer_config.json names it: by its text, or by an object that has it."""
    text = said.get("content") if isinstance(said, Mapping) else said
    return text if isinstance(text, str) else ""


def token_id(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """A token's id by its text, from the content of a tokenizer.json."""
    if not text:
        return None
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == text:
            return int(added["id"])
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(text)
        return found if isinstance(found, int) else None
    # A unigram's is a list of pairs, in the order of the ids.
    return next((place for place, pair in enumerate(vocabulary or ()) if pair[0] == text), None)
