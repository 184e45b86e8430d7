"""vLLM reads its variables as it is imported: before any test of it is."""

from __future__ import annotations

from importlib.util import find_spec

from tests.rigs.engines.vllm_models import set_variables

if find_spec("vllm") is not None:  # else other tests of this process would hear of it
    set_variables()
