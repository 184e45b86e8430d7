"""Implements a client's connection to a worker: of a frontend, of control, or of another engine of its group."""

from __future__ import annotations

import asyncio
from typing import cast

from holdfast.wire.connection import ClientConnection
from holdfast.wire.messages import VERSIONS, Hello, Refused, ToFrontend, Welcome, decode_to_frontend


class WorkerConnection(ClientConnection):
    """A connection to a worker. Subclasses handle the messages, and pass on what they do not handle. A message of
    unknown kind is ignored: ending the connection would fail all of its streams."""

    purpose = "data"
    ignores_unknown = True

    def __init__(self, peer: str) -> None:
        super().__init__("worker", decode_to_frontend)
        self.hello = Hello(VERSIONS.first, self.purpose, peer, VERSIONS.last, VERSIONS.features)
        self.welcomed = False

    async def welcome(self, timeout_s: float) -> Welcome:
        """Say hello and return the worker's answer; raise ConnectionError or TimeoutError if there is none."""
        async with asyncio.timeout(timeout_s):
            return cast(Welcome, await self.ask(Welcome, self.hello))

    def on_message(self, message: ToFrontend) -> None:
        if isinstance(message, Refused):  # of the hello, or of a later message
            self.end(message.code, f"worker refused the connection: {message.reason}")
        elif self.welcomed:
            return
        elif isinstance(message, Welcome) and message.version in VERSIONS:
            self.welcomed = True
            self.on_welcome(message)
            self.answer(Welcome, message)
        elif isinstance(message, Welcome):
            why = f"the worker speaks wire version {message.version}, this process speaks {VERSIONS}"
            self.end("", f"{why}; upgrade the older one")

    def on_welcome(self, welcome: Welcome) -> None:
        """Run before later messages of the same read are handled."""
