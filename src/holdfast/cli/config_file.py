"""`holdfast up -c FILE`: a TOML file with any of the command's options, by the names they have on the command line.

Always true: nothing in the file is ignored: a key that is no option, or a value that is not what the option takes, is
refused with the file, the key's path in it and, where one is near, the name that was meant.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from holdfast.core.errors import Refused
from holdfast.roles.small_files import read_small
from holdfast.spec.arguments import WORDS, Options, kind_of, meant, takes_many
from holdfast.spec.settings import Setting

OWN = "--config"  # the one option that cannot be in the file
NEAR = 0.5


def read_config(file: Path, options: Options) -> dict[str, Any]:
    """Flag and value for everything in the file; Refused names what cannot be."""
    known = {flag.removeprefix("--"): one for flag, one in options.items() if flag != OWN}
    found = {}
    for word, value in _load(file).items():
        if isinstance(value, dict):
            path = ".".join([word, *list(value)[:1]])
            raise Refused(f"{file}: {path}: there are no tables; {_meant(path.rpartition('.')[2], known)}")
        if word not in known:
            raise Refused(f"{file}: {word}: there is no such option of `holdfast up`; {_meant(word, known)}")
        found[f"--{word}"] = _checked(f"{file}: {word}", known[word], value)
    return found


def _load(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(file).decode())
    except OSError as error:
        raise Refused(f"-c {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise Refused(f"{file} is not TOML: {error}") from error


def _meant(word: str, known: dict[str, Setting]) -> str:
    wanted = word.replace("_", "-").removeprefix("--")
    names = [wanted] if wanted in known else known
    return meant(wanted, names, "`holdfast up --help` lists them, and the file has them without --", NEAR)


def _checked(where: str, setting: Setting, value: Any) -> Any:
    """The value as the command line would have it."""
    values = value if takes_many(setting) and isinstance(value, list) else [value]
    lists = ", or a list of them" if takes_many(setting) else ""
    for one in values:
        if not _is_kind(one, kind_of(setting)):
            raise Refused(f"{where} must be {WORDS[kind_of(setting)]}{lists}, got {one!r}")
        if wrong := setting.wrong(one):
            raise Refused(f"{where} must be {wrong}{lists}, got {one!r}")
    made = [kind_of(setting)(one) for one in values]
    return tuple(made) if takes_many(setting) else made[0]


def _is_kind(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else int if kind is int else str)
