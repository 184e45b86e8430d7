"""A new set by its customers' requests: whether too many fail, and whether enough were well for others to leave. Pure.

Theory. A canary is one known question; a set that fails one request in eight passes most of them. So a new set is tried
with customers' requests, a replica's share of them, while those that served before are all still there: nobody leaves
for it until so many of its requests have ended as a rate needs, and few enough of them failed. Where its service has
too few requests for a rate there is nothing to wait for. What is neither well nor bad by the end of `TRIAL_S` is too
rare to tell, and goes on.

Always true: what is bad (`is_bad`) has not been tried (`is_tried`); a service that nobody asks for is waited for not at
all, and any other for `TRIAL_S` at most.
"""

from __future__ import annotations

from msgspec import Struct

# As a breaker's: fewer attempts say nothing of a rate, and fewer failures may be two broken connections.
ATTEMPTS_MIN = 20
FAILURES_MIN = 5
RUN_MIN = 3  # failures of one whose breaker has opened, so that nothing more will be known of it
ERRORS_WORSE = 2  # times the rate of all other sets: what befalls everybody is not the new one's fault
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
        """Too many fail, and not so everywhere: of enough, or so many in a row that there will not be more."""
        is_rate = self.own.attempts >= ATTEMPTS_MIN and self.own.failed >= FAILURES_MIN
        is_run = self.is_shut and self.own.failed >= RUN_MIN
        return (is_rate or is_run) and not self._is_well()

    @property
    def is_tried(self) -> bool:
        """Enough were asked, and few failed, as few even if the next one did; or hardly anybody asks."""
        if self.own.attempts + self.others.attempts < ATTEMPTS_MIN:
            return True
        return self.own.attempts >= ATTEMPTS_MIN and self._is_well(1)

    def _is_well(self, more: int = 0) -> bool:
        """Few fail, or no more than everywhere."""
        own, others = self.own, self.others
        few = (own.failed + more) * 100 <= self.percent_max * own.attempts
        everywhere = own.failed * others.attempts <= ERRORS_WORSE * others.failed * own.attempts
        return few or (others.attempts > 0 and everywhere)
