"""Tiers are read as they are written, in headers and behind API keys."""

from __future__ import annotations

import pytest

from holdfast.core.tiers import TIER_DEFAULT, Tier, UnknownTier, key_tiers, parse_tier, split_key, tier_of


@pytest.mark.parametrize("tier", Tier)
def test_a_tier_is_read_as_it_is_written(tier: Tier) -> None:
    """In any case, with spaces around it."""
    assert parse_tier(tier.label) is tier
    assert parse_tier(f" {tier.label.upper()} ") is tier


@pytest.mark.parametrize("text", ["", "gold", "best-effort", "0", "premium,standard", "x" * 5000])
def test_an_unknown_tier_is_refused_by_a_text_that_names_the_three(text: str) -> None:
    """Whoever mistypes a tier is told which there are, in one short line."""
    with pytest.raises(UnknownTier, match="premium, standard, best_effort") as caught:
        parse_tier(text)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("header", "key_tier", "tier"),
    [
        (None, None, TIER_DEFAULT),
        (None, Tier.PREMIUM, Tier.PREMIUM),
        ("premium", None, Tier.PREMIUM),
        ("best_effort", Tier.PREMIUM, Tier.BEST_EFFORT),
        ("premium", Tier.STANDARD, Tier.STANDARD),
        ("premium", Tier.PREMIUM, Tier.PREMIUM),
    ],
)
def test_a_header_may_ask_for_less_than_the_key_has_and_never_gets_more(
    header: str | None, key_tier: Tier | None, tier: Tier
) -> None:
    """Nobody makes himself premium by a header; without keys the header is believed."""
    assert tier_of(header, key_tier) is tier


def test_an_unknown_tier_in_a_header_is_refused_whatever_the_key() -> None:
    """A mistake is not served silently as something else."""
    with pytest.raises(UnknownTier):
        tier_of("gold", Tier.PREMIUM)


@pytest.mark.parametrize(
    ("written", "key", "tier"),
    [
        ("secret=premium", "secret", Tier.PREMIUM),
        ("secret=best_effort", "secret", Tier.BEST_EFFORT),
        ("secret", "secret", None),
        ("c2VjcmV0cw==", "c2VjcmV0cw==", None),
        ("premium", "premium", None),
        ("name=Premium", "name", Tier.PREMIUM),
        ("name=gold=standard", "name=gold", Tier.STANDARD),
        ("name=premium=standard", "name=premium", Tier.STANDARD),
        ("=premium", "", Tier.PREMIUM),
    ],
)
def test_a_key_has_a_tier_only_where_one_of_the_three_words_stands_behind_it(
    written: str, key: str, tier: Tier | None
) -> None:
    """Keys that were keys before tiers were still are, also those that end in `=`."""
    assert split_key(written) == (key, tier)


@pytest.mark.parametrize("written", ["name=gold", "name=premiun", "a=b=c"])
def test_a_word_behind_a_key_that_is_no_tier_is_refused(written: str) -> None:
    """A mistyped tier must not become part of the key. The three are named, and what to write instead; not the key."""
    with pytest.raises(UnknownTier, match=r"premium, standard, best_effort.*KEY=standard") as refused:
        split_key(written)
    assert written not in str(refused.value)


def test_where_some_key_has_a_tier_the_others_are_standard() -> None:
    """Who gives one client premium does not mean that all the others may make themselves premium."""
    assert key_tiers(["a=premium", "b", "c=best_effort"]) == {
        "a": Tier.PREMIUM,
        "b": Tier.STANDARD,
        "c": Tier.BEST_EFFORT,
    }
    assert key_tiers(["a", "b"]) == {"a": None, "b": None}
