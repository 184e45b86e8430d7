"""vLLM reads its variables as it is imported: before any test of it is."""

from __future__ import annotations

import os
from importlib.util import find_spec

from holdfast.engines.vllm.environment import needed, usual

if find_spec("vllm") is not None:  # else other tests of this process would hear of it
    for name, value in needed("host-1").items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    for name, value in usual("host-1", 2, "info").items():
        os.environ.setdefault(name, value)
