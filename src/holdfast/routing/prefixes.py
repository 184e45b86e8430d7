"""Which worker was last given a prompt that begins alike. Pure.

Theory. A prompt's leading blocks are keyed by a hash chain; each key remembers the last worker that was given it, whose
KV cache likely has it. Only a hint: a worse guess costs a prefill.

Always true: what is remembered is bounded, the longest unused goes first; a list of tokens, which nobody writes to, is
hashed once for all that is asked of it in a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

# Prefix keys per request: 64 blocks of 64 tokens find a shared system prompt or a long chat, at a bounded cost.
PREFIX_BLOCK_TOKENS = 64
PREFIX_BLOCKS_MAX = 64
PREFIX_ENTRIES_MAX = 65_536


class Prefixes:
    """Workers by what they were given."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, int] = OrderedDict()
        self._last: tuple[list[int], list[int]] = ([], [])  # a prompt and its keys: the request's choices share both

    def known_to(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Workers that were given the beginning of it, each with how many tokens of it, the most first."""
        keys = self._keys(tokens)
        for index in range(len(keys) - 1, -1, -1):
            name = self._names.get(keys[index])
            if name is not None:
                yield name, (index + 1) * PREFIX_BLOCK_TOKENS

    def remember(self, tokens: list[int], name: int) -> None:
        for key in self._keys(tokens):
            self._names[key] = name
            self._names.move_to_end(key)
        while len(self._names) > PREFIX_ENTRIES_MAX:
            self._names.popitem(last=False)

    def _keys(self, tokens: list[int]) -> list[int]:
        if self._last[0] is not tokens:
            self._last = (tokens, prefix_keys(tokens))
        return self._last[1]

    def __contains__(self, key: int) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)


def prefix_keys(tokens: list[int]) -> list[int]:
    """A hash chain over the leading blocks; equal keys mean equal prefixes (up to hash collisions, which only
    cost a worse route)."""
    keys: list[int] = []
    chain = 0
    for block in range(min(len(tokens) // PREFIX_BLOCK_TOKENS, PREFIX_BLOCKS_MAX)):
        start = block * PREFIX_BLOCK_TOKENS
        chain = hash((chain, *tokens[start : start + PREFIX_BLOCK_TOKENS]))
        keys.append(chain)
    return keys
