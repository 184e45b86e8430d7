"""The other kinds of standby, with `holdfast up` and open streams: memory given back, and KV of its own."""

from __future__ import annotations

import pytest
import uvloop

from bench.prove_failover import run_case
from holdfast.testing.supervised import Supervised
from holdfast.testing.workload import Workload, run_streams

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(300)]

LOAD = Workload(streams=8, tokens=100)


@pytest.mark.parametrize(
    ("options", "keeps_kv"),
    [(("--standby", "unmapped"), True), (("--kv", "direct"), False)],
    ids=["unmapped", "direct"],
)
def test_a_kill_and_a_handover_are_survived(options: tuple[str, str], keeps_kv: bool) -> None:
    """The active is killed, then its successor is asked to leave: every stream ends as if nothing had happened, and
    only KV that lies in the vault is taken over; what was not is computed again."""
    with Supervised("--vault-gib", "0.0625", "--sim-tpot-ms", "10", *options) as up:
        unbroken = uvloop.run(run_streams(up.port, LOAD))
        for name in ("kill the group", "SIGTERM"):
            outcome, more = run_case(up, LOAD, unbroken, name)
            assert outcome.survived, (name, outcome, up.logs())
            assert outcome.resumed == LOAD.streams, "the hit came too late to mean anything"
            assert more["two_leaders"] == 0
            assert (more["recomputed_tokens_max"] <= 16) == keeps_kv, more
            assert (up.active().facts["failover"]["blocks"] > 0) == keeps_kv
