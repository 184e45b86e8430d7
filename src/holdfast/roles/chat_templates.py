"""A chat template of the operator's own, in place of the model's: a file, looked at before anything is started."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from holdfast.core.errors import HoldfastError, UserError
from holdfast.discovery.card import CHAT_TEMPLATE_BYTES_MAX
from holdfast.roles.small_files import read_small


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
