"""What is relied on in vLLM, and that what does not hold is refused by its name."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.core.errors import Refused
from holdfast.engines.vllm import hooks
from holdfast.engines.vllm.hooks import Relied, check_config, found_wrong


def test_the_vllm_that_is_here_is_as_we_need_it() -> None:
    """Every name and signature, and no question to a block pool that nobody answers."""
    pytest.importorskip("vllm.version", reason="vllm is not installed: `make test-vllm` installs it and runs this")
    hooks.check_installed()


def test_no_other_platforms_worker_is_loaded_to_be_looked_at() -> None:
    """To load a CPU's replaces torch's streams and events: on a GPU nothing would compute after it."""
    assert not [one.name for one in hooks.RELIED if "cpu" in one.name]


class Base:
    kept: int

    def ask(self, a: int, b: int, c: int = 0) -> None: ...


class Derived(Base):
    own: int


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("some_module")
    made.Base, made.Derived = Base, Derived  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_module", made)


@pytest.mark.parametrize(
    ("relied", "said"),
    [
        (Relied("some_module:Base.ask", "a b"), []),
        (Relied("some_module:Base.ask", "a b c", overridden=True), []),
        (Relied("some_module:Derived", has="kept own", of="some_module:Base"), []),
        (Relied("some_module:Base.kept_not"), ["some_module:Base.kept_not is not there"]),
        (Relied("no_module:Base"), ["no_module:Base is not there"]),
        (Relied("some_module:Base.ask", "b a"), ["some_module:Base.ask takes (a, b, c), not (b, a)"]),
        (Relied("some_module:Base.ask", "a"), ["some_module:Base.ask takes b too"]),
        (Relied("some_module:Base.ask", "a b", overridden=True), ["some_module:Base.ask takes c too"]),
        (Relied("some_module:Base", has="kept own other"), ["some_module:Base has no own and no other"]),
        (Relied("some_module:Base", of="some_module:Derived"), ["some_module:Base is no Derived"]),
    ],
)
def test_each_thing_that_does_not_hold_is_a_sentence(module: None, relied: Relied, said: list[str]) -> None:
    """Names, fields, order of parameters, kinds of classes; of what vLLM calls of ours, more parameters too."""
    assert list(found_wrong(relied)) == said


def parallel(**sizes: int) -> SimpleNamespace:
    names = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    return SimpleNamespace(**{f"{name}_parallel_size": sizes.get(name, 1) for name in names})


def config(**more: Any) -> SimpleNamespace:
    plain = {
        "parallel_config": parallel(),
        "model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=False, architecture="A"),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
    }
    return SimpleNamespace(**plain | more)


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class Cache:
    specs: list[Any] = field(default_factory=lambda: [FullAttentionSpec()])
    hash_block_size: int | None = None

    @property
    def kv_cache_groups(self) -> list[Any]:
        return [SimpleNamespace(kv_cache_spec=spec) for spec in self.specs]


def test_one_group_of_full_attention_is_served() -> None:
    """With nothing beside it."""
    check_config(config(), Cache())
    check_config(config(), Cache(hash_block_size=16))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"parallel_config": parallel(pipeline=2)}, "pipeline parallel over 2, and only tensor parallel can be"),
        ({"parallel_config": parallel(decode_context=4)}, "decode context parallel over 4"),
        ({"speculative_config": object()}, "speculative decoding is in it"),
        ({"lora_config": object()}, "LoRA adapters is in it"),
        ({"kv_transfer_config": object()}, "a KV connector is in it"),
        ({"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}, "KV events are in it"),
        (
            {"model_config": SimpleNamespace(runner_type="pooling", is_encoder_decoder=False, architecture="B")},
            "B is no model that only generates text",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    """With or without KV that can be taken over."""
    for direct in (False, True):
        with pytest.raises(Refused, match=said):
            check_config(config(**more), Cache(), direct=direct)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (Cache([]), "0 groups of layers"),
        (Cache([FullAttentionSpec(), MambaSpec()]), r"2 groups of layers \(FullAttentionSpec, MambaSpec\)"),
        (Cache([MambaSpec()]), "its attention is MambaSpec"),
        (Cache([FullAttentionSpec(sliding_window=4096)]), "a sliding window"),
        (Cache(hash_block_size=8), "a hash is of 8 tokens and a block of 16"),
    ],
)
def test_kv_that_cannot_be_taken_over_may_be_direct(cache: Cache, said: str) -> None:
    """What would serve is offered, and does."""
    with pytest.raises(Refused, match=f"{said}.*--kv direct serves it"):
        check_config(config(), cache)
    check_config(config(), cache, direct=True)
