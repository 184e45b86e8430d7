"""Converts a GGUF file's tokenizer to the bytes of a `tokenizer.json`, and reads its chat template.

GGUF keeps a byte-level BPE's tokens and merges, and only a *name* for how text is cut before merging. Always true: a
name is in the table below, which cuts as the model's own tokenizer.json does, or it is refused; a token's id is its
place in the file; control tokens written in a text become one id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF's token types, those that matter here

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a family cuts text into the words that merges stay within."""

    steps: tuple[dict[str, Any], ...]
    normaliser: str | None = None
    ignore_merges: bool = False  # a word that is a token is that token, whatever merges would make of it
    adds_bos: bool = False  # unless the file says otherwise


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = _Cut((_byte_level(use_regex=True),))
_SMOLLM = _Cut((_DIGITS, _byte_level(use_regex=True)))
_LLAMA3 = _Cut(
    (_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), _byte_level(use_regex=False)),
    ignore_merges=True,
    adds_bos=True,
)
_QWEN2 = _Cut((_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"), _byte_level(use_regex=False)), normaliser="NFC")

# tokenizer.ggml.pre -> how it cuts
CUTS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """Build it; UserError names a kind of tokenizer that is not supported."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UserError(f"the GGUF's tokenizer, of the kind {model}, is not supported; gpt2 (byte-level BPE) is")
    cut = CUTS.get(str(pre))
    if cut is None:
        raise UserError(f"the GGUF's tokenizer cuts text as {pre}, which is not supported; known are {', '.join(CUTS)}")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # The first half of a merge may be a space itself: the separating space is not looked for in its first place.
    merges = [(merge, merge.find(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    built = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **plain, "special": kind != _USER_DEFINED}
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": cut.normaliser} if cut.normaliser else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cut.steps)},
        "post_processor": _post_processor(metadata, cut, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [[merge[:at], merge[at + 1 :]] for merge, at in merges],
        },
    }
    return json.dumps(built, ensure_ascii=False).encode()


def _post_processor(metadata: Mapping[str, Any], cut: _Cut, tokens: list[str]) -> dict[str, Any] | None:
    """Put the begin-of-text token before a plain text, where the model was trained so."""
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", cut.adds_bos):
        return None
    name = tokens[bos]
    first, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
    }


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """Return the file's template, if it has one, with its begin-of-text token written in."""
    template = metadata.get("tokenizer.chat_template")
    return with_bos(template, bos_token(metadata)) if template else None


def bos_token(metadata: Mapping[str, Any]) -> str:
    """Return the begin-of-text token's text, empty without one."""
    bos, tokens = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.tokens", ())
    return str(tokens[bos]) if bos is not None else ""


def with_bos(template: str, bos: str) -> str:
    """Set `bos_token` in a template. A card's renderer knows the model's end token only: where a template asks for
    `bos_token`, say it. The empty expression keeps a first newline of the template from being trimmed as the block's
    own."""
    if not bos or "bos_token" not in template:
        return template
    return f"{{% set bos_token = {json.dumps(bos, ensure_ascii=False)} %}}{{{{ '' }}}}{template}"
