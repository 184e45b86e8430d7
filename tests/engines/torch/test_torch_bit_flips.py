"""Flipped bits in a torch engine's weights, by seed: what they do, that they are found, and that they can be undone.

The proof with a real model is `make prove-bit-flips`; this is the same with a tiny one, in this process.
"""

from __future__ import annotations

from collections import Counter

from engine_rig import Vault
from torch_rig import Rig, prompt, request, rig

from holdfast.engines.shadow.flips import WeightFaults
from holdfast.engines.sim.faults import Fault
from holdfast.health.expectations import BANDS, Answer, answer_of, difference, flaw_of

SEEDS = range(1, 25)
TOP = 5


async def answered(r: Rig, number: int) -> Answer:
    await r.run({number: request(prompt(12), 8, top_logprobs=TOP, temperature=0.0)})
    outputs = r.of(number)
    return answer_of(r.tokens(number), [each for output in outputs for each in output.logprobs or []])


async def test_flipped_bits_are_found_by_answers_or_change_none_and_are_undone(vault: Vault) -> None:
    """By seed 1 to 8 bits: the same ones each time. Whatever changes a token is outside the band of what is expected;
    what changes neither tokens nor logprobs is not, and some do that. Mended, the answer is the very same again. The
    stored sums find all of them, whatever they do to answers; a fresh load, under a larger number, has none."""
    async with rig(vault) as r:
        faults, right = WeightFaults(r.engine.memory), await answered(r, 1)
        found: Counter[str] = Counter()
        for seed in SEEDS:
            faults.inject(Fault("flip_bits", seed))
            flipped = faults.faults.flipped
            assert 1 <= len(flipped) <= 8
            answer = await answered(r, 100 + seed)
            wrong = flaw_of(answer) or difference(right, answer, BANDS["float32"])
            assert wrong or answer.tokens == right.tokens
            found["caught" if wrong else "silent" if answer == right else "within the band"] += 1
            faults.inject(Fault("clear"))
            assert faults.faults.flipped == ()
            assert await answered(r, 200 + seed) == right
            faults.inject(Fault("flip_bits", seed))
            assert faults.faults.flipped == flipped
            assert await r.engine.verify(), flipped
            faults.inject(Fault("clear"))
        assert found["caught"], found
        assert found["caught"] < len(SEEDS), found
        assert await r.engine.verify() == ""
        faults.inject(Fault("flip_bits", SEEDS[0]))
        load = r.engine.progress().load
        await r.engine.rest(believed=False)
        await r.engine.renew()
        await r.engine.wake(2000)
        assert r.engine.progress().load > load
        assert await answered(r, 300) == right
        faults.inject(Fault("clear"))  # of a mapping that is no more: nothing to undo
        assert await answered(r, 301) == right
