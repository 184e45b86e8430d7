"""Bodies that would stop the event loop: sent to a `body_reader`, one after the other.

Always true: the loop only copies what is large, and never looks through it; what waits here is bounded in bytes, and
each body in time; a reader that dies costs a second try, and a body under which two die is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from array import array
from collections.abc import Mapping
from typing import cast

import msgspec

from holdfast.frontend.api.errors import SERVER, ApiError
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.body_reader import ANSWER_HEAD, QUESTION_HEAD, Answer, Question

log = logging.getLogger("holdfast.frontend")

# Up to this a body is parsed on the loop: at most 8 ms whatever it holds, where the way to a reader and back is 1 ms.
PARSE_NOW_BYTES_MAX = 256 * 1024
# Of bodies that wait for the reader: sixteen of the largest.
WAITING_BYTES_MAX = 256 * 1024 * 1024
# The largest body takes half a second on a slow core; a reader that needs this long is stuck or stopped.
PARSE_S = 30.0
TRIES = 2  # a reader may have died before this body came


class LargeBodies:
    """Parses bodies in another process, which is started when the first one comes."""

    def __init__(self, chars_max: int) -> None:
        self._chars_max = chars_max
        self._reader: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting_bytes = 0

    async def parse(self, endpoint: str, body: bytes, contexts: Mapping[str, int]) -> ParsedRequest:
        """The request in a body; ApiError refuses it."""
        if self._waiting_bytes + len(body) > WAITING_BYTES_MAX:
            message = "too many large requests are being read"
            raise ApiError(503, message, SERVER, None, "overloaded", retry_after_s=1.0)
        self._waiting_bytes += len(body)
        try:
            async with self._turn:
                given = await self._ask(Question(endpoint, dict(contexts), self._chars_max), body)
        finally:
            self._waiting_bytes -= len(body)
        if given.refusal is not None:
            raise ApiError(*given.refusal)
        assert given.parsed is not None
        return await _with_ids(given.parsed, given.packed) if given.packed else given.parsed

    async def close(self) -> None:
        await self._end()

    async def _ask(self, question: Question, body: bytes) -> Answer:
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(PARSE_S):
                    given = await self._exchange(question, body)
            except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is one
                await self._end()
                log.warning("the reader of large bodies failed at one of %d bytes: %r", len(body), error)
            except BaseException:
                await self._end()  # the asker left in the middle: the answer would be taken for the next one's
                raise
            else:
                if given.last:
                    await self._end()
                return given
        message = f"the process that reads large requests failed at this one {TRIES} times"
        raise ApiError(503, message, SERVER, None, "reader_failed", retry_after_s=1.0)

    async def _exchange(self, question: Question, body: bytes) -> Answer:
        if self._reader is None or self._reader.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", "holdfast.frontend.body_reader")
            self._reader = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        sink, source = self._reader.stdin, self._reader.stdout
        assert sink is not None
        assert source is not None
        asked = msgspec.msgpack.encode(question)
        sink.write(QUESTION_HEAD.pack(len(asked), len(body)) + asked)
        sink.write(body)
        await sink.drain()
        (size,) = ANSWER_HEAD.unpack(await source.readexactly(ANSWER_HEAD.size))
        return msgspec.msgpack.decode(await source.readexactly(size), type=Answer)

    async def _end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(ProcessLookupError):
                reader.kill()
            await reader.wait()


async def _with_ids(parsed: ParsedRequest, packed: list[bytes]) -> ParsedRequest:
    """Its prompts as lists again, each in a turn of its own: a million ids take 20 ms."""
    prompts: list[list[int]] = []
    for data in packed:
        prompts.append(array("I", data).tolist())
        await asyncio.sleep(0)
    return msgspec.structs.replace(parsed, prompts=cast(list[str | list[int]], prompts))
