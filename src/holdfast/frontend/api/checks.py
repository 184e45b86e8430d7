"""Checks of single values: each takes a decoded JSON value and its field's path, and returns the value in the type
the rest of the code wants, or raises a 400 that names the path.

Always true: a check accepts exactly what it says; booleans are not numbers; numbers that are too large for a message
are not printed (Python refuses to print integers of more than 4,300 digits).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from holdfast.frontend.api.errors import ApiError, invalid

Check = Callable[[Any, str], Any]

_SHOWN_INTEGER_MAX = 10**18
_SHOWN_CHARS_MAX = 64

_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def wrong_type(path: str, wanted: str, value: Any) -> ApiError:
    got = _TYPE_NAMES.get(type(value), type(value).__name__)
    return invalid(path, f"'{path}' must be {wanted}; got {got}", "invalid_type")


def wrong_value(path: str, wanted: str, value: Any) -> ApiError:
    return invalid(path, f"'{path}' must be {wanted}; got {_shown(value)}")


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _SHOWN_INTEGER_MAX:
        return "a very large integer"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS_MAX:
        return f"a string of {len(value)} characters"
    return repr(value)


def boolean(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise wrong_type(path, "a boolean", value)
    return value


def integer(low: int, high: int) -> Check:
    """An integer of [low, high]. `3.0` is refused: JSON writers that mean an integer write one."""
    wanted = f"an integer from {low} to {high}"

    def check(value: Any, path: str) -> int:
        if type(value) is not int:
            raise wrong_type(path, wanted, value)
        if not low <= value <= high:
            raise wrong_value(path, wanted, value)
        return value

    return check


def number(low: float, high: float = inf, *, above: bool = False) -> Check:
    """A finite number of [low, high], or of (low, high] with `above`."""
    wanted = f"a number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high != inf else "")

    def check(value: Any, path: str) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(path, wanted, value)
        # Integers are compared before they are converted: one too large for a float would raise there. NaN is in no
        # range at all.
        if not low <= value <= min(high, 1e308) or (above and value == low):
            raise wrong_value(path, wanted, value)
        return float(value)

    return check


def text(chars_max: int) -> Check:
    """A string of 1 to chars_max characters."""
    wanted = f"a string of 1 to {chars_max} characters"

    def check(value: Any, path: str) -> str:
        if type(value) is not str:
            raise wrong_type(path, wanted, value)
        if not 0 < len(value) <= chars_max:
            raise wrong_value(path, wanted, value)
        return value

    return check


def list_of(check: Check, length_max: int) -> Check:
    """An array of at most length_max items, each checked, as a tuple."""
    wanted = f"an array of at most {length_max} items"

    def check_all(value: Any, path: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(path, wanted, value)
        if len(value) > length_max:
            raise invalid(path, f"'{path}' must be {wanted}; got {len(value)}")
        return tuple([check(item, f"{path}[{place}]") for place, item in enumerate(value)])

    return check_all
