"""What a setting is: a field of a frozen struct that carries its own sentence, unit, bounds and default.

Always true: a value out of its field's bounds is never in a struct, however it was made: by hand, out of JSON or by
`filled`. Command lines, configuration files and docs/configuration.md take all they show from these fields.
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
    """A field's description. `extra`: `min`, `max`, `over` (a bound that is itself out), `choices`, `like` (a pattern,
    and in words what matches it); for command lines the `commands` that offer it, its `flag`, its help's `panel`,
    whether it is `hidden`, whether it is said only `once`, which other `words` switch it, the `kinds` that may be said
    before a name, whether the `rest` of the words, all after --, is its; for `refuse_idle` the `engines` that read it
    (each in the field of this name of its own settings), what there is `instead` for which other, and whether it is
    only `with_standbys`. What is said of a struct, with a `prefix` of its flags, holds for every field in it that does
    not say otherwise."""
    return msgspec.Meta(description=sentence, extra={"unit": unit, **extra})


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one thing. ValueError names the field that cannot be."""

    def __post_init__(self) -> None:
        for setting in own_settings(type(self)):
            if wrong := setting.wrong(getattr(self, setting.name)):
                raise ValueError(f"{setting.name} must be {wrong}, got {_shown(getattr(self, setting.name))}")


S = TypeVar("S", bound=Settings)
NUMBER_MAX = sys.float_info.max
TIME_MAX = 1_000_000_000  # 31 years in seconds: whoever wishes for more means "always"
GIB_MAX = 1_000_000  # a petabyte: more is a mistake sooner than a machine
Path = tuple[str, ...]  # names of the structs that a setting is in, and its own


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a struct of settings, or of one inside it."""

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
        """Its option: `--name`, or `--yes/--no`."""
        prefix = self.extra.get("prefix", "")
        return str(self.extra.get("flag") or f"--{prefix}{self.name.replace('_', '-')}")

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that have it as an option."""
        return tuple(self.extra.get("commands", ()))

    def wrong(self, value: Any) -> str:
        """What the value should have been instead; "" if it is right."""
        if value is None:  # an option that was not given
            return ""
        if isinstance(value, int | float) and not abs(value) <= NUMBER_MAX:  # it could not be written down as JSON
            return "a finite number"
        if self.unit in ("s", "ms") and value > TIME_MAX:  # clocks and timers take no more
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
    """The fields of one struct that are no structs themselves."""
    return tuple(setting for setting in fields_of(kind) if not _is_struct(setting.type))


def all_settings(pattern: Settings) -> Iterator[Setting]:
    """Every setting in `pattern` and in the structs inside it, with what it is there as its default."""
    for setting in fields_of(type(pattern), pattern):
        if not _is_struct(setting.type):
            yield setting
            continue
        for inner in all_settings(setting.default):
            extra = {**setting.extra, **inner.extra}
            yield replace(inner, path=(setting.name, *inner.path), extra=extra)


def filled(pattern: S, values: Mapping[Path, Any]) -> S:
    """`pattern` with these values in place of its own, by path; Refused names the option of one that cannot be."""
    known = {setting.path: setting for setting in all_settings(pattern)}
    for path, value in values.items():
        if wrong := known[path].wrong(value):
            raise Refused(f"{known[path].flag.partition('/')[0]} must be {wrong}, got {_shown(value)}")
    return _filled(pattern, values)


def _filled(pattern: S, values: Mapping[Path, Any]) -> S:
    inside: dict[str, dict[Path, Any]] = {}
    for path, value in values.items():
        inside.setdefault(path[0], {})[path[1:]] = value
    made = {name: own[()] if () in own else _filled(getattr(pattern, name), own) for name, own in inside.items()}
    return msgspec.structs.replace(pattern, **made)


def fields_of(kind: type[Settings], pattern: Settings | None = None) -> Iterator[Setting]:
    """The fields of one struct, also those that are structs; with the defaults of `pattern`, where one is given."""
    for one in _fields(kind):
        yield one if pattern is None else replace(one, default=getattr(pattern, one.name))


@functools.cache
def _fields(kind: type[Settings]) -> tuple[Setting, ...]:
    """Hints are evaluated once: that takes a millisecond, and a manifest asks for them a thousand times."""
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
