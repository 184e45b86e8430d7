"""Decision: silence makes a suspect, and a suspect only gets no new work. Streams move on the kernel's word that the
process does not run, not on a clock: what is merely starved is never taken for dead (facts 31)."""

from __future__ import annotations

from holdfast.health.liveness import (
    STARVED_TICKS_MAX,
    TICK_S,
    Connected,
    Liveness,
    LivenessTick,
    MoveLostStreams,
    ProbeResult,
    WorkerLiveness,
)


def silent(liveness: WorkerLiveness, seconds: float, probe: ProbeResult, began_s: float) -> list[object]:
    """What the liveness answers to that much silence with open streams, looked at in every tick."""
    effects: list[object] = []
    for index in range(1, round(seconds / TICK_S) + 1):
        now_s = began_s + index * TICK_S
        effects += liveness.step(LivenessTick(True), now_s)
        effects += liveness.step(probe, now_s)
    return effects


def moves(effects: list[object]) -> bool:
    return any(isinstance(effect, MoveLostStreams) for effect in effects)


def test_silence_alone_moves_nothing() -> None:
    """Nine seconds without a sign from a process that is able to run: suspected, starved, and left alone."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(True), 0.0)
    liveness.step(LivenessTick(True), 0.0)
    runnable = ProbeResult(gone=False, state="R", thread_state="R")
    assert not moves(silent(liveness, STARVED_TICKS_MAX * TICK_S - 1.0, runnable, 0.0))
    assert liveness.state is Liveness.STARVED
    assert not liveness.routable


def test_the_kernels_word_moves_streams_at_once() -> None:
    """The same silence from a stopped process moves its streams as soon as it is a suspect."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(True), 0.0)
    liveness.step(LivenessTick(True), 0.0)
    assert moves(silent(liveness, 0.7, ProbeResult(gone=False, state="T", thread_state="T"), 0.0))
    assert liveness.state is Liveness.STOPPED
