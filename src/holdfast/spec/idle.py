"""Settings that would do nothing for what was asked for. Pure.

Always true: who gave such an option is told so by its name: a wish that is quietly dropped looks granted.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.errors import Refused
from holdfast.spec.engines import ENGINES
from holdfast.spec.settings import Setting


def refuse_idle(engine: str, standbys: int, given: Iterable[Setting]) -> None:
    """Refused names one of the settings that somebody gave that does nothing."""
    for setting in given:
        flag, owner = setting.flag.partition("/")[0], setting.extra.get("engine", engine)
        if owner != engine and engine in ENGINES:
            instead = f"; {setting.extra['instead']}" if "instead" in setting.extra else ""
            raise Refused(f"{flag} is for --engine {owner} and does nothing for {engine}{instead}")
        if setting.extra.get("with_standbys") and not standbys:
            raise Refused(f"{flag} does nothing without standbys; leave it out, or use --standbys 1 or more")
