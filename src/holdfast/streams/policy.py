"""What to do when an attempt fails: resume elsewhere, or fail the stream by name. Pure.

Theory. An engine's death takes all its streams with it, and one of them may be the cause. Who makes a token after a
death is not it: the count of *barren deaths* (the connection broke before the attempt made a token) starts anew. Who
has two in a row is a suspect and is tried alone, on an engine that has lived for a while (`routing.table`), so that the
third, if it comes, convicts one stream and no bystander, and nobody because somebody kills every engine that begins.

Always true: attempts in a row without a token are bounded. A death counts as a death only, every other failure that
is somebody's fault as a barren attempt only; each count has its own bound, and a token clears both. A request that a
full worker turned away has not failed, and does not come here; one that a worker gave back when it was told to stop is
nobody's fault, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import RESUMABLE, Code
from holdfast.routing.table import Standing

# Its engine is gone, and the stream with it.
DEATHS = frozenset({Code.DISCONNECTED})
# One death is anybody's; a bystander of two in a row pays with a short wait, not with its life.
SUSPECT_DEATHS = 2
# The first two, and the one in which it was alone.
POISON_DEATHS = SUSPECT_DEATHS + 1
# A request whose attempts fail this often in a row without one new token is itself the cause.
BARREN_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Resume:
    """Send prompt + emitted tokens to another worker of the same set."""

    avoid_worker: bool  # set the failed worker aside for a while


@dataclass(frozen=True, slots=True)
class Fail:
    code: Code
    message: str


def standing_of(resumed: int, deaths: int) -> Standing:
    """How a stream is placed next, from its failed attempts in all and its barren deaths in a row."""
    if deaths >= SUSPECT_DEATHS:
        return Standing.SUSPECT
    return Standing.RESUMED if resumed else Standing.FRESH


def after_failure(code: str, message: str, barren: int, deaths: int = 0) -> Resume | Fail:
    """Decide from the failure's name and how many attempts in a row were fruitless, or ended in a barren death."""
    try:
        name = Code(code)
    except ValueError:
        return Fail(Code.ENGINE_SHUTDOWN, f"worker failed with unknown code {code!r}: {message}")
    if name not in RESUMABLE:
        return Fail(name, message)
    if deaths >= POISON_DEATHS:
        why = f"{deaths} engines died while they worked on this request, the last time it was tried alone"
        return Fail(Code.POISONED, why)
    if name not in DEATHS and barren >= BARREN_ATTEMPTS_MAX:
        return Fail(name, f"gave up after {barren} attempts without a token; the last: {message}")
    return Resume(avoid_worker=True)
