"""Turns a parsed request into streams: model, prompt, context check, seeds, choices.

A short prompt goes from body to worker in one synchronous call. A long prompt is tokenized in a thread, and a request
for a model without a worker set waits for it; both run in a separate task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import SEED_MAX, GenerateRequest
from holdfast.frontend.api.errors import invalid, model_not_found, of_failure
from holdfast.frontend.api.params import build_sampling, check_token_ids, context_exceeded
from holdfast.frontend.api.request import CHOICES_MAX, ParsedRequest
from holdfast.frontend.model_text import TextSide
from holdfast.frontend.reply import Choice, EndTokens, Reply, StreamReply, WholeReply
from holdfast.frontend.request_tracker import TrackedRequest
from holdfast.frontend.shapes import ReplyShape
from holdfast.frontend.text.stops import StopWatcher
from holdfast.frontend.text.tokenizer import ENCODE_NOW_CHARS_MAX, TooManyTokens
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.ledger import Ledger
from holdfast.wire.http.connection import HttpConnection

# Tokens sent to workers in one turn of the loop: 3-5 ms of encoding and writing; no other stream may wait for more than
# 20 ms. Each stream costs as much as a thousand tokens, in addition to its own.
LAUNCH_TOKENS_MAX = 300_000
LAUNCH_TOKENS_EACH = 1_000


PROMPT_CHARS_MAX = 8_000_000  # text beyond any context; refused before it is tokenized


@dataclass(slots=True)
class Admission:
    """Turns admitted requests into streams and replies."""

    directory: ModelDirectory
    dispatcher: Dispatcher
    rng: random.Random
    wall_clock: Callable[[], float]
    on_starved: Callable[[], None] = lambda: None  # called for a request whose set has no routable worker

    def find_set(self, parsed: ParsedRequest) -> WorkerSet | None:
        """Return the set that will serve it; None if it has to wait for a worker. Raise ApiError if the model is
        unknown."""
        directory = self.directory
        workers = directory.pick(parsed.model)
        knows_all = directory.has_seen_any or directory.is_fleet
        if workers is None and knows_all and not directory.knows(parsed.model):
            raise model_not_found(parsed.model)
        if workers is not None and parsed.kind == "chat" and workers.card.model_type != "chat":
            raise invalid("model", f"the model {parsed.model!r} does not chat; use /v1/completions")
        return workers

    def prompt_texts(self, parsed: ParsedRequest, text: TextSide) -> list[str | list[int]]:
        """Return the prompts as text or token ids, bounded."""
        if len(parsed.prompts) * parsed.n > CHOICES_MAX:
            raise invalid("n", f"prompts times 'n' is over {CHOICES_MAX}")
        check_token_ids(parsed, text.tokenizer.vocab_size)
        if parsed.kind != "chat":
            prompts = parsed.prompts
        else:
            try:
                prompts = [text.render_chat(parsed.messages)]
            except HoldfastError as error:
                raise of_failure(error.code, error.message, param="messages") from error
        size = sum(len(prompt) for prompt in prompts)
        if size > PROMPT_CHARS_MAX:
            why = f"'{parsed.source}' is over {PROMPT_CHARS_MAX} characters; shorten it."
            raise context_exceeded(parsed.source, text.card.context_tokens_max, why)
        return prompts

    @staticmethod
    def is_short(prompts: list[str | list[int]]) -> bool:
        return sum(len(prompt) for prompt in prompts) <= ENCODE_NOW_CHARS_MAX

    def encode_now(self, parsed: ParsedRequest, text: TextSide, prompts: list[str | list[int]]) -> list[list[int]]:
        special = parsed.kind != "chat"
        return [
            text.tokenizer.encode_now(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    async def encode(self, parsed: ParsedRequest, text: TextSide, prompts: list[str | list[int]]) -> list[list[int]]:
        special = parsed.kind != "chat"
        return [
            await self._encode_one(parsed, text, prompt, special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    async def _encode_one(self, parsed: ParsedRequest, text: TextSide, prompt: str, special: bool) -> list[int]:
        context = text.card.context_tokens_max
        try:
            return await text.tokenizer.encode(prompt, context, add_special_tokens=special)
        except TooManyTokens as error:
            why = f"'{parsed.source}' takes at least {error.count} tokens; shorten it."
            raise context_exceeded(parsed.source, context, why) from None

    def launch(
        self,
        connection: HttpConnection,
        parsed: ParsedRequest,
        workers: WorkerSet,
        text: TextSide,
        prompts: list[list[int]],
        *,
        tracked: TrackedRequest,
    ) -> None:
        """Make the reply and launch its streams. If it raises ApiError, nothing was started."""
        context = text.card.context_tokens_max
        seed = parsed.seed if parsed.seed is not None else self.rng.getrandbits(62)
        sampled = [
            build_sampling(parsed, text.generation_defaults, (seed + place) & SEED_MAX, len(prompt), context)
            for prompt in prompts
            for place in range(parsed.n)
        ]
        shape = self._shape(parsed, workers, tracked.id)
        kind = StreamReply if parsed.stream else WholeReply
        reply = tracked.reply = kind(connection, shape, text.tokenizer.table, tracked.over)
        reply.prompts = prompts
        if isinstance(reply, StreamReply):
            reply.notes = tracked.wait_notes(connection)
        reply.now, reply.began_s = asyncio.get_running_loop().time, tracked.began_s
        # A request that waited for its model's first worker counts in the queue from its arrival.
        since_s = tracked.began_s if tracked.waited and self.directory.wants(parsed.model) else None
        flights: list[Flight] = []
        ends = _ends(parsed, text)
        for index, sampling in enumerate(sampled):
            prompt = prompts[index // parsed.n]
            stops = StopWatcher(parsed.stops, parsed.include_stop) if parsed.stops else None
            choice = Choice(
                reply,
                index,
                text.tokenizer.table.detokenizer(),
                stops,
                ends,
                min_tokens=sampling.min_tokens,
                keep_ids=parsed.return_token_ids,
            )
            request = GenerateRequest(
                f"{shape.response_id}-{index}",
                prompt,  # shared by its choices, and never written to
                len(prompt),
                sampling,
                list(parsed.stop_token_ids),
                tracked.tier,
            )
            choice.flight = Flight(Ledger(request), workers, choice)
            if since_s is not None:
                choice.flight.set_wait_start(since_s)
            reply.add(choice)
            flights.append(choice.flight)
        reply.release = partial(self._abandon_all, flights)
        connection.responder = reply
        self._launch_some(reply, iter(flights))

    def _launch_some(self, reply: Reply, flights: Iterator[Flight]) -> None:
        """Launch as many of a reply's streams as one turn of the loop has room for; the others follow in the next."""
        room = LAUNCH_TOKENS_MAX
        for flight in flights:
            if reply.outcome:
                return
            self.dispatcher.launch(flight)
            if not flight.workers.table.routable_count:
                self.on_starved()
            room -= LAUNCH_TOKENS_EACH + flight.ledger.length
            if room <= 0:
                asyncio.get_running_loop().call_soon(self._launch_some, reply, flights)
                return

    def _abandon_all(self, flights: list[Flight]) -> None:
        for flight in flights:
            self.dispatcher.abandon(flight)

    def _shape(self, parsed: ParsedRequest, workers: WorkerSet, answer_id: str) -> ReplyShape:
        chat = parsed.kind == "chat"
        return ReplyShape(
            chat=chat,
            response_id=answer_id,
            created=int(self.wall_clock()),
            model=parsed.model,
            usage=parsed.usage,
            token_ids=parsed.return_token_ids,
            logprobs=parsed.top_logprobs is not None,
            deterministic=workers.deterministic,
        )


def _ends(parsed: ParsedRequest, text: TextSide) -> EndTokens:
    shown = frozenset(parsed.stop_token_ids) if parsed.include_stop else frozenset()
    hidden = text.eos_ids | (frozenset(parsed.stop_token_ids) - shown)
    return EndTokens(hidden, text.eos_id if not parsed.ignore_eos else -1)
