"""Parses large bodies in a separate process: `python -m holdfast.frontend.body_reader`. It reads jobs from stdin and
writes results to stdout, one at a time.

Why a process: a JSON decoder holds the GIL from the first byte to the last (15 MB of `{}`: 0.4 s), so a thread would
stop every stream too. Always true: every job gets one result; a request that is too large for its model is refused
here, and not sent back; the process ends when the frontend does.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from array import array
from typing import BinaryIO

import msgspec

from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.params import build_sampling, context_exceeded
from holdfast.frontend.api.parse import parse_chat, parse_completion
from holdfast.frontend.api.request import ParsedRequest

PARSERS = {"chat": parse_chat, "completions": parse_completion}
QUESTION_HEAD = struct.Struct(">II")  # bytes of the question, bytes of the body after it
ANSWER_HEAD = struct.Struct(">I")
# Token ids of all prompts of one request, unless its model takes more: receiving and freeing a million ids takes 10 ms
# of the frontend's loop.
PROMPT_IDS_MAX = 1_000_000
# Not all memory of nested JSON is given back: a process this large ends, and the next body starts another.
MEMORY_KIB_MAX = 256 * 1024


class ParseJob(msgspec.Struct, array_like=True):
    """The endpoint and limits for one body; the body follows."""

    endpoint: str  # a key of PARSERS
    contexts: dict[str, int]  # context size in tokens, by model
    chars_max: int


class ParseResult(msgspec.Struct, array_like=True):
    """The parsed request, or the fields of its `ApiError`."""

    parsed: ParsedRequest | None = None  # its token ids are in `packed` instead, one item for each prompt
    packed: list[bytes] = []
    refusal: tuple[int, str, str, str | None, str | None] | None = None
    last: bool = False  # the process ends after this answer


def answer(question: ParseJob, body: bytes) -> ParseResult:
    try:
        parsed = PARSERS[question.endpoint](body, thorough=True)  # no stream waits for this process
        _check_size(parsed, question)
    except ApiError as error:
        return ParseResult(refusal=(error.status, error.message, error.type, error.param, error.code))
    packed = [array("I", prompt).tobytes() for prompt in parsed.prompts if not isinstance(prompt, str)]
    return ParseResult(msgspec.structs.replace(parsed, prompts=[]) if packed else parsed, packed)


def _check_size(parsed: ParsedRequest, question: ParseJob) -> None:
    context = question.contexts.get(parsed.model, 0)
    ids = [len(prompt) for prompt in parsed.prompts if not isinstance(prompt, str)]
    for count in ids if context else []:
        build_sampling(parsed, {}, 0, count, context)
    if sum(ids) > (most := max(PROMPT_IDS_MAX, context)):
        raise invalid("prompt", f"'prompt' has {sum(ids)} token ids; at most {most} are taken in one request")
    chars = sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))
    chars += sum(len(value) for message in parsed.messages for value in message.values() if isinstance(value, str))
    if chars > question.chars_max:
        why = f"'{parsed.source}' is over {question.chars_max} characters; shorten it."
        raise context_exceeded(parsed.source, context, why) if context else invalid(parsed.source, why)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer jobs until the frontend closes the pipe or this process has become too large."""
    while len(head := source.read(QUESTION_HEAD.size)) == QUESTION_HEAD.size:
        question_bytes, body_bytes = QUESTION_HEAD.unpack(head)
        question = msgspec.msgpack.decode(source.read(question_bytes), type=ParseJob)
        given = answer(question, source.read(body_bytes))
        given.last = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_KIB_MAX
        data = msgspec.msgpack.encode(given)
        sink.write(ANSWER_HEAD.pack(len(data)) + data)
        sink.flush()
        if given.last:
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C, and this process ends with it
    serve(sys.stdin.buffer, sys.stdout.buffer)
