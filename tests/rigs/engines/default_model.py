"""The default model for tests: where a person has it cached, or fetched there now; else a skip, with the reason."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.resolve import SMOLLM2, fetch


def cache_dir() -> Path:
    return Path(os.environ.get("HOLDFAST_CACHE_DIR") or Path.home() / ".cache" / "holdfast")


@cache
def _path() -> Path | str:
    try:
        return fetch(SMOLLM2, cache_dir(), lambda *_: None)
    except UserError as error:
        return str(error)


def smollm2_path() -> Path:
    """Return the real SmolLM2-135M-Instruct GGUF."""
    path = _path()
    if isinstance(path, str):
        pytest.skip(path)
    return path
