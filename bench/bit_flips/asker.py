"""A canary's connection to one worker, which asks one question after the other as control does."""

from __future__ import annotations

import asyncio

from holdfast.core.address import TcpAddress, UnixAddress, parse_address
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.health.expectations import TOP, CanaryAnswer, CanaryQuestion, answer_of
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Generate, Hello, Message, Step, Welcome, decode_to_frontend

ANSWER_S = 60.0


class Gone(Exception):
    """The worker's process ended while it was asked."""


class Asker:
    """Holds a canary's connection to one worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter, self._heard = FrameSplitter(), list[Message]()
        self._numbers = 0
        self.welcome: Welcome

    @classmethod
    async def connect(cls, address: str) -> Asker:
        where = parse_address(address)
        if isinstance(where, UnixAddress):
            made = cls(*await asyncio.open_unix_connection(where.path))
        else:
            assert isinstance(where, TcpAddress)
            made = cls(*await asyncio.open_connection(where.host, where.port))
        made._send(Hello(VERSION, "canary", "prove-bit-flips"))
        welcome = await made._next()
        assert isinstance(welcome, Welcome), welcome
        made.welcome = welcome
        return made

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer:
        self._numbers += 1
        sampling = Sampling(question.tokens, 0, temperature=0.0, top_logprobs=TOP, ignore_eos=True)
        prompt = list(question.prompt)
        self._send(Generate(self._numbers, GenerateRequest("canary", prompt, len(prompt), sampling)))
        outputs: list[Output] = []
        while not outputs or (outputs[-1].finish is None and outputs[-1].failure is None):
            message = await self._next()
            if isinstance(message, Step):
                outputs += [output for output in message.outputs if output.stream == self._numbers]
        if outputs[-1].failure is not None:
            raise Gone(outputs[-1].failure.message)
        tokens = [token for output in outputs for token in output.tokens]
        return answer_of(tokens, [each for output in outputs for each in output.logprobs or []])

    def close(self) -> None:
        self._writer.close()

    def _send(self, message: Message) -> None:
        self._writer.write(encode(message))

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(ANSWER_S):
                while not self._heard:
                    data = await self._reader.read(1 << 16)
                    if not data:
                        raise Gone("the connection ended")
                    self._heard += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]
        except (TimeoutError, ConnectionError) as error:
            raise Gone(repr(error)) from error
        return self._heard.pop(0)
