"""Models that are wanted of a deployment, as the store says: known by name before, between and after their workers.

Whoever wants a model writes more of it under its key than frontends need; they read its name, and nothing else of it.

Always true: a record that cannot be read changes nothing of what its key said before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from holdfast.discovery.keys import MODELS

NAME_CHARS_MAX = 512  # of a name that clients ask for
WANTED_MAX = 10_000  # of one deployment: ten times what a large fleet has; more are not known here


class WantedModel(msgspec.Struct, frozen=True):
    """What a frontend reads of a model's record; other fields are not for it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]  # that clients ask for


_decode = msgspec.json.Decoder(WantedModel).decode


def models_of(deployment: str) -> str:
    """The prefix that a deployment's wanted models stand under."""
    return f"{MODELS}{deployment}/"


class WantedModels:
    """The names of one deployment's wanted models."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by key

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names.values())

    def name_of(self, key: str) -> str | None:
        """Of the model under that key in the store; None: none is wanted there."""
        return self._names.get(key)

    def snapshot(self, items: Mapping[str, bytes]) -> list[str]:
        """All there is; what cannot be read, in words."""
        for key in self._names.keys() - items.keys():
            del self._names[key]
        return [wrong for key, value in items.items() for wrong in self.put(key, value)]

    def put(self, key: str, value: bytes) -> list[str]:
        """One record; what cannot be read of it, in words."""
        if key not in self._names and len(self._names) >= WANTED_MAX:
            return [f"{key}: more than {WANTED_MAX} models are wanted"]
        try:
            self._names[key] = _decode(value).name
        except (ValueError, RecursionError) as error:
            return [f"{key}: {error}"]
        return []

    def deleted(self, key: str) -> None:
        self._names.pop(key, None)
