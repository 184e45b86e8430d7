"""A manifest written out again: as plain data for JSON, and as YAML text that reads the same.

Always true: what is written is what was said, without comments, in the order it was said unless that is asked for.
"""

from __future__ import annotations

from typing import Any

import yaml

from holdfast.spec.manifest.reading import Node, read, word


def plain(text: str) -> dict[str, Any]:
    """What a manifest that was checked says."""
    node, _ = read(text.encode())
    assert node is not None, "it was read before"
    said = _plain(node)
    assert isinstance(said, dict), "a manifest is a mapping"
    return said


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(inner) for key, inner in node.value.items()}
    return [_plain(inner) for inner in node.value] if isinstance(node.value, tuple) else node.value


def in_yaml(said: Any, *, in_order_of_names: bool = False) -> str:
    """Text that `reading` takes to mean the same."""
    how = {"sort_keys": in_order_of_names, "default_flow_style": False, "allow_unicode": True, "width": 120}
    text: str = yaml.dump(said, Dumper=_Dumper, **how)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Two that are equal are written twice, not as an alias of one."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        """Quoted, where the word alone would be read as another value."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if word(data) == data else "'")


_Dumper.add_representer(str, _Dumper.represent_str)
