"""A vault for every test of an engine. Where torch is not installed nothing of its engine can be imported;
`test_torch_is_here` says so."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rigs.engines.any_engine import Vault

if find_spec("torch") is None:
    collect_ignore_glob = ["sampling/*", "torch/*", "stock_vllm/*"]


@pytest.fixture
def vault() -> Iterator[Vault]:
    with Vault() as started:
        yield started
