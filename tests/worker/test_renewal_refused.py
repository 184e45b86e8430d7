"""A renewal that can no longer be: the weights were long in reading, and it does not lead any more."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.errors import UserError
from holdfast.worker.failover_worker import FailoverWorker


class Election:
    asleep = False

    def poke(self) -> None: ...


def failover_worker(*, leads: bool) -> FailoverWorker:
    made = FailoverWorker.__new__(FailoverWorker)
    made._leading, made._renewing, made._renewed, made._election = leads, "", asyncio.Event(), Election()  # type: ignore[assignment]
    return made


async def test_one_that_does_not_lead_loads_nothing_anew() -> None:
    """Else its next takeover would be a load, and whoever asked would wait until then."""
    made = failover_worker(leads=False)
    with pytest.raises(UserError, match="leads no more"):
        await asyncio.wait_for(made._renew("damaged"), 60.0)
    assert not made._renewing


async def test_one_that_is_put_to_sleep_before_says_so() -> None:
    """Whoever waits for the renewal hears that it will not be."""
    made = failover_worker(leads=True)
    asked = asyncio.ensure_future(made._renew("damaged"))
    await asyncio.sleep(0)
    assert made._renewing == "damaged"
    made._leading = False  # as `_step_back` does
    made._renewed.set()
    with pytest.raises(UserError, match="leads no more"):
        await asyncio.wait_for(asked, 60.0)
