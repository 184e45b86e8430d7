"""Tiers: whose request matters more, as people write it in a header or behind an API key. Pure.

Theory. A tier comes from a request's header or from its API key; a key's tier is the highest its holder may ask for, so
that nobody makes himself premium. Where no key has a tier, all are trusted alike, and the header is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Tier(IntEnum):
    """Higher ones first, as they are served."""

    PREMIUM = 0
    STANDARD = 1
    BEST_EFFORT = 2

    @property
    def word(self) -> str:
        """As people, headers and settings write it."""
        return self.name.lower()


TIER_DEFAULT = Tier.STANDARD
TIER_WORDS = tuple(tier.word for tier in Tier)
_BY_WORD = {tier.word: tier for tier in Tier}


class UnknownTier(ValueError):
    """A tier that there is not; the text names those that there are."""


def parse_tier(text: str) -> Tier:
    """The tier of that name, in any case; `UnknownTier` names the three."""
    tier = _BY_WORD.get(text.strip().lower())
    if tier is None:
        raise UnknownTier(f"there is no tier {text[:40]!r}; use one of {', '.join(TIER_WORDS)}")
    return tier


def tier_of(header: str | None, key_tier: Tier | None) -> Tier:
    """The tier of a request with this header (None: it has none) and an API key of this tier (None: without one).

    A header may ask for less than the key has. Asking for more gets what the key has.
    """
    if header is None:
        return TIER_DEFAULT if key_tier is None else key_tier
    asked = parse_tier(header)
    return asked if key_tier is None else max(asked, key_tier)


def split_key(written: str) -> tuple[str, Tier | None]:
    """An API key as a setting has it, KEY or KEY=TIER (in any case): what clients send, and its tier if it says one.
    `=` at its end is part of it, so that keys in base64 are what they are; `UnknownTier` for any other word behind the
    last one, which is a tier mistyped sooner than a key. The text does not tell the key."""
    key, equals, word = written.rpartition("=")
    if not equals or not word.strip():
        return written, None
    tier = _BY_WORD.get(word.strip().lower())
    if tier is None:
        raise UnknownTier(
            f"an API key ends in =WORD, and WORD is no tier; use one of {', '.join(TIER_WORDS)}, "
            "or write a key that has = within it as KEY=standard"
        )
    return key, tier


def key_tiers(written: Iterable[str]) -> dict[str, Tier | None]:
    """What clients may send, each with the highest tier it may ask for; None: any. Where some key has a tier, one that
    says none is standard."""
    keys = dict(split_key(one) for one in written)
    if not any(tier is not None for tier in keys.values()):
        return keys
    return {key: TIER_DEFAULT if tier is None else tier for key, tier in keys.items()}
