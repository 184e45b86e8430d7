"""Bodies that would stop the event loop: sent to a `body_reader`, one after the other.

Always true: the loop only copies what is large, and never looks through it; what waits here is bounded in bytes, and
each body in time; a reader that dies, is stopped or hangs costs a second try with another one, and is counted; a body
under which two are lost is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import msgspec

from holdfast.core.procfs import ThreadTimes, is_stopped, read_main_thread
from holdfast.frontend.api.errors import SERVER, ApiError, too_busy
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.body_reader import ANSWER_HEAD, QUESTION_HEAD, Answer, Question

log = logging.getLogger("holdfast.frontend")

# Up to this a body is parsed on the loop: at most 8 ms whatever it holds, where the way to a reader and back is 1 ms.
PARSE_NOW_BYTES_MAX = 256 * 1024
# Of bodies that wait for the reader: sixteen of the largest.
WAITING_BYTES_MAX = 256 * 1024 * 1024
# The last resort, for a machine too busy to run a reader at all; one that will not answer is known by its judge.
PARSE_S = 30.0
END_S = 2.0  # for a killed reader to be gone; one that hangs in the kernel is not waited for
TRIES = 2  # a reader may have died before this body came

LOOK_S = 0.1  # between two looks at a reader that was given a body
# In a row that find it stopped: half a second, as for a vault. Who stops one by hand and at once lets it run is spared.
STOPPED_LOOKS = 5
# In a row in which it neither ran nor wanted to: two seconds. It has all of its body, and its asker takes all it says.
IDLE_LOOKS = 20
# To start and to read a small body takes 0.3 s of a slow core; the worst that 1 MiB can hold (empty lists, and an error
# to be explained), 0.4 s.
CPU_S = 2.0
CPU_S_PER_MIB = 1.0


class LargeBodies:
    """Parses bodies in another process, which is started when the first one comes. `lost` is told why one was lost."""

    def __init__(self, chars_max: int, lost: Callable[[str], None]) -> None:
        self._chars_max = chars_max
        self._lost = lost
        self._reader: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting_bytes = 0

    async def parse(self, endpoint: str, body: bytes, contexts: Mapping[str, int]) -> ParsedRequest:
        """The request in a body; ApiError refuses it."""
        if self._waiting_bytes + len(body) > WAITING_BYTES_MAX:
            raise too_busy("too many large requests are being read", "reading_large")
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
            verdicts: list[str] = []
            try:
                async with asyncio.timeout(PARSE_S):
                    reader = await self._running()
                    with _watched(reader, len(body), verdicts.append):
                        given = await _exchange(reader, question, body)
            except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is one
                await self._end()
                verdicts.append("slow" if isinstance(error, TimeoutError) else "died")
                self._lose(verdicts[0], f"over a body of {len(body)} bytes")
            except BaseException:
                await self._end()  # the asker left in the middle: the answer would be taken for the next one's
                raise
            else:
                if given.last:
                    await self._end()
                return given
        message = f"the process that reads large requests failed at this one {TRIES} times"
        raise ApiError(503, message, SERVER, None, "reader_failed", retry_after_s=1.0)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._reader is not None and self._reader.returncode is not None:
            self._lose("died", f"between two bodies, with {self._reader.returncode}")
            self._reader = None
        if self._reader is None:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", "holdfast.frontend.body_reader")
            self._reader = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return self._reader

    def _lose(self, cause: str, when: str) -> None:
        log.warning("lost the reader of large bodies (%s) %s", cause, when)
        self._lost(cause)

    async def _end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            return
        with contextlib.suppress(ProcessLookupError):
            reader.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.wait(), END_S)


async def _exchange(reader: asyncio.subprocess.Process, question: Question, body: bytes) -> Answer:
    sink, source = reader.stdin, reader.stdout
    assert sink is not None
    assert source is not None
    asked = msgspec.msgpack.encode(question)
    sink.write(QUESTION_HEAD.pack(len(asked), len(body)) + asked)
    sink.write(body)
    await sink.drain()
    (size,) = ANSWER_HEAD.unpack(await source.readexactly(ANSWER_HEAD.size))
    return msgspec.msgpack.decode(await source.readexactly(size), type=Answer)


@contextlib.contextmanager
def _watched(reader: asyncio.subprocess.Process, body_bytes: int, judged: Callable[[str], None]) -> Iterator[None]:
    """Kill a reader that will not answer, and tell why; whoever waits for its answer notices its end."""
    loop, judge = asyncio.get_running_loop(), ReaderJudge(body_bytes)
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if verdict := judge.look(is_stopped(reader.pid), read_main_thread(reader.pid)):
            judged(verdict)
            with contextlib.suppress(ProcessLookupError):
                reader.kill()
        timer = loop.call_later(LOOK_S, look)

    timer = loop.call_later(LOOK_S, look)
    try:
        yield
    finally:
        timer.cancel()


async def _with_ids(parsed: ParsedRequest, packed: list[bytes]) -> ParsedRequest:
    """Its prompts as lists again, each in a turn of its own: a million ids take 20 ms."""
    prompts: list[list[int]] = []
    for data in packed:
        prompts.append(array("I", data).tolist())
        await asyncio.sleep(0)
    return msgspec.structs.replace(parsed, prompts=cast(list[str | list[int]], prompts))


class ReaderJudge:
    """Whether a reader will still answer over one body; pure: it is told what the kernel says.

    One that may not run is given up within a second, one that sleeps over its work within a few, and one that runs when
    it has had more of a CPU than its body can take; time in line for a CPU is never held against it."""

    def __init__(self, body_bytes: int) -> None:
        self._cpu_ns_max = (CPU_S + CPU_S_PER_MIB * body_bytes / 2**20) * 1e9
        self._first: ThreadTimes | None = None
        self._last: ThreadTimes | None = None
        self._stopped = 0
        self._idle = 0

    def look(self, stopped: bool, times: ThreadTimes | None) -> str:
        """One look at it; "stopped" or "stuck": it is to be killed. `times`: None where the kernel does not tell."""
        self._stopped = self._stopped + 1 if stopped else 0
        if self._stopped >= STOPPED_LOOKS:
            return "stopped"
        if stopped or times is None:
            return ""
        last, self._last = self._last, times
        self._first = self._first or times
        self._idle = self._idle + 1 if times.state == "S" and times == last else 0
        used_up = times.cpu_ns - self._first.cpu_ns > self._cpu_ns_max
        return "stuck" if used_up or self._idle >= IDLE_LOOKS else ""
