"""From a parsed request to streams on their way: model, prompt, context check, seeds, choices.

A short prompt goes from body to worker in one synchronous call; a long one is tokenized in a thread, and a request
for a model that is not there yet waits for it, each in a task of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import SEED_MAX, GenerateRequest
from holdfast.frontend.accounts import Account
from holdfast.frontend.api.errors import invalid, model_not_found, of_failure
from holdfast.frontend.api.params import build_sampling, check_token_ids, context_exceeded
from holdfast.frontend.api.request import CHOICES_MAX, ParsedRequest
from holdfast.frontend.choice import Choice, EndTokens
from holdfast.frontend.model_text import ModelText
from holdfast.frontend.reply import Reply, ReplyShape, StreamReply
from holdfast.frontend.text.stops import StopWatcher
from holdfast.frontend.text.tokenizer import ENCODE_NOW_CHARS_MAX, TooManyTokens
from holdfast.frontend.whole_reply import WholeReply
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.ledger import Ledger
from holdfast.wire.http.connection import HttpConnection

# How much is sent to workers in one turn of the loop: 3-5 ms of encoding and writing, where no other stream may wait
# for more than 20. A stream costs what a prompt of a thousand tokens does, whatever its own.
LAUNCH_TOKENS_MAX = 300_000
LAUNCH_TOKENS_EACH = 1_000


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Bounds of what is admitted."""

    prompt_chars_max: int = 8_000_000  # text beyond any context; refused before it is tokenized


class Admission:
    """Lets requests in."""

    def __init__(
        self,
        directory: ModelDirectory,
        dispatcher: Dispatcher,
        settings: AdmissionSettings,
        rng: random.Random,
        wall_clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self.settings = settings
        self._rng = rng
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self.on_starved: Callable[[], None] = lambda: None  # a request has come for workers of whom none serves

    def find_set(self, parsed: ParsedRequest) -> WorkerSet | None:
        """The set that will serve it; None while the model, or any model, is waited for; ApiError if it is unknown."""
        directory = self._directory
        workers = directory.pick(parsed.model)
        told = directory.has_seen_any or directory.is_fleet
        if workers is None and told and not directory.knows(parsed.model):
            raise model_not_found(parsed.model)
        if workers is not None and parsed.kind == "chat" and workers.card.model_type != "chat":
            raise invalid("model", f"the model {parsed.model!r} does not chat; use /v1/completions")
        return workers

    def prompt_texts(self, parsed: ParsedRequest, text: ModelText) -> list[str | list[int]]:
        """The prompts as text or token ids, bounded."""
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
        if size > self.settings.prompt_chars_max:
            param = "messages" if parsed.kind == "chat" else "prompt"
            why = f"'{param}' is over {self.settings.prompt_chars_max} characters; shorten it."
            raise context_exceeded(param, text.card.context_tokens_max, why)
        return prompts

    @staticmethod
    def is_short(prompts: list[str | list[int]]) -> bool:
        return sum(len(prompt) for prompt in prompts) <= ENCODE_NOW_CHARS_MAX

    def encode_now(self, parsed: ParsedRequest, text: ModelText, prompts: list[str | list[int]]) -> list[list[int]]:
        special = parsed.kind != "chat"
        return [
            text.tokenizer.encode_now(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    async def encode(self, parsed: ParsedRequest, text: ModelText, prompts: list[str | list[int]]) -> list[list[int]]:
        special = parsed.kind != "chat"
        return [
            await self._encode_one(parsed, text, prompt, special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    async def _encode_one(self, parsed: ParsedRequest, text: ModelText, prompt: str, special: bool) -> list[int]:
        context = text.card.context_tokens_max
        try:
            return await text.tokenizer.encode(prompt, context, add_special_tokens=special)
        except TooManyTokens as error:
            param = "messages" if parsed.kind == "chat" else "prompt"
            why = f"'{param}' takes at least {error.count} tokens; shorten it."
            raise context_exceeded(param, context, why) from None

    def launch(
        self,
        connection: HttpConnection,
        parsed: ParsedRequest,
        workers: WorkerSet,
        text: ModelText,
        prompts: list[list[int]],
        *,
        account: Account,
    ) -> None:
        """Everything is known: make the reply and put its streams on their way. ApiError leaves nothing behind."""
        context = text.card.context_tokens_max
        seed = parsed.seed if parsed.seed is not None else self._rng.getrandbits(62)
        sampled = [
            build_sampling(parsed, text.generation_defaults, (seed + place) & SEED_MAX, len(prompt), context)
            for prompt in prompts
            for place in range(parsed.n)
        ]
        shape = self._shape(parsed, workers, account.id)
        kind = StreamReply if parsed.stream else WholeReply
        reply = account.reply = kind(connection, shape, text.tokenizer.table, account.over)
        reply.prompts = prompts
        if isinstance(reply, StreamReply):
            reply.notes = account.notes
        reply.now = self._loop.time
        # Who was to wait for its model's first worker stands in line since it came.
        since_s = account.began_s if account.waited and self._directory.wants(parsed.model) else None
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
                account.tier,
            )
            choice.flight = Flight(Ledger(request), workers, choice)
            if since_s is not None:
                choice.flight.waited(since_s)
            reply.add(choice)
            flights.append(choice.flight)
        reply.release = partial(self._abandon_all, flights)
        connection.responder = reply
        self._launch_some(reply, iter(flights))

    def _launch_some(self, reply: Reply, flights: Iterator[Flight]) -> None:
        """As many of a reply's streams as one turn of the loop has room for; the rest in the next."""
        room = LAUNCH_TOKENS_MAX
        for flight in flights:
            if reply.outcome:
                return
            self._dispatcher.launch(flight)
            if not flight.workers.table.routable_count:
                self.on_starved()
            room -= LAUNCH_TOKENS_EACH + flight.ledger.length
            if room <= 0:
                self._loop.call_soon(self._launch_some, reply, flights)
                return

    def _abandon_all(self, flights: list[Flight]) -> None:
        for flight in flights:
            self._dispatcher.abandon(flight)

    def _shape(self, parsed: ParsedRequest, workers: WorkerSet, answer_id: str) -> ReplyShape:
        chat = parsed.kind == "chat"
        return ReplyShape(
            chat=chat,
            response_id=answer_id,
            created=int(self._wall_clock()),
            model=parsed.model,
            usage=parsed.usage,
            token_ids=parsed.return_token_ids,
            logprobs=parsed.top_logprobs is not None,
            deterministic=workers.deterministic,
        )


def _ends(parsed: ParsedRequest, text: ModelText) -> EndTokens:
    shown = frozenset(parsed.stop_token_ids) if parsed.include_stop else frozenset()
    hidden = text.eos_ids | (frozenset(parsed.stop_token_ids) - shown)
    return EndTokens(hidden, text.eos_id if not parsed.ignore_eos else -1)
