"""Streams that vLLM draws itself, as far as it shows without a GPU: what its scheduler tells the second runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# Not "vllm": where it is not installed this folder answers to that name.
pytest.importorskip("vllm.version", reason="vllm is not installed: what needs it is left out")

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.scheduler import SchedulerSettings
from holdfast.engines.vllm.requests import OpenRequests
from holdfast.engines.vllm.sampling import bring_back, note_found
from tests.rigs.engines.vllm_core import BLOCK, CONTEXT, EOS, VOCABULARY, Core, Room, tiny_model

pytestmark = pytest.mark.timeout(600)

SETTINGS = SchedulerSettings(VOCABULARY, frozenset({EOS}), CONTEXT)
TEXT = [place * 7 % 900 + 2 for place in range(3 * BLOCK + 5)]
PROMPT = 10  # far less than what is found of the text


def asked(**given: Any) -> GenerateRequest:
    return GenerateRequest("r", TEXT, PROMPT, Sampling(200, 3, min_tokens=150, presence_penalty=0.5, **given))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    made = Core(tiny_model(tmp_path_factory.mktemp("model")), held=False)
    made.orders = OpenRequests(SETTINGS, Room(256), native=True)
    whole = GenerateRequest("r", TEXT, len(TEXT), Sampling(1, 0, temperature=0.0))
    made.ask(whole)  # the KV of the text is there
    yield made
    made.close()


def brought(core: Core, number: int, request: GenerateRequest) -> Any:
    made, _ = core.core.preprocess_add_request(core.orders.take(number, request))
    bring_back(made, request)
    return made


def test_the_runner_is_told_what_is_prompt_and_what_was_generated(core: Core, monkeypatch: Any) -> None:
    """The prompt's length, the whole text, and that most of its KV is there; lengths count from the prompt's end, and
    what was found is told though more was found than there is prompt."""
    scheduler = core.core.scheduler
    monkeypatch.setattr(scheduler, "use_v2_model_runner", True)
    request = brought(core, 1, asked())
    scheduler.add_request(request)
    scheduled = scheduler.schedule()
    note_found(scheduler, scheduled)
    (new,) = scheduled.scheduled_new_reqs
    assert (len(new.prompt_token_ids), new.prefill_token_ids) == (PROMPT, TEXT)
    assert (new.num_computed_tokens, scheduled.num_scheduled_tokens[new.req_id]) == (3 * BLOCK, 5)
    assert request.prefill_stats.num_cached_tokens == 3 * BLOCK
    params = new.sampling_params
    assert (params.seed, params.min_tokens, params.max_tokens, params.presence_penalty) == (3, 150, 200, 0.5)
    assert request.num_output_tokens == len(TEXT) - PROMPT
    core.core.abort_requests([new.req_id])


def test_without_a_preemption_vllm_does_not_believe_it(core: Core, monkeypatch: Any) -> None:
    """Why `bring_back` says that there was one: else more found than there is prompt ends the engine."""
    scheduler = core.core.scheduler
    monkeypatch.setattr(scheduler, "use_v2_model_runner", True)
    request = brought(core, 2, asked())
    request.num_preemptions = 0
    scheduler.add_request(request)
    with pytest.raises(AssertionError):
        scheduler.schedule()
    core.core.abort_requests([request.request_id])


def test_what_only_vllm_refuses_is_refused_by_name(core: Core) -> None:
    """Its ranges are narrower than ours, and it says so in an exception of its own."""
    with pytest.raises(HoldfastError, match="presence_penalty") as caught:
        core.orders.take(3, GenerateRequest("r", [5], 1, Sampling(9, 0, presence_penalty=3.0)))
    assert caught.value.code == Code.INVALID_REQUEST
    assert core.orders.take(3, asked(top_k=-1)) is not None
