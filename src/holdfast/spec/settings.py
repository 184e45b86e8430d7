"""Implements settings as fields of frozen structs, each with help text, unit, bounds and default.

Always true: a struct never holds a value outside its field's bounds, whether it was made in code, from JSON or by
`filled`. Command lines and configuration files are made from these fields; a test compares docs/configuration.md.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from holdfast.core.errors import Refused


def about(sentence: str, unit: str = "", **extra: Any) -> msgspec.Meta:
    """Return a field's description. `extra` may have:

    - bounds: `min`, `max`, `over` (an exclusive lower bound), `choices`, `like` (a pattern and its description);
    - for command lines: the `commands` that have it, its `flag`, its `panel` in the help; `expert` (True, or a tuple of
      commands: only `--help-all` shows it there); `once`, if it may be given only once; further `words` that set a
      switch; `values` that set it after one of its `valued` flags; the `kinds` that may precede a name; `rest`, if it
      gets all arguments after --;
    - for `refuse_idle`: the `engines` that use it (each in the field of this name of its own settings), the option to
      use `instead` by other engine, and `with_standbys`, if it has an effect only with standbys.

    The extras of a struct, with a `prefix` for its flags, apply to every field in it that does not override them.
    """
    return msgspec.Meta(description=sentence, extra={"unit": unit, **extra})


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all settings structs. Raises ValueError, naming the field, if a value is invalid."""

    def __post_init__(self) -> None:
        for setting in own_settings(type(self)):
            if wrong := setting.wrong(getattr(self, setting.name)):
                raise ValueError(f"{setting.name} must be {wrong}, got {_shown(getattr(self, setting.name))}")


S = TypeVar("S", bound=Settings)
NUMBER_MAX = sys.float_info.max
TIME_MAX = 1_000_000_000  # 31 years in seconds: more means "always"
GIB_MAX = 1_000_000  # a petabyte: more is a typing mistake
Path = tuple[str, ...]  # field names from the outermost struct to the setting


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a settings struct, or of a struct inside it."""

    path: Path
    type: Any
    default: Any
    sentence: str
    unit: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        """Return its flag: `--name`, or `--yes/--no`."""
        prefix = self.extra.get("prefix", "")
        return str(self.extra.get("flag") or f"--{prefix}{self.name.replace('_', '-')}")

    @property
    def long_flag(self) -> str:
        """Return its flag; for `--yes/--no` the first of them."""
        return self.flag.partition("/")[0]

    @property
    def commands(self) -> tuple[str, ...]:
        """Return the commands that have it as an option."""
        return tuple(self.extra.get("commands", ()))

    def is_expert(self, command: str) -> bool:
        """Return True if the short help of this command leaves the option out."""
        marked = self.extra.get("expert", False)
        return command in marked if isinstance(marked, tuple) else bool(marked)

    def wrong(self, value: Any) -> str:
        """Return what the value must be; "" if it is valid."""
        if value is None:  # the option was not given
            return ""
        if isinstance(value, int | float) and not abs(value) <= NUMBER_MAX:  # JSON cannot represent other numbers
            return "a finite number"
        if self.unit in ("s", "ms") and value > TIME_MAX:  # a limit of clocks and timers
            return f"{TIME_MAX:,} or less"
        choices, least, most = (self.extra.get(key) for key in ("choices", "min", "max"))
        if choices:
            return "" if value in choices else f"one of {', '.join(choices)}"
        if like := self.extra.get("like"):
            return "" if re.fullmatch(like[0], value) else str(like[1])
        if (over := self.extra.get("over")) is not None and not value > over:
            return f"over {over:g}"
        if least is not None and most is not None and not least <= value <= most:
            return f"{least:g} to {most:g}"
        if least is not None and not value >= least:
            return f"{least:g} or more"
        return f"{most:g} or less" if most is not None and not value <= most else ""


@functools.cache
def own_settings(kind: type[Settings]) -> tuple[Setting, ...]:
    """Return the fields of one struct that are not structs themselves."""
    return tuple(setting for setting in fields_of(kind) if not _is_struct(setting.type))


def all_settings(pattern: Settings) -> Iterator[Setting]:
    """Yield every setting in `pattern` and in the structs inside it, with its value there as its default."""
    for setting in _all_settings(type(pattern)):
        value = functools.reduce(getattr, setting.path, pattern)
        yield setting if value is setting.default else replace(setting, default=value)


@functools.cache
def _all_settings(kind: type[Settings]) -> tuple[Setting, ...]:
    """Return every setting of a struct and of the structs inside it. Cached, because every command line needs them."""
    found = []
    for setting in _fields(kind):
        if not _is_struct(setting.type):
            found.append(setting)
            continue
        for inner in _all_settings(setting.type):
            extra = {**setting.extra, **inner.extra}
            found.append(replace(inner, path=(setting.name, *inner.path), extra=extra))
    return tuple(found)


def filled(pattern: S, values: Mapping[Path, Any]) -> S:
    """Return `pattern` with these values, by path; raise Refused, naming the option, if one is invalid."""
    known = {setting.path: setting for setting in all_settings(pattern)}
    for path, value in values.items():
        if wrong := known[path].wrong(value):
            raise Refused(f"{known[path].long_flag} must be {wrong}, got {_shown(value)}")
    return _filled(pattern, values)


def _filled(pattern: S, values: Mapping[Path, Any]) -> S:
    inside: dict[str, dict[Path, Any]] = {}
    for path, value in values.items():
        inside.setdefault(path[0], {})[path[1:]] = value
    made = {name: own[()] if () in own else _filled(getattr(pattern, name), own) for name, own in inside.items()}
    return msgspec.structs.replace(pattern, **made)


def fields_of(kind: type[Settings], pattern: Settings | None = None) -> Iterator[Setting]:
    """Yield the fields of one struct, including structs; with the values of `pattern`, if given, as defaults."""
    for one in _fields(kind):
        yield one if pattern is None else replace(one, default=getattr(pattern, one.name))


@functools.cache
def _fields(kind: type[Settings]) -> tuple[Setting, ...]:
    """Return the fields of a struct. Cached: it takes a millisecond, and a manifest needs them a thousand times."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in msgspec.structs.fields(kind):
        hint, meta = hints[one.name], msgspec.Meta()
        if get_origin(hint) is Annotated:
            hint, meta = get_args(hint)
        extra = dict(meta.extra or {})
        found.append(Setting((one.name,), hint, one.default, meta.description or "", extra.pop("unit", ""), extra))
    return tuple(found)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)
