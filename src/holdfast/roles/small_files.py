"""Files that a person names on the command line, read whole; pipes too, as a shell's `<(…)` makes them.

Always true: neither a pipe without a writer nor a device without an end is waited for: time and size are bounded.
"""

from __future__ import annotations

import errno
import os
import select
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError, UserError
from holdfast.discovery.card import CHAT_TEMPLATE_BYTES_MAX, CardCanary
from holdfast.spec.canaries import CanaryPrompt, is_text, parse, written

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import Checkpoint
    from holdfast.engines.torch.files.directory import ModelText
    from holdfast.frontend.text.tokenizer import TextTokenizer
    from holdfast.spec.launch import WorkerLaunch

BYTES_MAX = 1024 * 1024  # settings, a template, a token: a larger file is another one than was meant
READ_S = 5.0  # for a command at the other end of a pipe
_PIECE = 65_536


def read_small(path: Path) -> bytes:
    """What is in it; OSError says why not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    data, until_s = bytearray(), time.monotonic() + READ_S
    while len(data) <= BYTES_MAX:
        # A pipe that nobody writes to yet reads as ended; only the wait can tell.
        if not select.select([descriptor], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise OSError(errno.ETIMEDOUT, f"its writer has not finished within {READ_S:g} s")
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            continue
        if not piece:
            return bytes(data)
        data += piece
    raise OSError(errno.EFBIG, f"it is larger than {BYTES_MAX // 1024} KiB")


# -- a chat template of the operator's own, in place of the model's


def template_path(given: str) -> str:
    """The file's absolute path (engines stand elsewhere), once it was looked at; empty: the model's own template."""
    if not given:
        return ""
    path = str(Path(given).expanduser().absolute())
    read_template(path)
    return path


def read_template(path: str) -> str:
    """The template's source; UserError says what is wrong with the file."""
    from holdfast.frontend.text.template import Templates

    try:
        data = read_small(Path(path))
        source = data.decode()
    except OSError as error:
        raise UserError(f"--chat-template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {path} is not UTF-8 text: {error.reason}") from error
    if not 0 < len(data) <= CHAT_TEMPLATE_BYTES_MAX:
        raise UserError(f"--chat-template {path} has {len(data)} bytes; 1 to {CHAT_TEMPLATE_BYTES_MAX} are taken")
    try:
        Templates(datetime.now).get(source)
    except HoldfastError as error:
        raise UserError(f"--chat-template {path}: {error.message}") from error
    return source


# -- known questions of a model


def canary_text(given: str) -> str:
    """Return the questions of `--canary-prompts` as JSON text, read from the file where it names one; UserError says
    what is wrong with them."""
    text = given.encode()
    if given and not is_text(given):
        path = Path(given).expanduser().absolute()
        try:
            text = read_small(path)
        except OSError as error:
            raise UserError(f"--canary-prompts {path} cannot be read: {error.strerror}") from error
    return written(parse(text, "--canary-prompts")) if text else ""


def card_canaries(given: str, tokenizer: bytes, context_tokens_max: int) -> tuple[CardCanary, ...]:
    """Return the questions as a card has them, in tokens; UserError says which of them the model cannot be asked."""
    prompts = parse(canary_text(given) or "[]", "--canary-prompts")
    if not prompts:
        return ()
    from holdfast.frontend.text.tokenizer import TextTokenizer

    text = TextTokenizer(tokenizer)
    named = ((f"--canary-prompts[{place}]", one) for place, one in enumerate(prompts))
    return tuple(_in_tokens(name, one, text, context_tokens_max) for name, one in named)


def _in_tokens(where: str, one: CanaryPrompt, text: TextTokenizer, context_tokens_max: int) -> CardCanary:
    asked = one.prompt_tokens or tuple(text.encode_now(one.prompt, add_special_tokens=True))  # as completions are
    if len(asked) + len(one.expected_tokens) > context_tokens_max:
        has = f"{len(asked)} tokens and {len(one.expected_tokens)} expected"
        raise UserError(f"{where} has {has}, more than the model's context of {context_tokens_max}; give a shorter one")
    for field, tokens in (("prompt_tokens", asked), ("expected_tokens", one.expected_tokens)):
        if unknown := [token for token in tokens if token >= text.vocab_size]:
            there = f"the model has {text.vocab_size} tokens"
            raise UserError(f"{where}.{field}: there is no token {unknown[0]}; {there}; ids are those of its tokenizer")
    low_high = (one.logprob_range[0], one.logprob_range[1]) if one.logprob_range else None
    return CardCanary(asked, one.expected_tokens, low_high)


def chat_template(launch: WorkerLaunch, model: Checkpoint | ModelText) -> str | None:
    """The operator's template, or the model's own; None: it does not chat."""
    from holdfast.engines.torch.files.gguf_tokenizer import with_bos

    if not launch.chat_template:
        return model.chat_template
    return with_bos(read_template(launch.chat_template), model.bos_token)
