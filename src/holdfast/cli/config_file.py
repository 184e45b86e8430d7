"""`holdfast up -c FILE`: a TOML file with any of the command's options, by the names they have on the command line.

Always true: the command line wins over the file, and the file over the environment and our own defaults. Nothing in
the file is ignored: a key that is no option, or a value that is not what the option takes, is refused with the file,
the key's path in it and, where one is near, the name that was meant.
"""

from __future__ import annotations

import difflib
import enum
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from typer.models import OptionInfo

from holdfast.core.errors import UserError
from holdfast.roles.small_files import read_small

OWN = "config"  # the one option that cannot be in the file


@dataclass(frozen=True, slots=True)
class Key:
    """One option of a command, as a file may have it. Read from the command's signature: typer's and click's objects
    for it differ from version to version."""

    name: str  # of the parameter
    flag: str  # --long-name
    kind: type
    many: bool  # a list of them
    least: float | None
    most: float | None

    @property
    def word(self) -> str:
        return self.flag.removeprefix("--")


def keys_of(command: Callable[..., None]) -> dict[str, Key]:
    """Every option of a command, by its name in a file."""
    hints = typing.get_type_hints(command, include_extras=True)
    found = [_key(name, hint) for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated]
    return {key.word: key for key in found}


def _key(name: str, hint: Any) -> Key:
    kind, info = typing.get_args(hint)
    assert isinstance(info, OptionInfo)
    said = (info.default, *(info.param_decls or ()))  # typer takes the first for a default, until it reads the hint
    longs = [text.partition("/")[0] for text in said if isinstance(text, str) and text.startswith("--")]
    if isinstance(kind, UnionType):  # or None
        kind = typing.get_args(kind)[0]
    many = typing.get_origin(kind) is list
    one = typing.get_args(kind)[0] if many else kind
    return Key(name, longs[0] if longs else f"--{name.replace('_', '-')}", one, many, info.min, info.max)


def defaults(file: Path, command: Callable[..., None]) -> dict[str, Any]:
    """Parameter and value for everything in the file; UserError names what cannot be."""
    known = {word: key for word, key in keys_of(command).items() if key.name != OWN}
    found = {}
    for word, value in _load(file).items():
        if isinstance(value, dict):
            path = ".".join([word, *list(value)[:1]])
            raise UserError(f"{file}: {path}: there are no tables; {_meant(path.rpartition('.')[2], known)}")
        if word not in known:
            raise UserError(f"{file}: {word}: there is no such option of `holdfast up`; {_meant(word, known)}")
        found[known[word].name] = _checked(file, known[word], value)
    return found


def _load(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(file).decode())
    except OSError as error:
        raise UserError(f"-c {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UserError(f"{file} is not TOML: {error}") from error


def _meant(word: str, known: Mapping[str, Key]) -> str:
    wanted = word.replace("_", "-").removeprefix("--")
    near = [wanted] if wanted in known else difflib.get_close_matches(wanted, known, 1, 0.5)
    return f"did you mean {near[0]}?" if near else "`holdfast up --help` lists them, and the file has them without --"


def _checked(file: Path, key: Key, value: Any) -> Any:
    """The value as the command line would have it."""
    values = value if key.many and isinstance(value, list) else [value]
    for one in values:
        if wrong := _wrong(key, one):
            lists = ", or a list of them" if key.many else ""
            raise UserError(f"{file}: {key.word} must be {wrong}{lists}, got {one!r}")
    return values if key.many else value


def _wrong(key: Key, value: Any) -> str:
    """What it should have been instead; "" if it is right."""
    if issubclass(key.kind, enum.Enum):
        names = [str(member.value) for member in key.kind]
        return "" if value in names else f"one of {', '.join(names)}"
    if key.kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if key.kind not in (int, float):
        return "" if isinstance(value, str) else "a string"
    takes, words = ((int,), "a whole number") if key.kind is int else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, takes):
        return words
    if key.least is not None and not value >= key.least:
        return f"{words} of {key.least:g} or more"
    return f"{words} of {key.most:g} or less" if key.most is not None and value > key.most else ""
