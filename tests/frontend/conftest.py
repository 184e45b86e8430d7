"""The official client, and the tokenizer to check it by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from holdfast.engines.sim.vocabulary import asset
from holdfast.frontend.text.tokenizer import TextTokenizer
from holdfast.testing.deployment import Deployment


@pytest.fixture(scope="session")
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{deployment.port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(asset("tokenizer.json"))
