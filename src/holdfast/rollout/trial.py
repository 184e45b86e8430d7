"""Decides by clients' requests whether a new set is bad, and whether others may leave for it. Pure.

Theory. A canary is one known question; a set that fails one request in eight passes most of them. So a new set is tried
with clients' requests, a replica's share of them, while all old replicas are still there: none of them leaves until
enough of its requests have ended for a rate, and few enough of them failed. Where its service has too few requests for
a rate there is nothing to wait for. What is neither well nor bad by the end of `TRIAL_S` is too rare to tell, and the
rollout continues.

Always true: what is bad (`is_bad`) has not been tried (`is_tried`); a service without requests is not waited for, and
any other for `TRIAL_S` at most.
"""

from __future__ import annotations

from msgspec import Struct

# As a breaker's: fewer attempts say nothing of a rate, and fewer failures may be two broken connections.
ATTEMPTS_MIN = 20
FAILURES_MIN = 5
RUN_MIN = 3  # failures of one whose breaker has opened, so that nothing more will be known of it
ERRORS_WORSE = 2  # times the rate of all other sets: what happens to all sets is not the new one's fault
TRIAL_S = 60.0  # from the first that counts: a rate is one of the last minute, so a second one shows no more


class RequestCounts(Struct, frozen=True):
    """A set's attempts that ended within the last minute, and those of them that failed by its fault. Of a set that a
    revision brings, since the revision began."""

    attempts: int = 0
    failed: int = 0


class SetTrial(Struct, frozen=True):
    """A new set's requests beside those of all other sets of its service."""

    own: RequestCounts
    others: RequestCounts
    percent_max: int  # of its requests that may fail
    is_shut: bool = False  # breakers took its requests away

    @classmethod
    def of(cls, traffic: dict[str, RequestCounts], set_id: str, percent_max: int, *, is_shut: bool = False) -> SetTrial:
        others = [one for key, one in traffic.items() if key != set_id]
        attempts, failed = sum(one.attempts for one in others), sum(one.failed for one in others)
        return cls(traffic.get(set_id, RequestCounts()), RequestCounts(attempts, failed), percent_max, is_shut)

    @property
    def is_bad(self) -> bool:
        """Return whether too many fail, and not so everywhere: of enough, or so many in a row that no more will
        come."""
        is_rate = self.own.attempts >= ATTEMPTS_MIN and self.own.failed >= FAILURES_MIN
        is_run = self.is_shut and self.own.failed >= RUN_MIN
        return (is_rate or is_run) and not self._is_well()

    @property
    def is_tried(self) -> bool:
        """Return whether enough requests ended and few failed, even if the next one did; or hardly any come."""
        if self.own.attempts + self.others.attempts < ATTEMPTS_MIN:
            return True
        return self.own.attempts >= ATTEMPTS_MIN and self._is_well(1)

    def _is_well(self, more: int = 0) -> bool:
        """Return whether few fail, or no more than everywhere."""
        own, others = self.own, self.others
        few = (own.failed + more) * 100 <= self.percent_max * own.attempts
        everywhere = own.failed * others.attempts <= ERRORS_WORSE * others.failed * own.attempts
        return few or (others.attempts > 0 and everywhere)
