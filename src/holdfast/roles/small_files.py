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
from holdfast.discovery.card import CHAT_TEMPLATE_BYTES_MAX

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import Checkpoint
    from holdfast.engines.torch.files.model_text import ModelText
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
            raise OSError(errno.ETIMEDOUT, f"nobody has written it to its end within {READ_S:g} s")
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


def chat_template(launch: WorkerLaunch, model: Checkpoint | ModelText) -> str | None:
    """The operator's template, or the model's own; None: it does not chat."""
    from holdfast.engines.torch.files.gguf_tokenizer import with_bos

    if not launch.chat_template:
        return model.chat_template
    return with_bos(read_template(launch.chat_template), model.bos_token)
