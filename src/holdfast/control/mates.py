"""The workers of one set, side by side: which of them serve as a last resort, and which have a standby that could take
over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.control.ward import Ward
from holdfast.health import standing as s
from holdfast.health.last_resort import Member, kept


def mates_of(ward: Ward, wards: Iterable[Ward]) -> list[Ward]:
    """Return all that have its namespace and its card, with itself, and with those that sleep or are gone."""
    return [other for other in wards if other.set_of == ward.set_of]


def kept_in(mates: list[Ward], falling: Ward | None = None) -> set[str]:
    """Return the paths of those that serve although a check speaks against them: too few others can, or their own
    standby is about to take over. While some are yet to be found again, all stays as it is but for one that falls."""
    served = {w.group for w in mates if w.awake}
    coming = any(_is_ready(w) and w.group not in served for w in mates)
    relieved = {w.path for w in mates if w.relief_until_s is not None and w.awake and w.failing}
    members = [
        Member(w.path, *verdict, out=w is not falling and not w.standing.weight)
        for w in mates
        if (verdict := w.verdict) is not None
    ]
    able = relieved | kept(members, coming=coming)
    if all(w.sought_until_s is None for w in mates):
        return able
    return {w.path for w in mates if w.standing.last_resort or (w is falling and w.path in able)}


def standby_of(ward: Ward, mates: list[Ward]) -> Ward | None:
    """Return an engine that is ready to take over from it."""
    ready = (w for w in mates if ward.group and w.group == ward.group and _is_ready(w))
    return next(ready, None)


def _is_ready(ward: Ward) -> bool:
    return ward.facts is not None and not ward.facts.active and bool(ward.group) and s.earned(ward.standing) > 0.0


def convicts_of(ward: Ward, wards: Iterable[Ward]) -> list[Ward]:
    """Return other processes that answered wrongly with the same weights, though these are right."""
    return [w for w in wards if w is not ward and w.loaded == ward.loaded and w.misled]
