"""What a worker asks, in vLLM's words, and what vLLM answers, in the worker's. No vLLM is loaded before the first.

Always true: a request that cannot be run is refused before vLLM hears of it, since much that vLLM finds out later ends
its engine; nothing is said of a stream that was cancelled or has ended, whatever vLLM still has of it in flight, as no
request's name is ever used again; all fields are given by name, so a version may have others.

A resumed stream is one whole text. Drawn by us (sampling.py) vLLM takes all of it for a prompt; natively drawn, what
was generated stays generated, and `bring_back` must hand it over. Which tokens end a stream is told with the request:
vLLM itself is not told of the model's own, so its `ignore_eos` has nothing to ignore.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import count
from typing import Any

import msgspec

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, SEED_MAX, Failure, GenerateRequest, Output, TokenLogprobs
from holdfast.engines.paged.checks import Room, check, end_of, invalid
from holdfast.engines.paged.scheduler import PASSED_MAX
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.sampling.settings import has_nudges, has_penalties, is_greedy
from holdfast.engines.vllm.drawing import Asked

ASKED = "holdfast"  # among a request's extra arguments: what its draws need

# What the second model runner has room for; with more it raises inside a step, which ends the engine.
NATIVE_BIAS_MAX = 1024
NATIVE_STOPS_MAX = 128

# Between those who come back with some of their answer and those who have shown nothing: more than ever arrive.
SHOWN_FIRST = 1 << 48

# Of this process, and not of one book: vLLM may still have steps of a name that an earlier book gave.
_numbers = count(1)

# vLLM's other ends. Both mean that it did not finish here, and that another engine can.
UNFINISHED = ("abort", "error")


class Order(msgspec.Struct, frozen=True):
    """A request that vLLM has: under which name, for which stream, and what its outputs must tell."""

    name: str
    stream: int
    canary: bool
    top_logprobs: int | None


class Orders:
    """The requests of one engine. One thread: that in which requests come and outputs leave."""

    def __init__(self, settings: SchedulerSettings, room: Room, *, native: bool) -> None:
        self._settings = settings
        self._room = room
        self._native = native
        self._by_name: dict[str, Order] = {}
        self._by_stream: dict[int, Order] = {}
        self._early: list[Output] = []  # last outputs of requests that had nothing left to make

    def __repr__(self) -> str:
        return f"<{len(self._by_name)} requests with vLLM>"

    def __len__(self) -> int:
        return len(self._by_name)

    def take(self, stream: int, request: GenerateRequest) -> Any:
        """The EngineCoreRequest to give to vLLM, or None: it has nothing left to make, and `take_early` tells its last
        output. HoldfastError, and nothing has changed."""
        settings, room = self._settings, self._room
        if stream in self._by_stream or any(output.stream == stream for output in self._early):
            raise invalid(f"stream {stream} is already in use")
        check(request, settings, room)
        if not 0 <= request.sampling.seed <= SEED_MAX:
            raise invalid(f"seed must be 0 to {SEED_MAX}, got {request.sampling.seed}")
        canary = request.tier == CANARY_TIER
        self._check_place(canary)
        end = end_of(request, settings, room)
        if len(request.tokens) >= end:
            self._early.append(Output(stream, [], "length"))
            return None
        number = next(_numbers)
        name = f"{stream}-{number}"
        made = engine_request(name, number, request, settings, end=end, native=self._native)
        order = Order(name, stream, canary, request.sampling.top_logprobs)
        self._by_name[name] = self._by_stream[stream] = order
        return made

    def _check_place(self, canary: bool) -> None:
        settings, canaries = self._settings, sum(order.canary for order in self._by_name.values())
        others = len(self._by_name) - canaries + len(self._early)
        if canaries if canary else others >= settings.concurrency + settings.queue:
            raise HoldfastError(Code.WORKER_OVERLOADED, f"{len(self._by_name)} streams run or wait here")

    def cancel(self, stream: int) -> str | None:
        """Forget a stream: the name that vLLM is to abort, None if it has none of it."""
        self._early = [output for output in self._early if output.stream != stream]
        order = self._by_stream.pop(stream, None)
        return self._by_name.pop(order.name).name if order is not None else None

    def name_of(self, stream: int) -> str | None:
        """Return the name that vLLM knows a stream by; None: it has none of it."""
        order = self._by_stream.get(stream)
        return order.name if order is not None else None

    def take_early(self) -> list[Output]:
        """The last outputs that no step makes; to be handed over once."""
        taken, self._early = self._early, []
        return taken

    def clear(self) -> list[int]:
        """Forget everything: which streams that were."""
        told = [*self._by_stream, *(output.stream for output in self._early)]
        self._by_name.clear()
        self._by_stream.clear()
        self._early.clear()
        return told

    def told(self, outputs: Iterable[Any]) -> list[Output]:
        """A step's EngineCoreOutputs as the worker's, without those of streams that are gone."""
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


def output_of(each: Any, order: Order) -> Output:
    """One EngineCoreOutput."""
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
    """vLLM's rows have the chosen token first, then as many of the likeliest as anybody in the batch asked for."""
    last = 1 + max(0, top)
    told = []
    for ids, values in zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True):
        told.append(TokenLogprobs(values[0], list(zip(ids[1:last], values[1:last], strict=True))))
    return told


def engine_request(
    name: str, number: int, request: GenerateRequest, settings: SchedulerSettings, *, end: int, native: bool
) -> Any:
    """The EngineCoreRequest of a request that passed all checks. `number` counts them; `end`: where its text ends."""
    from vllm.v1.engine import EngineCoreRequest

    stops = stops_of(request, settings)
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": request.tokens[: request.prompt_len] if native else request.tokens,
        "sampling_params": sampling_params(request, stops, settings.vocabulary, end=end, native=native),
        "arrival_time": float(number),  # only compared with the others'
        "priority": priority_of(request, number),
    }
    return EngineCoreRequest(**dict.fromkeys(_required(EngineCoreRequest)), **fields)


@cache
def _required(kind: type) -> tuple[str, ...]:
    """The fields that this version wants and that mean nothing here: images, adapters, other ranks."""
    given = ("request_id", "prompt_token_ids", "sampling_params", "arrival_time", "priority")
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.required and each.name not in given)


def stops_of(request: GenerateRequest, settings: SchedulerSettings) -> frozenset[int]:
    """The tokens that end it. An id that no token has, of the model's own too, is harmless here, and not to vLLM."""
    stops = {*request.stop_token_ids, *(() if request.sampling.ignore_eos else settings.eos_token_ids)}
    return frozenset(token for token in stops if 0 <= token < settings.vocabulary)


def priority_of(request: GenerateRequest, number: int) -> int:
    """Its turn: the smallest runs first, and the largest gives up its blocks first. As the paged scheduler has it: who
    comes back with some of the answer, then tiers, of which none lets more than so many pass."""
    if request.tier == CANARY_TIER:
        return -1
    shown = len(request.tokens) > request.prompt_len
    return (0 if shown else SHOWN_FIRST) + number + request.tier * PASSED_MAX


def sampling_params(
    request: GenerateRequest, stops: frozenset[int], vocabulary: int, *, end: int, native: bool
) -> Any:
    """vLLM's SamplingParams. HoldfastError for what vLLM does not take."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        return SamplingParams(**sampling_fields(request, stops, vocabulary, end=end, native=native))
    except (VLLMValidationError, TypeError, ValueError) as error:  # by its own ranges, which are narrower than ours
        raise invalid(str(error)) from None


def sampling_fields(
    request: GenerateRequest, stops: frozenset[int], vocabulary: int, *, end: int, native: bool
) -> dict[str, Any]:
    """The fields of SamplingParams. Lengths count from where vLLM sees generated tokens begin: natively at the prompt's
    end, else at the end of what was brought."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "max_tokens": end - (request.prompt_len if native else len(request.tokens)),
        "stop_token_ids": sorted(stops),
        "detokenize": False,
    }
    if sampling.top_logprobs is not None:
        fields["logprobs"] = min(max(0, sampling.top_logprobs), vocabulary)
    if request.tier == CANARY_TIER:  # what an earlier one computed says nothing of the weights as they are now
        fields["skip_reading_prefix_cache"] = True
    if native:
        return fields | _native_fields(request, len(stops), fields["max_tokens"])
    plain = is_greedy(sampling) and not has_penalties(sampling) and not has_nudges(sampling)
    asked = None if plain else {ASKED: Asked(sampling, request.prompt_len, stops)}
    return fields | {"temperature": 0.0, "extra_args": asked}


def _native_fields(request: GenerateRequest, stops: int, max_tokens: int) -> dict[str, Any]:
    sampling = request.sampling
    if len(sampling.logit_bias or ()) > NATIVE_BIAS_MAX:
        raise invalid(f"logit_bias has {len(sampling.logit_bias or ())} entries, and {NATIVE_BIAS_MAX} at most fit")
    if sampling.min_tokens > 0 and stops > NATIVE_STOPS_MAX:
        raise invalid(f"stop_token_ids are {stops}, and with min_tokens {NATIVE_STOPS_MAX} at most fit")
    greedy = is_greedy(sampling)
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
