"""The sim engine: deterministic, without a model, with faults on command. For tests and scale work."""

from __future__ import annotations

from holdfast.engines.sim.chaos_server import ChaosServer, send_fault
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import Fault, Faults, parse_fault
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, REVISION, asset

__all__ = [
    "EOS_TOKEN_ID",
    "REVISION",
    "ChaosServer",
    "Fault",
    "Faults",
    "SimEngine",
    "chat_template",
    "parse_fault",
    "send_fault",
    "tokenizer_json",
]


def tokenizer_json() -> bytes:
    """The engine's tokenizer, in the format of the `tokenizers` library."""
    return asset("tokenizer.json")


def chat_template() -> str:
    """The engine's chat template (ChatML), in jinja."""
    return asset("chat_template.jinja").decode()
