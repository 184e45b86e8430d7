"""Translates a worker's requests into vLLM's, and vLLM's outputs into the worker's. vLLM is imported at the first
request.

Always true:
- A request that cannot run is refused before vLLM gets it, since many errors that vLLM detects later end its engine.
- Nothing is output for a stream that was cancelled or has ended, even if vLLM still has steps of it in flight: a
  request's name is never used again.
- All fields are passed by name, so another vLLM version may have more.

A resumed stream is one whole text. If Holdfast draws (sampling.py), vLLM gets all of it as a prompt. If vLLM draws
natively, generated tokens stay generated, and `bring_back` hands them over. The tokens that end a stream come with the
request; vLLM does not know the model's own end tokens, so its `ignore_eos` has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import count
from typing import Any

import msgspec

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, SEED_MAX, Failure, GenerateRequest, Output, TokenLogprobs
from holdfast.engines.paged.blocks import StreamCapacity
from holdfast.engines.paged.scheduler import PASSED_MAX, SchedulerSettings, checked_end, invalid
from holdfast.engines.vllm.drawing import Asked

ASKED = "holdfast"  # among a request's extra arguments: what its draws need

# Limits of the second model runner: beyond these it raises inside a step, which ends the engine.
NATIVE_BIAS_MAX = 1024
NATIVE_STOPS_MAX = 128

# Priority distance between resumed and new streams: more than ever arrive.
SHOWN_FIRST = 1 << 48

# One counter per process, not per `OpenRequests`: vLLM may still have steps with a name of an earlier one.
_numbers = count(1)

# vLLM's other finish reasons. Both mean that the stream did not finish here, and that another engine can finish it.
UNFINISHED = ("abort", "error")


class OpenRequest(msgspec.Struct, frozen=True):
    """A request that vLLM has: its name there, its stream, and what its outputs must contain."""

    name: str
    stream: int
    canary: bool
    top_logprobs: int | None


class OpenRequests:
    """The requests of one engine; used only in the thread in which requests come and outputs leave."""

    def __init__(self, settings: SchedulerSettings, room: StreamCapacity, *, native: bool) -> None:
        self._settings = settings
        self._room = room
        self._native = native
        self._by_name: dict[str, OpenRequest] = {}
        self._by_stream: dict[int, OpenRequest] = {}
        self._early: list[Output] = []  # last outputs of requests that needed no further token

    def __repr__(self) -> str:
        return f"<{len(self._by_name)} requests with vLLM>"

    def __len__(self) -> int:
        return len(self._by_name)

    def take(self, stream: int, request: GenerateRequest) -> Any:
        """Return the EngineCoreRequest for vLLM, or None if the request needs no further token: then `take_early` has
        its last output. If it raises HoldfastError, nothing has changed."""
        settings, room = self._settings, self._room
        if stream in self._by_stream or any(output.stream == stream for output in self._early):
            raise invalid(f"stream {stream} is already in use")
        end = checked_end(request, settings, room)
        if not 0 <= request.sampling.seed <= SEED_MAX:
            raise invalid(f"seed must be 0 to {SEED_MAX}, got {request.sampling.seed}")
        canary = request.tier == CANARY_TIER
        canaries = sum(order.canary for order in self._by_name.values())
        others = len(self._by_name) - canaries + len(self._early)
        if canaries if canary else others >= settings.concurrency + settings.queue:
            raise HoldfastError(Code.WORKER_OVERLOADED, f"{len(self._by_name)} streams run or wait here")
        if len(request.tokens) >= end:
            self._early.append(Output(stream, [], "length"))
            return None
        number = next(_numbers)
        name = f"{stream}-{number}"
        made = engine_request(name, number, request, settings, end=end, native=self._native)
        order = OpenRequest(name, stream, canary, request.sampling.top_logprobs)
        self._by_name[name] = self._by_stream[stream] = order
        return made

    def cancel(self, stream: int) -> str | None:
        """Forget a stream; return the name that vLLM must abort, None if vLLM does not have it."""
        self._early = [output for output in self._early if output.stream != stream]
        order = self._by_stream.pop(stream, None)
        return self._by_name.pop(order.name).name if order is not None else None

    def name_of(self, stream: int) -> str | None:
        """Return a stream's name in vLLM; None if vLLM does not have it."""
        order = self._by_stream.get(stream)
        return order.name if order is not None else None

    def take_early(self) -> list[Output]:
        """Return and remove the last outputs that need no step."""
        taken, self._early = self._early, []
        return taken

    def clear(self) -> list[int]:
        """Forget all streams and return them."""
        told = [*self._by_stream, *(output.stream for output in self._early)]
        self._by_name.clear()
        self._by_stream.clear()
        self._early.clear()
        return told

    def translate(self, outputs: Iterable[Any]) -> list[Output]:
        """Convert a step's EngineCoreOutputs to the worker's outputs; leave out streams that are gone."""
        made: list[Output] = []
        for each in outputs:
            order = self._by_name.get(each.request_id)
            if order is None:
                continue
            output = output_of(each, order)
            made.append(output)
            if output.finish is not None or output.failure is not None:
                del self._by_name[order.name], self._by_stream[order.stream]
        return made


def output_of(each: Any, order: OpenRequest) -> Output:
    output = Output(order.stream, each.new_token_ids)
    if each.new_logprobs is not None and order.top_logprobs is not None:
        output.logprobs = _logprobs(each.new_logprobs, order.top_logprobs)
    if each.prefill_stats is not None:  # in the first output only
        output.cached = each.prefill_stats.num_cached_tokens
    if each.finish_reason is not None:
        reason = str(each.finish_reason)
        if reason in ("stop", "length"):
            output.finish = reason
        else:
            code = Code.STREAM_INCOMPLETE if reason in UNFINISHED else Code.INTERNAL
            output.failure = Failure(code, f"vLLM ended it with {reason!r}")
    return output


def _logprobs(lists: Any, top: int) -> list[TokenLogprobs]:
    """Convert vLLM's rows. Each has the chosen token first, then the likeliest tokens, as many as the batch's largest
    request asked for."""
    last = 1 + max(0, top)
    told = []
    for ids, values in zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True):
        told.append(TokenLogprobs(values[0], list(zip(ids[1:last], values[1:last], strict=True))))
    return told


def engine_request(
    name: str, number: int, request: GenerateRequest, settings: SchedulerSettings, *, end: int, native: bool
) -> Any:
    """Return the EngineCoreRequest of a request that passed all checks. `number` counts requests; `end` is the text's
    largest length."""
    from vllm.v1.engine import EngineCoreRequest

    stops = stops_of(request, settings)
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": request.tokens[: request.prompt_len] if native else request.tokens,
        "sampling_params": sampling_params(request, stops, settings.vocabulary, end=end, native=native),
        "arrival_time": float(number),  # vLLM only compares them
        "priority": priority_of(request, number),
    }
    return EngineCoreRequest(**dict.fromkeys(_required(EngineCoreRequest)), **fields)


@cache
def _required(kind: type) -> tuple[str, ...]:
    """Return the fields that this version requires but Holdfast does not use: images, adapters, other ranks."""
    given = ("request_id", "prompt_token_ids", "sampling_params", "arrival_time", "priority")
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.required and each.name not in given)


def stops_of(request: GenerateRequest, settings: SchedulerSettings) -> frozenset[int]:
    """Return the tokens that end the stream, without ids beyond the vocabulary, even the model's own: vLLM does not
    tolerate them."""
    stops = {*request.stop_token_ids, *(() if request.sampling.ignore_eos else settings.eos_token_ids)}
    return frozenset(token for token in stops if 0 <= token < settings.vocabulary)


def priority_of(request: GenerateRequest, number: int) -> int:
    """Return the request's priority: the smallest runs first, the largest is preempted first. As in the paged
    scheduler, resumed streams come first, then tiers; the number of later streams that may overtake is bounded."""
    if request.tier == CANARY_TIER:
        return -1
    shown = len(request.tokens) > request.prompt_len
    return (0 if shown else SHOWN_FIRST) + number + request.tier * PASSED_MAX


def sampling_params(request: GenerateRequest, stops: frozenset[int], vocabulary: int, *, end: int, native: bool) -> Any:
    """Return vLLM's SamplingParams; raise HoldfastError for values that vLLM refuses."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        return SamplingParams(**sampling_fields(request, stops, vocabulary, end=end, native=native))
    except (VLLMValidationError, TypeError, ValueError) as error:  # vLLM's ranges are narrower than ours
        raise invalid(str(error)) from None


def sampling_fields(
    request: GenerateRequest, stops: frozenset[int], vocabulary: int, *, end: int, native: bool
) -> dict[str, Any]:
    """Return the fields of SamplingParams. Lengths count from the first token that vLLM takes for generated: if
    `native`, from the prompt's end, else from the end of the request's text."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "max_tokens": end - (request.prompt_len if native else len(request.tokens)),
        "stop_token_ids": sorted(stops),
        "detokenize": False,
    }
    if sampling.top_logprobs is not None:
        fields["logprobs"] = min(max(0, sampling.top_logprobs), vocabulary)
    if request.tier == CANARY_TIER:  # an earlier canary's KV says nothing about the weights' current state
        fields["skip_reading_prefix_cache"] = True
    if native:
        return fields | _native_fields(request, len(stops), fields["max_tokens"])
    plain = sampling.is_greedy and not sampling.has_penalties and not sampling.has_token_rules
    asked = None if plain else {ASKED: Asked(sampling, request.prompt_len, stops)}
    return fields | {"temperature": 0.0, "extra_args": asked}


def _native_fields(request: GenerateRequest, stops: int, max_tokens: int) -> dict[str, Any]:
    sampling = request.sampling
    if len(sampling.logit_bias or ()) > NATIVE_BIAS_MAX:
        raise invalid(f"logit_bias has {len(sampling.logit_bias or ())} entries, and {NATIVE_BIAS_MAX} at most fit")
    if sampling.min_tokens > 0 and stops > NATIVE_STOPS_MAX:
        raise invalid(f"stop_token_ids are {stops}, and with min_tokens {NATIVE_STOPS_MAX} at most fit")
    greedy = sampling.is_greedy
    return {
        "seed": sampling.seed,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias,
        "min_tokens": min(max(0, sampling.min_tokens), max_tokens),
    }
