"""What to do when an attempt fails: resume elsewhere, or fail the stream by name. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import RESUMABLE, Code

# Overload is a matter of time, not of the request: it waits as long as the hold allows.
BLAMELESS = frozenset({Code.WORKER_OVERLOADED})
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


def after_failure(code: str, message: str, barren: int) -> Resume | Fail:
    """Decide from the failure's name and how many attempts in a row were fruitless."""
    try:
        name = Code(code)
    except ValueError:
        return Fail(Code.ENGINE_SHUTDOWN, f"worker failed with unknown code {code!r}: {message}")
    if name not in RESUMABLE:
        return Fail(name, message)
    if name not in BLAMELESS and barren >= BARREN_ATTEMPTS_MAX:
        return Fail(name, f"gave up after {barren} attempts without a token; the last: {message}")
    return Resume(avoid_worker=True)
