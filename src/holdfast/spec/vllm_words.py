"""vLLM's own options, word by word, as far as they can be read without vLLM: it takes seconds to load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.core.errors import UserError

SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
RANKS_MAX = 16  # GPUs that one machine has


def said(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Name and value of every option among the words, where one can be told from the other."""
    for at, word in enumerate(words):
        before, equals, text = word.partition("=")
        if not before.startswith("-"):
            continue
        follows = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else None
        value: object = text if equals else follows
        name = SHORT.get(before) or before.lstrip("-").partition(".")[0].replace("-", "_")
        if before.startswith("--no-"):
            name, value = name.removeprefix("no_"), False
        yield name, True if value is None else value


def ranks_in(words: Sequence[str]) -> int:
    """Devices that share one engine's model: what `--tensor-parallel-size` says. UserError, if it says no number."""
    ranks = 1
    for name, value in said(words):
        if name == "tensor_parallel_size":
            text = str(value)
            if not text.isdecimal() or not 1 <= int(text) <= RANKS_MAX:
                raise UserError(f"--tensor-parallel-size of vLLM must be 1 to {RANKS_MAX} here, got {text}")
            ranks = int(text)
    return ranks
