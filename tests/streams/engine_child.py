"""A small engine in a process of its own: speaks the wire, makes tokens at a pace, and kills itself (SIGKILL) in the
first step that has a poisoned request in it. `engine_child.py FOLDER NUMBER TTFT_MS`; it stands by until a line on
its standard input says under which epoch it leads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
from roster_rig import ScriptedWorker

from holdfast.core.requests import Output
from holdfast.wire.messages import Active, Cancel, Generate, Message, Step

POISON = 666
STEP_S = 0.005


def next_token(tokens: list[int]) -> int:
    """Sampling is a function of the tokens so far: a resumed stream goes on as the unbroken one would."""
    return (tokens[-1] * 31 + len(tokens) * 7) % 600


class ChildEngine(ScriptedWorker):
    def __init__(self, folder: Path, number: int, ttft_s: float) -> None:
        super().__init__(folder, number)
        self.welcome = msgspec.structs.replace(self.welcome, concurrency=64, active=False, group="g")
        self.ttft_s = ttft_s
        self.running: dict[int, tuple[Generate, float]] = {}

    def taken(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, Generate):
            self.running[message.stream] = (message, loop.time() + self.ttft_s)
        elif isinstance(message, Cancel):
            for stream in message.streams:
                self.running.pop(stream, None)

    def step(self, now_s: float) -> None:
        due = [(number, message.request) for number, (message, at_s) in self.running.items() if at_s <= now_s]
        if any(POISON in request.tokens[: request.prompt_len] for _, request in due):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = []
        for number, request in due:
            request.tokens.append(next_token(request.tokens))
            over = len(request.tokens) - request.prompt_len >= request.sampling.max_tokens
            outputs.append(Output(number, request.tokens[-1:], "length" if over else None))
            if over:
                del self.running[number]
        if outputs:
            self.send(Step(outputs))


async def main(folder: Path, number: int, ttft_s: float) -> None:
    engine = ChildEngine(folder, number, ttft_s)
    await engine.start()
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print("up", flush=True)
    order = loop.create_task(orders.readline())
    seen = 0
    while not (orders.at_eof() and order.done()):  # its test is gone
        for message in engine.received[seen:]:
            engine.taken(message)
        seen = len(engine.received)
        if order.done() and order.result():
            engine.send(Active(int(order.result())))
            order = loop.create_task(orders.readline())
        engine.step(loop.time())
        await asyncio.sleep(STEP_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000))
