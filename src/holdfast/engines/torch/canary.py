"""The torch engine's canary: where it runs, and which engines must answer it alike."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS


def private_blocks(block_tokens: int) -> int:
    """Three more than its text needs: the slab need not start or end at a whole block, and the last one is filler."""
    return -(-(PROMPT_TOKENS + TOKENS) // block_tokens) + 3


@cache
def code_identity() -> str:
    """Of the sources that compute: engines of two versions need not round alike."""
    digest = hashlib.sha256()
    engines = Path(__file__).parents[1]
    for source in sorted([*(engines / "torch").rglob("*.py"), *(engines / "paged").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
