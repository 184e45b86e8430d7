"""Priority tiers of requests, and their text form in headers and API key settings. Pure.

A request's tier comes from its header or its API key. A key's tier is the highest that its clients may ask for, so that
no client can make itself premium. If no key has a tier, the header decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Tier(IntEnum):
    """A priority tier; requests of a lower number are served first."""

    PREMIUM = 0
    STANDARD = 1
    BEST_EFFORT = 2

    @property
    def label(self) -> str:
        """Return the name used in headers and settings."""
        return self.name.lower()


TIER_DEFAULT = Tier.STANDARD
TIER_LABELS = tuple(tier.label for tier in Tier)
_BY_LABEL = {tier.label: tier for tier in Tier}


class UnknownTier(ValueError):
    """Raised for an unknown tier; the text names the valid ones."""


def parse_tier(text: str) -> Tier:
    """Return the tier with that name, ignoring case; raise `UnknownTier` if there is none."""
    tier = _BY_LABEL.get(text.strip().lower())
    if tier is None:
        raise UnknownTier(f"there is no tier {text[:40]!r}; use one of {', '.join(TIER_LABELS)}")
    return tier


def tier_of(header: str | None, key_tier: Tier | None) -> Tier:
    """Return the tier of a request with this header (None: no header) and an API key of this tier (None: no tier).

    A header can ask for a lower tier than the key's; asking for a higher one gives the key's.
    """
    if header is None:
        return TIER_DEFAULT if key_tier is None else key_tier
    asked = parse_tier(header)
    return asked if key_tier is None else max(asked, key_tier)


def split_key(written: str) -> tuple[str, Tier | None]:
    """Split an API key setting, KEY or KEY=TIER (case ignored), into the key that clients send and its tier, if given.

    A final `=` belongs to the key, because base64 ends so. Any other text after the last `=` raises `UnknownTier`: it
    is more likely a mistyped tier than part of a key. The error text does not contain the key."""
    key, equals, label = written.rpartition("=")
    if not equals or not label.strip():
        return written, None
    tier = _BY_LABEL.get(label.strip().lower())
    if tier is None:
        raise UnknownTier(
            f"an API key ends in =WORD, and WORD is no tier; use one of {', '.join(TIER_LABELS)}, "
            "or write a key that has = within it as KEY=standard"
        )
    return key, tier


def key_tiers(written: Iterable[str]) -> dict[str, Tier | None]:
    """Return the API keys, each with the highest tier that it allows; None: any. If some key has a tier, a key without
    one is standard."""
    keys = dict(split_key(one) for one in written)
    if not any(tier is not None for tier in keys.values()):
        return keys
    return {key: TIER_DEFAULT if tier is None else tier for key, tier in keys.items()}
