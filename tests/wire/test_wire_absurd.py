"""Messages of the right form with absurd values, on a real worker's data socket: refused by name, harming nobody."""

from __future__ import annotations

import hashlib

import pytest

from holdfast.core.requests import Sampling
from holdfast.engines.sim.vocabulary import asset
from holdfast.wire.frames import encode
from holdfast.wire.messages import ArtefactPart, Cancel, Generate, GetArtefact
from tests.rigs.wire_peer import Target, request

NAN, INF = float("nan"), float("inf")

ABSURD = {
    "no tokens": request(tokens=[], prompt_len=0),
    "negative id": request(tokens=[5, -1], prompt_len=2),
    "huge id": request(tokens=[2**63], prompt_len=1),
    "id past the vocabulary": request(tokens=[6144], prompt_len=1),
    "prompt_len 0": request(prompt_len=0),
    "prompt_len past the end": request(prompt_len=4),
    "prompt_len negative": request(prompt_len=-3),
    "prompt_len huge": request(prompt_len=2**62),
    "over the context": request(tokens=[70] * 40_000, prompt_len=40_000),
    "repetition 0": request(sampling=Sampling(4, 1, repetition_penalty=0.0)),
    "repetition NaN": request(sampling=Sampling(4, 1, repetition_penalty=NAN)),
    "bias outside": request(sampling=Sampling(4, 1, logit_bias={10**9: 1.0})),
    "bias negative": request(sampling=Sampling(4, 1, logit_bias={-1: 1.0})),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_request_fails_by_name_and_the_connection_stays(target: Target, name: str) -> None:
    """The one stream fails as InvalidRequest; the next one on the same connection runs."""
    peer = target.greeted()
    failure = peer.send(encode(Generate(1, ABSURD[name]))).outputs(1).failure
    assert failure is not None
    assert failure.code == "InvalidRequest"
    assert failure.message
    assert peer.send(encode(Generate(1, request()))).outputs(1).finish is not None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0, 1),
        Sampling(-5, 1),
        Sampling(2, -(2**63)),
        Sampling(2, 2**64 - 1),
        Sampling(2, 1, min_tokens=2**62),
        Sampling(2, 1, min_tokens=-(2**62)),
        Sampling(2, 1, top_logprobs=10**9),
        Sampling(2, 1, top_logprobs=-1),
        Sampling(2, 1, top_k=-(2**62)),
        Sampling(2, 1, top_k=2**62),
        *(
            Sampling(2, 1, **{field: value, "top_logprobs": logprobs})  # type: ignore[arg-type]
            for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
            for value in (NAN, INF, -INF, -1.0, 1e308, 5e-324)
            for logprobs in (None, 3)
        ),
        *(Sampling(3, 1, repetition_penalty=value, top_logprobs=2) for value in (INF, 1e308, 5e-324)),
        *(Sampling(3, 1, logit_bias={5: value, 6: -value}, top_logprobs=2) for value in (NAN, INF, 1e308)),
    ],
)
def test_absurd_sampling_ends_somehow_and_harms_nobody(target: Target, sampling: Sampling) -> None:
    """Values no frontend would send: the stream ends, or fails by name, and the engine goes on stepping."""
    peer = target.greeted()
    last = peer.send(encode(Generate(1, request(sampling=sampling)))).outputs(1)
    assert last.finish is not None or last.failure is not None
    assert peer.send(encode(Generate(2, request()))).outputs(2).finish is not None


def test_a_length_without_end_stops_at_the_context(target: Target) -> None:
    """max_tokens beyond all bounds is the engine's own bound."""
    tokens = [70] * 32_700
    huge = request(tokens=tokens, prompt_len=len(tokens), sampling=Sampling(2**62, 1, ignore_eos=True))
    peer = target.greeted()
    assert peer.send(encode(Generate(1, huge))).outputs(1).finish == "length"


def test_cancelling_what_is_not_there_is_nothing(target: Target) -> None:
    """Unknown, negative, huge and repeated numbers."""
    peer = target.greeted().send(encode(Cancel([1, -1, 2**63, *range(10_000)])) * 3)
    assert peer.send(encode(Generate(1, request()))).outputs(1).finish is not None


def test_an_unknown_artefact_is_answered_and_a_flood_is_refused(target: Target) -> None:
    """Total 0 says it is not there; whoever asks for many without reading is not served from memory."""
    peer = target.greeted().send(encode(GetArtefact("no such")))
    assert peer.next() == ArtefactPart("no such", 0, 0, b"")
    flood = target.greeted()
    flood.send(encode(GetArtefact(hashlib.sha256(asset("tokenizer.json")).hexdigest())) * 500)
    assert "artefacts" in flood.refusal().reason
