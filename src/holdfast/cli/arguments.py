"""From a command line's words to what a command was asked for, by one table: the settings that its struct has.

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
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from holdfast.core.errors import Refused, UserError
from holdfast.settings import Environment
from holdfast.spec.settings import Setting, Settings, about, all_settings, filled

HELP = ("-h", "--help")
NEAR = 0.6  # how alike what was meant must be to what was written

Json = Annotated[bool, about("JSON on stdout, for programs.")]
Options = Mapping[str, Setting]  # by the long flag; of --yes/--no by the first


class UsageError(UserError):
    """Words that make no sense together: status 2."""


class HelpWanted(Exception):
    """Somebody asks what there is."""


class Asked(Settings, frozen=True):
    """What one command was asked for: fields are its options, and so are those of settings inside it that name the
    command."""

    lasting: ClassVar[bool] = False  # it starts what others start again: a wrong environment is refused for good

    @classmethod
    def of(cls, env: Environment) -> Self:
        """What it does where nothing is said, but for what the environment says."""
        return cls()

    def run(self, env: Environment) -> int:
        """Do it; the exit status. UserError says what is wrong."""
        raise NotImplementedError


def options_of(asked: Asked, command: str) -> dict[str, Setting]:
    """Everything that may be given to the command."""
    mine = (one for one in all_settings(asked) if len(one.path) == 1 or command in one.commands)
    return {long_flag(one): one for one in mine}


def long_flag(setting: Setting) -> str:
    return setting.flag.partition("/")[0]


def with_values(asked: Asked, options: Options, values: Mapping[str, Any]) -> Asked:
    """`asked` with these values, by flag."""
    return filled(asked, {options[flag].path: value for flag, value in values.items()})


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
    said: dict[str, Any] = {}
    rest = deque(words)
    dashes = True  # whether an option may come yet
    while rest:
        word = rest.popleft()
        if dashes and word == "--":
            dashes = False
        elif dashes and word in HELP:
            raise HelpWanted
        elif dashes and word.startswith("-") and word != "-":
            _take_option(word, rest, flags, options, said=said, command=command)
        elif free:
            flag = free.popleft()
            said[flag] = _value(options[flag].name, options[flag], word)
        else:
            raise UsageError(f"`{command}` takes no {word!r}")
    if missing := [options[flag].name for flag in free if options[flag].extra.get("required")]:
        raise UsageError(f"`{command}` needs {' and '.join(missing)}")
    return said


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
            raise UsageError(f"{name} takes no value")
        if equals:  # short ones in one word
            rest.appendleft(f"-{text}")
        said[flag] = on
        return
    if not equals:
        if not rest:
            raise UsageError(f"{name} needs a value")
        text = rest.popleft()
    value = _value(name, options[flag], text)
    said[flag] = (*said.get(flag, ()), value) if takes_many(options[flag]) else value


def meant(word: str, known: Iterable[str], else_: str, near: float = NEAR) -> str:
    """What may have been meant, as the end of a sentence."""
    import difflib  # only where somebody mistyped

    found = difflib.get_close_matches(word, list(known), 1, near)
    return f"did you mean {found[0]}?" if found else else_
