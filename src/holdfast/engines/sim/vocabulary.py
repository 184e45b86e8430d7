"""The words the sim engine speaks, as token ids, read once from the package's data.

Always true: words, punctuation and the first tokens of characters are disjoint sets, so candidate lists drawn from
them hold no id twice. A character of `CHARACTERS` is a path of single-byte tokens in a trie; its first token
is a UTF-8 lead byte and the later ones are continuation bytes, so a path can be recognised from a text's last tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from holdfast.spec.engines import SimSettings

EOS_TOKEN_ID = 2  # <|im_end|>: the chat template closes every turn with it

# Split over 2, 3 and 4 tokens; few enough that a long stream meets each, many enough that the trie branches.
CHARACTERS = "éüñßøλжя世界你好海風山川森林雨雪春夏秋冬日月星火水木金土東西南北あいのを안녕하세€→😀😎🌊🌱🐟🚀🎉🔥💡🧭"

# Some twice: the more often listed, the more often said.
PUNCTUATION = (",", ",", ",", ".", ".", ".", ";", ":", "!", "?", "\n")


class LanguageVariant(NamedTuple):
    """Which language an engine speaks: of another revision, or quantised otherwise, it says other words; by another
    tokenizer the same words have other ids."""

    revision: int = 1
    quantization: str = "none"
    tokenizer: int = 1

    @classmethod
    def of(cls, settings: SimSettings) -> LanguageVariant:
        return cls(settings.revision, settings.quantization, settings.tokenizer)

    @property
    def weights(self) -> str:
        """Return the name of this set of weights."""
        quantised = "" if self.quantization == "none" else f"-{self.quantization}"
        return f"sim-language-{self.revision}{quantised}"

    @property
    def person(self) -> bytes:
        """Return the personalisation of the hash that its words follow from."""
        first = self.weights == LanguageVariant().weights
        return b"holdfast-sim" if first else blake2b(self.weights.encode(), digest_size=16).digest()


class CharacterNode:
    """A place inside an unfinished character: it has the tokens that may follow, and where each leads (None:
    finished)."""

    __slots__ = ("children", "choices")

    def __init__(self) -> None:
        self.children: dict[int, CharacterNode | None] = {}
        self.choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything `language` needs to know of a tokenizer."""

    size: int
    words: tuple[int, ...]  # a prime number of them: see `language`
    punctuation: tuple[int, ...]
    root: CharacterNode  # of the trie of characters
    person: bytes = LanguageVariant().person

    def tail(self, tokens: list[int] | array[int]) -> CharacterNode | None:
        """Return the unfinished character that `tokens` end in, if they do."""
        node: CharacterNode | None = None
        for token in tokens[-4:]:  # UTF-8 has at most four bytes, one token each
            node = (node.children.get(token) if node else None) or self.root.children.get(token)
        return node


def asset(name: str) -> bytes:
    """Return a file of the package's data."""
    return (files("holdfast.engines.sim") / "data" / name).read_bytes()


@cache
def tokenizer_json(which: int = 1) -> bytes:
    """Return an engine's tokenizer, in the format of the `tokenizers` library. For `which` above 1 the words' ids are
    rotated by `which` - 1 places."""
    data = asset("tokenizer.json")
    if which == 1:
        return data
    parsed = json.loads(data)
    ids: dict[str, int] = parsed["model"]["vocab"]
    words = _words()
    moved = words[which - 1 :] + words[: which - 1]
    ids |= {word: ids[other] for word, other in zip(words, moved, strict=True)}
    return json.dumps(parsed).encode()


def _words() -> list[str]:
    """Return the words as the tokenizer writes them."""
    space = byte_symbols()[ord(" ")]
    return [space + word for word in asset("words.txt").decode().split()]


def chat_template() -> str:
    """Return the engine's chat template (ChatML), in jinja."""
    return asset("chat_template.jinja").decode()


@cache
def load(tongue: LanguageVariant = LanguageVariant()) -> Vocabulary:  # noqa: B008 - frozen
    """Return the packaged vocabulary of one language variant."""
    parsed = json.loads(tokenizer_json(tongue.tokenizer))
    ids: dict[str, int] = parsed["model"]["vocab"]
    assert ids["<|im_end|>"] == EOS_TOKEN_ID
    symbols = byte_symbols()
    words = [ids[word] for word in _words()]
    while any(len(words) % divisor == 0 for divisor in range(2, int(len(words) ** 0.5) + 1)):
        words.pop()  # until their number is a prime
    return Vocabulary(
        size=len(ids),
        words=tuple(words),
        punctuation=tuple(ids["".join(symbols[byte] for byte in mark.encode())] for mark in PUNCTUATION),
        root=_trie([ids[symbols[byte]] for byte in character.encode()] for character in CHARACTERS),
        person=tongue.person,
    )


def byte_symbols() -> list[str]:
    """Return how byte-level BPE writes each byte: printable Latin-1 as itself, the rest as U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _trie(paths: Iterable[list[int]]) -> CharacterNode:
    root = CharacterNode()
    for path in paths:
        node = root
        for token in path[:-1]:
            child = node.children.setdefault(token, CharacterNode())
            assert child is not None
            node = child
        node.children[path[-1]] = None
    _fix_choices(root)
    return root


def _fix_choices(node: CharacterNode) -> None:
    node.choices = tuple(node.children)
    for child in node.children.values():
        if child is not None:
            _fix_choices(child)
