"""Decision: a key that vanishes from the store says something about the store. A worker is dead when its own
connection is (facts 19)."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.roster import roster_rig, until


async def test_key_loss_is_not_death(tmp_path: Path) -> None:
    """Every key vanishes in mid-stream: no stream breaks, no worker is forgotten, new work goes on."""
    async with roster_rig(tmp_path) as rig:
        workers = [await rig.serving(number) for number in (1, 2)]
        streams = [rig.ask(f"s{number}", workers[0]) for number in range(4)]
        for worker in workers:
            rig.withdraw(worker)
        streams.append(rig.ask("s4", workers[0]))
        await until(lambda: sum(len(worker.generates) for worker in workers) == 5, "all requests")
        for worker in workers:
            for generate in worker.generates:
                worker.say(generate.request.request_id, [10], "length")
        await until(lambda: all(reader.finish for _, reader in streams), "all streams to end")
        assert all(flight.ledger.resumed == 0 for flight, _ in streams)
        assert all(rig.is_routable(worker) for worker in workers)
