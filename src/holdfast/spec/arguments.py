"""From words to what was asked for, by one table: the settings that a struct has. Pure: a command line's words and a
container's in a manifest mean the same.

Always true: what somebody gave, in words or in a file, is looked at before anything is done, and refused by the name it
was given under; our own defaults are not. The command line wins over the file, the file over the environment, and that
over the defaults. An option is spelled once, as a field (`spec.settings`): here, in files and in help alike.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from holdfast.core.errors import Refused, UserError
from holdfast.spec.nearest import nearest
from holdfast.spec.settings import Setting, Settings, all_settings

HELP = ("-h", "--help")
NEAR = 0.6  # how alike what was meant must be to what was written

Options = Mapping[str, Setting]  # by the long flag; of --yes/--no by the first


class UsageError(UserError):
    """Words that make no sense together: status 2."""


class HelpWanted(Exception):
    """Somebody asks what there is."""


def options_of(pattern: Settings, command: str, *, own: bool = True) -> dict[str, Setting]:
    """Everything that may be given to the command; `own`: also the pattern's own fields, whatever they say."""
    mine = (one for one in all_settings(pattern) if (own and len(one.path) == 1) or command in one.commands)
    return {long_flag(one): one for one in mine}


def long_flag(setting: Setting) -> str:
    return setting.flag.partition("/")[0]


def by_path(options: Options, said: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """What was said, by the fields that hear it: an option of several engines is in the settings of each."""
    found = {}
    for flag, value in said.items():
        path = options[flag].path
        engines = options[flag].extra.get("engines", ())
        for engine in engines if len(engines) > 1 else ():
            found[(*path[:-2], engine, path[-1])] = value
        found[path] = value
    return found


# -- what kind of value


def kind_of(setting: Setting) -> type:
    """bool, int, float, str or Path: of one value, where there may be several or none."""
    kind = setting.type
    if isinstance(kind, UnionType):  # or None
        kind = get_args(kind)[0]
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    assert isinstance(kind, type)
    return kind


def takes_many(setting: Setting) -> bool:
    return get_origin(setting.type) is tuple


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a string"}


def check_value(name: str, setting: Setting, value: Any) -> None:
    """Refused names the option of a value out of its bounds."""
    if wrong := setting.wrong(value):
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        error = f"{name} must be {wrong}, got {shown}"
        raise UsageError(error) if "choices" in setting.extra else Refused(error)


def _value(flag: str, setting: Setting, text: str) -> Any:
    kind = kind_of(setting)
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{flag} must be {WORDS[kind]}, got {text!r}") from None
    if not setting.extra.get("positional") and any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{flag} must be UTF-8, got {os.fsencode(text)!r}")  # processes are handed it as JSON
    check_value(flag, setting, value)
    return value


# -- words


def parse(words: Sequence[str], options: Options, command: str) -> dict[str, Any]:
    """What was said, by flag. UsageError says what cannot be read."""
    flags = _flags(options)
    free = deque(flag for flag, one in options.items() if one.extra.get("positional"))
    others = next((flag for flag, one in options.items() if one.extra.get("rest")), None)  # that has all after --
    said: dict[str, Any] = {}
    rest = deque(words)
    dashes = True  # whether an option may come yet
    said_kind = False  # whether the kind of what is named next was said
    while rest:
        word = rest.popleft()
        if dashes and word == "--" and others is not None:
            said[others] = (*said.get(others, ()), *(_value("--", options[others], one) for one in rest))
            rest.clear()
        elif dashes and word == "--":
            dashes = False
        elif dashes and word in HELP:
            raise HelpWanted
        elif dashes and word.startswith("-") and word != "-" and not (free and _is_number(word, options[free[0]])):
            _take_option(word, rest, flags, options, said=said, command=command)
        elif free and word.lower() in options[free[0]].extra.get("kinds", ()) and not said_kind:
            said_kind = True
        elif free and not word:
            raise UsageError(f"{options[free[0]].name} must not be empty")
        elif free:
            flag = free.popleft()
            said[flag] = _value(options[flag].name, options[flag], word)
        else:
            raise UsageError(f"`{command}` takes no {word!r}")
    if missing := [options[flag].name for flag in free if options[flag].extra.get("required")]:
        raise UsageError(f"`{command}` needs {' and '.join(missing)}")
    return said


def _is_number(word: str, setting: Setting) -> bool:
    """Whether it is one below zero, where a number may stand."""
    return kind_of(setting) in (int, float) and word[1:2].isdecimal()


def _flags(options: Options) -> dict[str, tuple[str, bool]]:
    """Every word that means an option: its flag, and for a switch which way."""
    flags: dict[str, tuple[str, bool]] = {}
    for flag, one in options.items():
        if one.extra.get("positional"):
            continue
        on, _, off = one.flag.partition("/")
        flags |= {text: (flag, True) for text in (on, one.extra.get("short")) if text}
        flags |= {off: (flag, False)} if off else {}
    return flags


def _take_option(
    word: str,
    rest: deque[str],
    flags: Mapping[str, tuple[str, bool]],
    options: Options,
    *,
    said: dict[str, Any],
    command: str,
) -> None:
    name, equals, text = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
    if name in HELP:  # first of short ones in one word
        raise HelpWanted
    if name not in flags:
        raise UsageError(f"`{command}` has no option {name}; {meant(name, flags, f'`{command} --help` lists them')}")
    flag, on = flags[name]
    if kind_of(options[flag]) is bool:
        if word.startswith("--") and equals:
            on = on is _switched(name, options[flag], text)
        elif equals:  # short ones in one word
            rest.appendleft(f"-{text}")
        said[flag] = on
        return
    if flag in said and options[flag].extra.get("once"):
        raise UsageError(f"{name} is there twice, and `{command}` takes one")
    if not equals:
        if not rest:
            raise UsageError(f"{name} needs a value")
        text = rest.popleft()
    value = _value(name, options[flag], text)
    said[flag] = (*said.get(flag, ()), value) if takes_many(options[flag]) else value


def _switched(flag: str, setting: Setting, text: str) -> bool:
    """What `--switch=TEXT` says."""
    words: dict[str, bool] = {"true": True, "false": False, **setting.extra.get("words", {})}
    if text not in words:
        raise UsageError(f"{flag} must be {' or '.join(words)}, got {text!r}")
    return words[text]


def meant(word: str, known: Iterable[str], else_: str, near: float = NEAR) -> str:
    """What may have been meant, as the end of a sentence."""
    found = nearest(word, known, near)
    return f"did you mean {found}?" if found else else_
