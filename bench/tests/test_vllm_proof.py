"""A tenth of `make prove-vllm` is run: a real deployment's active engine is killed, the next one stopped, under mixed
load.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from bench.prove_vllm import ends
from bench.vllm import chain
from tests.rigs.engines.vllm_models import set_variables

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here: make test-vllm")


@pytest.mark.long
@pytest.mark.timeout(3000)  # of four engines' starts, on whatever machine
def test_nothing_is_lost_or_other_than_unbroken() -> None:
    """Every answer is the unbroken one, greedy ones are stock vLLM's, at most a block is computed again. How soon, the
    proof says: other tests may share the machine here."""
    set_variables()
    row = ends("llama", kills=1, stops=1, leaves=0, seed=int(os.environ.get("HOLDFAST_TEST_SEED", "1")))
    assert chain.sound(row), row
