"""Requests counted in and out: how many are under way, and each one's figures once it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.frontend.access import AccessLog
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.reply import Reply
from holdfast.streams.directory import ModelDirectory


@dataclass(slots=True)
class Accounts:
    """All requests of a frontend."""

    directory: ModelDirectory
    metrics: FrontendMetrics
    access: AccessLog | None = None
    inflight: int = 0
    _became_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, endpoint: str) -> Account:
        """A request has come."""
        self.inflight += 1
        return Account(self, endpoint, asyncio.get_running_loop().time())

    def ended(self) -> None:
        self.inflight -= 1
        if self.inflight == 0:
            self._became_idle.set()

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while self.inflight:
            self._became_idle.clear()
            await self._became_idle.wait()


@dataclass(slots=True)
class Account:
    """One request, over once it was told so: with its reply, with None for a refusal, or when its client left early."""

    accounts: Accounts
    endpoint: str
    began_s: float
    model: str = "unknown"
    kind: str = "unknown"
    _open: bool = True

    def named(self, parsed: ParsedRequest) -> None:
        """What it asks for is known."""
        # A name a client made up must not become a label for ever.
        self.model = parsed.model if self.accounts.directory.knows(parsed.model) else "unknown"
        self.kind = "stream" if parsed.stream else "unary"
        self.accounts.metrics.inflight.labels(self.model).inc()

    def client_left(self) -> None:
        """Before there was a reply."""
        self._close("cancelled", None)

    def over(self, reply: Reply | None) -> None:
        self._close(reply.outcome if reply is not None else "error", reply)

    def _close(self, outcome: str, reply: Reply | None) -> None:
        if not self._open:
            return
        self._open = False
        metrics = self.accounts.metrics
        self.accounts.ended()
        if self.kind != "unknown":
            metrics.inflight.labels(self.model).dec()
        metrics.requests.labels(self.model, self.endpoint, self.kind, outcome).inc()
        if outcome == "cancelled":
            metrics.disconnects.inc()
        if reply is not None:
            self._measure(reply, metrics)
            if self.accounts.access is not None:
                self.accounts.access.measured(reply, self.model)

    def _measure(self, reply: Reply, shown: FrontendMetrics) -> None:
        model = self.model
        now_s = asyncio.get_running_loop().time()
        made = reply.completion_token_count()
        shown.duration.labels(model).observe(now_s - self.began_s)
        shown.input_tokens.labels(model).observe(reply.prompt_token_count())
        shown.output_tokens.labels(model).observe(made)
        shown.output_total.labels(model).inc(made)
        if reply.first_token_s:
            shown.ttft.labels(model).observe(reply.first_token_s - self.began_s)
