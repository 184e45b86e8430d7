"""Sends bodies whose parsing would block the event loop to a `body_reader` process, one after the other.

Always true:
- The loop only copies a large body, and never parses it.
- Waiting bodies are bounded in bytes, and each body's parsing in time.
- If a reader dies, is stopped or hangs, this is counted and the body is tried once more with another reader. A body
  that loses two readers is refused.
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
from holdfast.core.tasks import done_within
from holdfast.frontend.api.errors import SERVER, ApiError, too_busy
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.body_reader import ANSWER_HEAD, QUESTION_HEAD, ParseJob, ParseResult

log = logging.getLogger("holdfast.frontend")

# Smaller bodies are parsed on the loop: at most 8 ms for any content; the way to a reader and back takes 1 ms.
PARSE_NOW_BYTES_MAX = 256 * 1024
# Bodies that wait for the reader: sixteen of the largest.
WAITING_BYTES_MAX = 256 * 1024 * 1024
# For a machine too busy to run a reader; `ReaderProgress` finds a reader that will not answer sooner.
PARSE_S = 30.0
END_S = 2.0  # for a killed reader to end; if it hangs in the kernel, it is left behind
TRIES = 2  # a reader may have died before this body came

LOOK_S = 0.1  # between two looks at a reader that was given a body
# Looks in a row that find it stopped: half a second, as for a vault. A reader stopped by hand for less is spared.
STOPPED_LOOKS = 5
# Looks in a row in which it sleeps: two seconds. Nothing blocks it: it gets its whole body, and its output is read.
IDLE_LOOKS = 20
# CPU time: 0.3 s of a slow core to start and parse a small body; 0.4 s for the worst MiB (empty lists, and an error to
# explain).
CPU_S = 2.0
CPU_S_PER_MIB = 1.0


class LargeBodies:
    """Parses bodies in another process, which the first body starts. `lost` is called with the cause of each lost
    reader."""

    def __init__(self, chars_max: int, lost: Callable[[str], None]) -> None:
        self._chars_max = chars_max
        self._lost = lost
        self._reader: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting_bytes = 0

    async def parse(self, endpoint: str, body: bytes, contexts: Mapping[str, int]) -> ParsedRequest:
        """Return the request in a body; raise ApiError if it is refused."""
        if self._waiting_bytes + len(body) > WAITING_BYTES_MAX:
            raise too_busy("too many large requests are being read", "reading_large")
        self._waiting_bytes += len(body)
        try:
            async with self._turn:
                given = await self._ask(ParseJob(endpoint, dict(contexts), self._chars_max), body)
        finally:
            self._waiting_bytes -= len(body)
        if given.refusal is not None:
            raise ApiError(*given.refusal)
        assert given.parsed is not None
        return await _with_ids(given.parsed, given.packed) if given.packed else given.parsed

    async def close(self) -> None:
        await self._end()

    async def _ask(self, question: ParseJob, body: bytes) -> ParseResult:
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
                await self._end()  # cancelled midway: this result would be taken for the next body's
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
        await done_within(reader.wait(), END_S)


async def _exchange(reader: asyncio.subprocess.Process, question: ParseJob, body: bytes) -> ParseResult:
    sink, source = reader.stdin, reader.stdout
    assert sink is not None
    assert source is not None
    asked = msgspec.msgpack.encode(question)
    sink.write(QUESTION_HEAD.pack(len(asked), len(body)) + asked)
    sink.write(body)
    await sink.drain()
    (size,) = ANSWER_HEAD.unpack(await source.readexactly(ANSWER_HEAD.size))
    return msgspec.msgpack.decode(await source.readexactly(size), type=ParseResult)


@contextlib.contextmanager
def _watched(reader: asyncio.subprocess.Process, body_bytes: int, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Kill a reader that will not answer, and pass the cause to `on_lost`; the task that waits for it sees its end."""
    loop, progress = asyncio.get_running_loop(), ReaderProgress(body_bytes)
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if verdict := progress.check(is_stopped(reader.pid), read_main_thread(reader.pid)):
            on_lost(verdict)
            with contextlib.suppress(ProcessLookupError):
                reader.kill()
        timer = loop.call_later(LOOK_S, look)

    timer = loop.call_later(LOOK_S, look)
    try:
        yield
    finally:
        timer.cancel()


async def _with_ids(parsed: ParsedRequest, packed: list[bytes]) -> ParsedRequest:
    """Unpack the prompts into lists, one per turn of the loop: a million ids take 20 ms."""
    prompts: list[list[int]] = []
    for data in packed:
        prompts.append(array("I", data).tolist())
        await asyncio.sleep(0)
    return msgspec.structs.replace(parsed, prompts=cast(list[str | list[int]], prompts))


class ReaderProgress:
    """Decides whether a reader will still answer for one body, from the kernel's data. Pure.

    It gives up a stopped reader within a second, a sleeping one within a few seconds, and a running one when it has
    used more CPU time than its body can take. Time spent waiting for a CPU does not count."""

    def __init__(self, body_bytes: int) -> None:
        self._cpu_ns_max = (CPU_S + CPU_S_PER_MIB * body_bytes / 2**20) * 1e9
        self._first: ThreadTimes | None = None
        self._last: ThreadTimes | None = None
        self._stopped = 0
        self._idle = 0

    def check(self, stopped: bool, times: ThreadTimes | None) -> str:
        """Return "stopped" or "stuck" if the reader must be killed, else "". `times`: None if the kernel has none."""
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
