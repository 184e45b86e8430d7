"""Parses command lines by the settings of a struct. No I/O; a container's args in a manifest are parsed the same way.

Always true:
- A user's values, from a command line or a file, are checked before anything starts, and refused under the name that
  the user wrote. Our own defaults are not checked.
- The command line overrides the file, the file the environment, and the environment the defaults.
- An option is defined once, as a field (`spec.settings`), for command lines, files and help.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from holdfast.core.errors import Refused, UserError
from holdfast.spec.settings import Setting, Settings, all_settings

HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL)
NEAR = 0.6  # minimum similarity of a suggestion

Options = Mapping[str, Setting]  # by long flag; for --yes/--no the first


class UsageError(UserError):
    """The command line is invalid; exit status 2."""


class HelpWanted(Exception):
    """The command line asks for help; `everything`: with --help-all."""

    def __init__(self, word: str) -> None:
        self.everything = word == HELP_ALL


def options_of(pattern: Settings, command: str, *, own: bool = True) -> dict[str, Setting]:
    """Return the options of a command; `own`: include the pattern's own fields even if they do not name the command."""
    mine = (one for one in all_settings(pattern) if (own and len(one.path) == 1) or command in one.commands)
    return {one.long_flag: one for one in mine}


def by_path(options: Options, said: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the values by field; an option shared by several engines sets the field of each."""
    found = {}
    for flag, value in said.items():
        path = options[flag].path
        engines = options[flag].extra.get("engines", ())
        for engine in engines if len(engines) > 1 else ():
            found[(*path[:-2], engine, path[-1])] = value
        found[path] = value
    return found


# -- types of values


def kind_of(setting: Setting) -> type:
    """Return the type of one value: bool, int, float, str or Path."""
    kind = setting.type
    if isinstance(kind, UnionType):  # a union with None
        kind = get_args(kind)[0]
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    assert isinstance(kind, type)
    return kind


def takes_many(setting: Setting) -> bool:
    return get_origin(setting.type) is tuple


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a string"}


def check_value(name: str, setting: Setting, value: Any) -> None:
    """Raise Refused or UsageError, naming the option, if a value is out of its bounds."""
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
        raise UsageError(f"{flag} must be UTF-8, got {os.fsencode(text)!r}")  # processes receive it as JSON
    check_value(flag, setting, value)
    return value


# -- command lines


def parse(words: Sequence[str], options: Options, command: str) -> dict[str, Any]:
    """Return the given values by flag; raise UsageError if the command line is invalid."""
    flags = _flags(options)
    free = deque(flag for flag, one in options.items() if one.extra.get("positional"))
    others = next((flag for flag, one in options.items() if one.extra.get("rest")), None)  # gets everything after --
    said: dict[str, Any] = {}
    rest = deque(words)
    dashes = True  # False after --
    said_kind = False  # a kind was given before the next name
    while rest:
        word = rest.popleft()
        if dashes and word == "--" and others is not None:
            said[others] = (*said.get(others, ()), *(_value("--", options[others], one) for one in rest))
            rest.clear()
        elif dashes and word == "--":
            dashes = False
        elif dashes and word in HELP:
            raise HelpWanted(word)
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
    """Return True if a word that begins with a dash is a negative number for a numeric setting."""
    return kind_of(setting) in (int, float) and word[1:2].isdecimal()


def _flags(options: Options) -> dict[str, tuple[str, bool]]:
    """Return every spelling of an option, with its long flag and, for a switch, its value."""
    flags: dict[str, tuple[str, bool]] = {}
    for flag, one in options.items():
        if one.extra.get("positional"):
            continue
        on, _, off = one.flag.partition("/")
        flags |= {text: (flag, True) for text in (on, one.extra.get("short"), *one.extra.get("valued", ())) if text}
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
    if name in HELP:  # first of several short options in one word
        raise HelpWanted(name)
    if name not in flags:
        raise UsageError(
            f"`{command}` has no option {name}; {meant(name, flags, f'`{command} --help-all` lists them')}"
        )
    flag, on = flags[name]
    setting = options[flag]
    is_valued = name in setting.extra.get("valued", ())
    if kind_of(setting) is bool and not is_valued:
        if word.startswith("--") and equals:
            on = on is _switched(name, {"true": True, "false": False, **setting.extra.get("words", {})}, text)
        elif equals:  # several short options in one word
            rest.appendleft(f"-{text}")
        said[flag] = on
        return
    if flag in said and setting.extra.get("once"):
        raise UsageError(f"{name} is there twice, and `{command}` takes one")
    if not equals:
        if not rest:
            raise UsageError(f"{name} needs a value")
        text = rest.popleft()
    value = _switched(name, setting.extra["values"], text) if is_valued else _value(name, setting, text)
    said[flag] = (*said.get(flag, ()), value) if takes_many(setting) else value


def _switched(flag: str, words: Mapping[str, bool], text: str) -> bool:
    """Return the value of a switch given as a word, e.g. `--flag=true`."""
    if text not in words:
        raise UsageError(f"{flag} must be {' or '.join(words)}, got {text!r}")
    return words[text]


def meant(word: str, known: Iterable[str], else_: str, near: float = NEAR) -> str:
    """Return a did-you-mean suggestion, or `else_` if there is none, as the end of a sentence."""
    found = nearest(word, known, near)
    return f"did you mean {found}?" if found else else_


def nearest(word: str, known: Iterable[str], near: float = 0.65) -> str:
    """Return the known name most similar to `word`, ignoring case; "" if none is similar enough."""
    import difflib  # imported only after a typing mistake

    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), 1, near)
    return by_lower[found[0]] if found else ""
