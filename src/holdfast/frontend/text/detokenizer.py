"""Turns token ids into text, one token at a time, for many streams that share one table per tokenizer.

Always true: the pieces from `push` and `flush` join to exactly the tokenizer's own decode of all the ids (special
tokens skipped). No piece has part of a character, and after `flush` no text is left inside (facts 32: `DecodeStream`
breaks both). Byte-level and byte-fallback decoders are implemented here with a table. Any other decoder is called
through a window of `Tokenizer.decode`, which is exact if the decoder looks at most one token back.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Style:
    """How a tokenizer turns tokens into text, according to its JSON.

    It is byte-level or byte-fallback only if this module repeats every step of the decoder exactly; any other decoder
    is "window", which asks the tokenizer itself. `replacements` and `strip_first` belong to byte-fallback decoders.
    """

    kind: Literal["byte_level", "byte_fallback", "window"]
    replacements: tuple[tuple[str, str], ...] = ()
    strip_first: str = ""


class _TokenizerJson(msgspec.Struct):
    """The part of the file that is read here; msgspec skips the megabytes of vocabulary."""

    decoder: dict[str, Any] | None = None


def read_style(tokenizer_json: bytes) -> Style:
    """Return how this tokenizer decodes; raise ValueError if it is no valid JSON."""
    steps = _flat(msgspec.json.decode(tokenizer_json, type=_TokenizerJson).decoder)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return Style("byte_level")
    return _byte_fallback(steps) or Style("window")


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _flat(inner)]


def _byte_fallback(steps: list[dict[str, Any]]) -> Style | None:
    """Return the style if the steps are Replace*, ByteFallback, Fuse, and optionally a Strip of one character at the
    start; else None."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        old = step.get("pattern", {}).get("String")
        if not old:
            return None  # a regular expression, in a dialect that is not Python's
        replacements.append((old, step.get("content", "")))
    names = [step.get("type") for step in rest]
    if names == ["ByteFallback", "Fuse"]:
        return Style("byte_fallback", tuple(replacements))
    if names == ["ByteFallback", "Fuse", "Strip"] and (rest[2].get("start"), rest[2].get("stop")) == (1, 0):
        return Style("byte_fallback", tuple(replacements), rest[2].get("content", ""))
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable bytes map to themselves, the others to the
    characters from 256 on, in order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    alphabet = {chr(byte): byte for byte in themselves}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return a byte-level token's bytes; an added token with other characters is its own text, as in the reference."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


# The reference decoder judges a run of byte-fallback tokens as a whole: one bad byte turns every byte of the run into
# U+FFFD. So a run is held back until it ends, but at most for 16 four-byte characters: a stream in a script that the
# vocabulary lacks must show some text. Longer runs are judged in pieces of this size.
BYTE_RUN_BYTES_MAX = 64

# How many tokens the windowed fallback may hold back while its text ends inside a character. The longest character
# has 4 bytes; an emoji joined of several characters is still shown in parts. After that the U+FFFD is real.
WINDOW_HELD_TOKENS_MAX = 8

TOKEN_ID_END = 2**32  # ids are 32-bit in `tokenizers`; asking for more raises

_BYTE_TOKEN = re.compile(r"<0x\+?([0-9A-Fa-f]{1,2})>")


class Detokenizer(Protocol):
    """Decodes one stream's tokens; made by `TokenTable.detokenizer`."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" inside a character."""

    def flush(self) -> str:
        """Return the remaining text at the stream's end; a broken character becomes U+FFFD as in the full decode."""


class TokenTable:
    """The text or bytes of each id, learned at its first use so that admitting a model costs nothing.

    `texts` has the ids that are complete text by themselves; `push` looks there first. Its size is bounded by the
    vocabulary: ids that the tokenizer does not know are never kept.
    """

    __slots__ = ("_bytes", "_special", "_style", "_tokenizer", "texts")

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes) -> None:
        self._tokenizer = tokenizer
        self._style: Style = read_style(tokenizer_json)
        self._special: dict[int, str] = {
            token_id: added.content for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"TokenTable({self._style.kind}, {len(self._bytes)} ids seen)"

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special)

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for a new stream."""
        if self._style.kind == "byte_level":
            return ByteLevelDetokenizer(self)
        if self._style.kind == "byte_fallback":
            return ByteFallbackDetokenizer(self, strip_first=self._style.strip_first)
        return WindowDetokenizer(self, self._tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes this id adds to a text; none for special and unknown ids."""
        data = self._bytes.get(token_id)
        return self._learn(token_id) if data is None else data

    def decodes(self, token_id: int) -> bool:
        """Return True if the tokenizer's decoder does not skip this id."""
        if not 0 <= token_id < TOKEN_ID_END or token_id in self._special:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def label(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and bytes of an id for logprobs; special tokens are shown by name."""
        name = self._special.get(token_id)
        data = self.bytes_of(token_id) if name is None else name.encode()
        return data.decode("utf-8", "replace"), data

    def _learn(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if self.decodes(token_id) else None
        if token is None:
            return b""
        if self._style.kind == "byte_level":
            data = byte_level_bytes(token)
            self._learn_text(token_id, data)
        elif self._style.kind == "byte_fallback":
            data = self._learn_piece(token_id, token)
        else:
            data = self._tokenizer.decode([token_id], skip_special_tokens=True).encode()
        self._bytes[token_id] = data
        return data

    def _learn_text(self, token_id: int, data: bytes) -> None:
        try:
            self.texts[token_id] = data.decode()
        except UnicodeDecodeError:
            return  # part of a character

    def _learn_piece(self, token_id: int, token: str) -> bytes:
        for old, new in self._style.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        self.texts[token_id] = token
        return token.encode()


class ByteLevelDetokenizer:
    """Decodes like GPT-2: every token is bytes, and the text is all bytes decoded as UTF-8."""

    __slots__ = ("_pending", "_table", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._texts = table.texts
        self._pending = b""  # an incomplete character: at most 3 bytes

    def push(self, token_id: int) -> str:
        if not self._pending:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._pending + self._table.bytes_of(token_id)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class ByteFallbackDetokenizer:
    """Decodes like SentencePiece: tokens are text; characters not in the vocabulary are spelled in byte tokens."""

    __slots__ = ("_plain", "_run", "_strip", "_table", "_texts")

    def __init__(self, table: TokenTable, *, strip_first: str) -> None:
        self._table = table
        self._texts = table.texts
        self._run = bytearray()  # byte tokens of the run not yet judged
        self._strip = strip_first  # a character to drop from the text's very start, "" once that is past
        self._plain = not strip_first  # no run and nothing to strip: a text token is its text

    def push(self, token_id: int) -> str:
        if self._plain:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        return self._push_slowly(token_id)

    def flush(self) -> str:
        return self._started(self._end_run())

    def _push_slowly(self, token_id: int) -> str:
        data = self._table.bytes_of(token_id)
        text = self._texts.get(token_id)
        if text is not None:
            return self._started(self._end_run() + text)
        if not data:
            return ""  # special or unknown: the decoder never sees it, so it does not end a run either
        self._run += data
        self._plain = False
        return self._started(self._decode_long_run()) if len(self._run) >= BYTE_RUN_BYTES_MAX else ""

    def _decode_long_run(self) -> str:
        try:
            text, used = utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            return self._end_run()
        del self._run[:used]
        return text

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _started(self, text: str) -> str:
        if text and self._strip:
            text = text.removeprefix(self._strip)
            self._strip = ""
        self._plain = not self._run and not self._strip
        return text


class WindowDetokenizer:
    """Decodes with any other decoder: decode the last shown tokens with the new ones, and show what was added."""

    __slots__ = ("_shown", "_shown_text", "_table", "_tokenizer", "_window")

    def __init__(self, table: TokenTable, tokenizer: Tokenizer) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens of the last piece shown, then those not shown yet
        self._shown = 0
        self._shown_text = ""

    def push(self, token_id: int) -> str:
        # An id that the decoder skips must not begin the window: the next token would look like the start of a text.
        if not self._table.decodes(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        full = len(self._window) - self._shown >= WINDOW_HELD_TOKENS_MAX
        if not full and (text.endswith("\ufffd") or len(text) <= len(self._shown_text)):
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        del self._window[: self._shown]
        self._shown = len(self._window)
        self._shown_text = self._decode(self._window)
        return piece

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
