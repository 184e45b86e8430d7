"""The card's checksum decides whether a stream may be replayed: it must cover everything and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.discovery.card import (
    CHAT_TEMPLATE_BYTES_MAX,
    CardCanary,
    ModelCard,
    WeightsIdentity,
    decode_card,
)
from holdfast.spec.names import canonical_hash

CARD = ModelCard(
    name="m",
    weights=WeightsIdentity("r1", "none", "float32"),
    tokenizer_sha256="aa",
    chat_template="hello",
    context_tokens_max=4096,
    block_size=16,
    eos_token_ids=[1, 2],
    generation_defaults={"temperature": 0.7, "top_p": 0.9},
    model_type="chat",
)

OTHERS: dict[str, list[Any]] = {
    "name": ["n"],
    "weights": [
        WeightsIdentity("r2", "none", "float32"),
        WeightsIdentity("r1", "int8", "float32"),
        WeightsIdentity("r1", "none", "bfloat16"),
    ],
    "tokenizer_sha256": ["bb"],
    "chat_template": ["hello ", None, ""],
    "context_tokens_max": [4097],
    "block_size": [32],
    "eos_token_ids": [[1], [2, 1], []],
    "generation_defaults": [{}, {"temperature": 0.7}, {"temperature": 0.8, "top_p": 0.9}],
    "model_type": ["completions"],
}


NO_ANSWER = ("root", "canary_prompts")  # what they say changes no answer


@pytest.mark.parametrize("field", [field for field in ModelCard.__struct_fields__ if field not in NO_ANSWER])
def test_every_field_that_can_change_an_answer_is_under_the_checksum(field: str) -> None:
    """Changing any field, one that is added later too, changes the checksum."""
    assert OTHERS[field], f"say here how {field} can differ"
    sums = {msgspec.structs.replace(CARD, **{field: value}).checksum() for value in OTHERS[field]}
    assert len(sums) == len(OTHERS[field])
    assert CARD.checksum() not in sums


def test_where_a_model_lies_is_not_under_the_checksum() -> None:
    """Workers on two machines that keep the same model in different places share their streams."""
    assert msgspec.structs.replace(CARD, root="/elsewhere").checksum() == CARD.checksum()


def test_known_questions_are_not_under_the_checksum_and_have_a_name_of_their_own() -> None:
    """Other questions make no other model of it, and are not taken for those that were asked before."""
    asked = msgspec.structs.replace(CARD, canary_prompts=(CardCanary((1, 2), (3,)),))
    ranged = msgspec.structs.replace(CARD, canary_prompts=(CardCanary((1, 2), (3,), (-1.0, 0.0)),))
    assert asked.checksum() == ranged.checksum() == CARD.checksum()
    assert decode_card(msgspec.json.encode(ranged)) == ranged
    assert len({CARD.canaries_name(), asked.canaries_name(), ranged.canaries_name()}) == 3
    assert CARD.canaries_name() == ""
    assert msgspec.structs.replace(CARD, canary_prompts=(CardCanary((), (3,)),)).problem() is not None


def test_every_part_of_the_weights_identity_is_covered() -> None:
    """A field added to the weights' identity needs its own case above."""
    assert len(OTHERS["weights"]) == len(WeightsIdentity.__struct_fields__)


def test_the_order_of_dictionaries_does_not_matter() -> None:
    """Two workers that wrote the same defaults in another order have the same checksum, at any depth."""
    turned = msgspec.structs.replace(CARD, generation_defaults={"top_p": 0.9, "temperature": 0.7})
    assert turned.checksum() == CARD.checksum()
    assert canonical_hash({"a": {"b": 1, "c": 2}}) == canonical_hash({"a": {"c": 2, "b": 1}})
    assert canonical_hash({"a": 1}) != canonical_hash({"a": "1"})


def test_the_checksum_survives_the_store() -> None:
    """A card read back from its bytes has the checksum of the one that was written."""
    assert decode_card(msgspec.json.encode(CARD)).checksum() == CARD.checksum()
    assert len(CARD.checksum()) == 16


def test_a_good_card_has_no_problem() -> None:
    """The card used here can be admitted, as can one that only completes and has no template."""
    assert CARD.problem() is None
    assert msgspec.structs.replace(CARD, model_type="completions", chat_template=None).problem() is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": ""}, "name"),
        ({"context_tokens_max": 1}, "context_tokens_max"),
        ({"model_type": "embedding"}, "model_type"),
        ({"chat_template": None}, "chat_template"),
        ({"chat_template": "é" * (CHAT_TEMPLATE_BYTES_MAX // 2 + 1)}, "chat_template"),
    ],
)
def test_a_bad_card_names_what_is_wrong(change: dict[str, Any], named: str) -> None:
    """Each reason not to admit a card names the field."""
    problem = msgspec.structs.replace(CARD, **change).problem()
    assert problem is not None
    assert named in problem


def test_a_card_of_wrong_shape_is_a_value_error() -> None:
    """Bytes that are no card raise what callers catch, naming the field."""
    with pytest.raises(ValueError, match="context_tokens_max"):
        decode_card(msgspec.json.encode(CARD).replace(b'"context_tokens_max":4096', b'"context_tokens_max":"x"'))
