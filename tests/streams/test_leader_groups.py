"""Which engine of a group leads, by what was heard in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.streams.takeovers import LeaderClaim, LeaderEpochs

NAMESPACE = "d-00000000"
GROUPS = st.tuples(st.sampled_from(["d-0", "d-1"]), st.sampled_from(["", "g", "h"]))
CLAIMS = st.lists(
    st.builds(lambda where, *who: LeaderClaim(*where, *who), GROUPS, st.integers(0, 5), st.integers(1, 3))
)


def claim(epoch: int, worker: int = 1, group: str = "g", namespace: str = NAMESPACE) -> LeaderClaim:
    return LeaderClaim(namespace, group, epoch, worker)


@settings(deadline=None)
@given(CLAIMS)
def test_the_newest_epoch_leads_whatever_the_order(claims: list[LeaderClaim]) -> None:
    """Against a plain maximum over all that was said before; the first to tell of an epoch has it."""
    epochs = LeaderEpochs()
    said: list[LeaderClaim] = []
    for one in claims:
        leads = epochs.note(one)
        said.append(one)
        rivals = [other for other in said if (other.namespace, other.group) == (one.namespace, one.group)]
        newest = max(rivals, key=lambda other: other.epoch)  # the first of equals
        assert leads is (not one.group or one == newest)
        for other in rivals:
            assert bool(epochs.objection(other)) is (bool(other.group) and other != newest)


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (claim(4), "superseded by epoch 5"),
        (claim(5, worker=2), "epoch 5 belongs to worker 1"),
        (claim(5), ""),
        (claim(6, worker=2), ""),
        (claim(1, worker=2, group="other"), ""),
        (claim(1, worker=2, namespace="d-11111111"), ""),
        (claim(0, worker=2, group=""), ""),
    ],
)
def test_who_does_not_lead_is_told_why(late: LeaderClaim, why: str) -> None:
    """Only within one group of one namespace; who has no group has no rival."""
    epochs = LeaderEpochs()
    assert epochs.note(claim(5))
    assert epochs.objection(late) == why
    assert epochs.note(late) is (why == "")


def test_what_is_remembered_is_bounded() -> None:
    """The group that was silent for longest is forgotten; one that is heard of again is kept."""
    epochs = LeaderEpochs(groups_max=2)
    epochs.note(claim(5, group="a"))
    epochs.note(claim(5, group="b"))
    epochs.note(claim(4, group="a"))
    epochs.note(claim(5, group="c"))
    assert len(epochs) == 2
    assert epochs.objection(claim(4, group="a"))
    assert not epochs.objection(claim(4, group="b"))
