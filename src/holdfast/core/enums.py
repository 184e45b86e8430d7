"""Enumerations in records that processes of another version read and write.

A value that this version does not know becomes a member named UNKNOWN that keeps the value: the record stays readable,
and is written again as it was. It is no member of the enumeration's list, so that tables over all members stay
complete; a reader that looks it up in a table gives a default.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Self

UNKNOWN = "UNKNOWN"


class OpenStrEnum(StrEnum):
    """A StrEnum whose unknown values are read as UNKNOWN."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = UNKNOWN, value
        return member


class OpenIntEnum(IntEnum):
    """An IntEnum whose unknown values are read as UNKNOWN."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = UNKNOWN, value
        return member
