"""Reads large bodies in a process of its own: `python -m holdfast.frontend.body_reader`, questions on stdin, answers on
stdout, one at a time.

Why a process: a JSON decoder holds the interpreter's lock from the first byte to the last (15 MB of `{}`: 0.4 s), so in
a thread it would stop every stream just the same. Always true: every question gets one answer; what is too large for
its model is refused here, and never sent back; the process ends when its asker does.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from array import array
from typing import BinaryIO

import msgspec

from holdfast.frontend.api.chat import parse_chat
from holdfast.frontend.api.completions import parse_completion
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.params import build_sampling, context_exceeded
from holdfast.frontend.api.request import ParsedRequest

PARSERS = {"chat": parse_chat, "completions": parse_completion}
QUESTION_HEAD = struct.Struct(">II")  # bytes of the question, bytes of the body after it
ANSWER_HEAD = struct.Struct(">I")
# All ids of one request, whatever its prompts, unless its model takes more: bringing over and letting go of a million
# takes 10 ms of the asker's loop.
PROMPT_IDS_MAX = 1_000_000
# What nested JSON leaves behind is not all given back; a process this large ends, and the next body starts another.
MEMORY_KIB_MAX = 256 * 1024


class Question(msgspec.Struct, array_like=True):
    """What to judge a body by; the body follows."""

    endpoint: str  # of PARSERS
    contexts: dict[str, int]  # the tokens each model takes
    chars_max: int


class Answer(msgspec.Struct, array_like=True):
    """A request, or the fields of its `ApiError`."""

    parsed: ParsedRequest | None = None  # its token ids are in `packed` instead, one item for each prompt
    packed: list[bytes] = []
    refusal: tuple[int, str, str, str | None, str | None] | None = None
    last: bool = False  # the process ends after this answer


def answer(question: Question, body: bytes) -> Answer:
    try:
        parsed = PARSERS[question.endpoint](body, thorough=True)  # nobody's stream waits for this process
        _check_size(parsed, question)
    except ApiError as error:
        return Answer(refusal=(error.status, error.message, error.type, error.param, error.code))
    packed = [array("I", prompt).tobytes() for prompt in parsed.prompts if not isinstance(prompt, str)]
    return Answer(msgspec.structs.replace(parsed, prompts=[]) if packed else parsed, packed)


def _check_size(parsed: ParsedRequest, question: Question) -> None:
    context = question.contexts.get(parsed.model, 0)
    ids = [len(prompt) for prompt in parsed.prompts if not isinstance(prompt, str)]
    for count in ids if context else []:
        build_sampling(parsed, {}, 0, count, context)
    if sum(ids) > (most := max(PROMPT_IDS_MAX, context)):
        raise invalid("prompt", f"'prompt' has {sum(ids)} token ids; at most {most} are taken in one request")
    chars = sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))
    chars += sum(len(value) for message in parsed.messages for value in message.values() if isinstance(value, str))
    if chars > question.chars_max:
        param = "messages" if parsed.kind == "chat" else "prompt"
        why = f"'{param}' is over {question.chars_max} characters; shorten it."
        raise context_exceeded(param, context, why) if context else invalid(param, why)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the asker is gone."""
    while len(head := source.read(QUESTION_HEAD.size)) == QUESTION_HEAD.size:
        question_bytes, body_bytes = QUESTION_HEAD.unpack(head)
        question = msgspec.msgpack.decode(source.read(question_bytes), type=Question)
        given = answer(question, source.read(body_bytes))
        given.last = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_KIB_MAX
        data = msgspec.msgpack.encode(given)
        sink.write(ANSWER_HEAD.pack(len(data)) + data)
        sink.flush()
        if given.last:
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the asker, whose end is ours
    serve(sys.stdin.buffer, sys.stdout.buffer)
