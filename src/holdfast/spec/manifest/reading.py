"""YAML text to a tree that knows its lines: the only place that knows YAML.

Always true: what is read is bounded (bytes, depth, nodes after aliases are written out) and means what kubectl would
take it to mean; what two readers could take differently (a key twice, a tag, a second document) is refused with its
path and line. Plain words are read as YAML 1.1 does, as kubectl: `yes`, `on` and `010` are no strings unless quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from holdfast.spec.manifest.problems import Problem, inside

BYTES_MAX = 256 * 1024  # as much as kubectl keeps of an applied manifest
DEPTH_MAX = 32  # a manifest has about ten
NODES_MAX = 20_000  # with aliases written out; a manifest of 25 services has about a thousand

Scalar = str | int | float | bool | None
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_YES = frozenset(form(word) for word in ("yes", "true", "on") for form in (str.lower, str.upper, str.capitalize))
_NO = frozenset(form(word) for word in ("no", "false", "off") for form in (str.lower, str.upper, str.capitalize))
_UNTOLD = re.compile("[\x00\ud800-\udfff]")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_OTHER_INT = re.compile(r"0x[0-9a-fA-F]{1,16}|0o?[0-7]{1,16}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Node:
    """A value, and the line that it, or its key, is on."""

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    line: int
    size: int = 1  # nodes in it, with itself


class _Stop(Exception):
    """Nothing further can be read."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read(data: bytes) -> tuple[Node | None, list[Problem]]:
    """The one document in `data`, and what is wrong with how it is written; no node: it cannot be read at all."""
    if len(data) > BYTES_MAX:
        return None, [Problem(1, "", f"the file has {len(data)} bytes, and may have {BYTES_MAX}")]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return None, [Problem(data.count(b"\n", 0, error.start) + 1, "", "the file is not UTF-8")]
    reader = _Reader()
    try:
        for event in _events(text):
            reader.take(event)
    except _Stop as stop:
        return None, [*reader.problems, stop.problem]
    if reader.document is None:
        return None, [*reader.problems, Problem(1, "", "there is no manifest in it")]
    return reader.document, reader.problems


def _events(text: str) -> Iterator[Any]:
    """What the parser reads, one by one; `_Stop` where it cannot."""
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"this is not YAML: {error.problem}"
        raise _Stop(Problem(mark.line + 1 if mark else 1, "", what)) from error
    except yaml.YAMLError as error:
        raise _Stop(Problem(1, "", "this is not YAML: it has control characters")) from error
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF"
        raise _Stop(Problem(1, "", "this is not YAML: it has characters that there are not")) from error


class _Frame:
    """A mapping or a list that is being read."""

    def __init__(self, path: str, line: int, anchor: str | None, is_mapping: bool) -> None:
        self.path, self.line, self.anchor, self.is_mapping = path, line, anchor, is_mapping
        self.entries: dict[str, Node] = {}
        self.items: list[Node] = []
        self.size = 1
        self.key: str | None = None  # of the value that comes next; None: a key comes next
        self.key_line = line

    def path_of_next(self) -> str:
        return inside(self.path, self.key or "") if self.is_mapping else f"{self.path}[{len(self.items)}]"

    def node(self) -> Node:
        return Node(self.entries if self.is_mapping else tuple(self.items), self.line, self.size)


class _Reader:
    """The parser's events, one by one, made a tree; no recursion, so that depth costs nothing."""

    def __init__(self) -> None:
        self.document: Node | None = None
        self.problems: list[Problem] = []
        self._frames: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}  # None: it is not whole yet
        self._nodes = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if getattr(event, "tag", None):
            self._tell(line, f"has the tag {event.tag}, and tags are not read", "leave it out, or quote the value")
        if isinstance(event, yaml.ScalarEvent):
            self._count(1, line)
            if _UNTOLD.search(event.value):
                self._tell(line, "has a character that no process can be told", "leave it out")
            self._add(Node(word(event.value) if event.style is None else event.value, line), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._aliased(event.anchor, line), None)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._open(event, line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            frame = self._frames.pop()
            self._add(frame.node(), frame.anchor)

    def _count(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            raise _Stop(Problem(line, "", f"it has more than {NODES_MAX} values, aliases written out"))

    def _open(self, event: Any, line: int) -> None:
        self._count(1, line)
        if len(self._frames) == DEPTH_MAX:
            raise _Stop(Problem(line, "", f"it is nested more than {DEPTH_MAX} deep"))
        above = self._frames[-1] if self._frames else None
        if above is not None and above.is_mapping and above.key is None:
            raise _Stop(Problem(line, above.path, "a key is a mapping or a list", mend="keys are strings"))
        if event.anchor:
            self._anchors[event.anchor] = None
        path = above.path_of_next() if above is not None else ""
        self._frames.append(_Frame(path, line, event.anchor, isinstance(event, yaml.MappingStartEvent)))

    def _aliased(self, name: str, line: int) -> Node:
        node = self._anchors.get(name)
        if node is None:
            why = "is inside what it stands for" if name in self._anchors else "stands for nothing that came before"
            raise _Stop(Problem(line, self._path(), f"the alias *{name} {why}"))
        self._count(node.size, line)
        return replace(node, line=line)

    def _add(self, node: Node, anchor: str | None) -> None:
        """Put a whole node where it belongs."""
        if anchor:
            self._anchors[anchor] = node
        if not self._frames:
            self._add_document(node)
            return
        frame = self._frames[-1]
        frame.size += node.size
        if not frame.is_mapping:
            frame.items.append(node)
        elif frame.key is None:
            self._take_key(frame, node)
        else:
            frame.entries.setdefault(frame.key, replace(node, line=frame.key_line))
            frame.key = None

    def _take_key(self, frame: _Frame, node: Node) -> None:
        frame.key_line = node.line
        frame.key = node.value if isinstance(node.value, str) else str(node.value)
        if not isinstance(node.value, str):
            mend = "quote it" if node.value is not None else ""
            self._tell(node.line, f"the key {node.value!r} is no string", mend)
        elif frame.key == "<<":
            self._tell(node.line, "merges are not read", "write the fields out")
        elif frame.key in frame.entries:
            first = frame.entries[frame.key].line
            self._tell(node.line, f"is there twice, first on line {first}", "leave one of them out")

    def _add_document(self, node: Node) -> None:
        if node.value is None:
            return
        if self.document is not None:
            what = "a second document begins here, and one file is one manifest"
            raise _Stop(Problem(node.line, "", what, mend="put it into a file of its own"))
        self.document = node

    def _path(self) -> str:
        return self._frames[-1].path_of_next() if self._frames else ""

    def _tell(self, line: int, what: str, mend: str = "") -> None:
        self.problems.append(Problem(line, self._path(), what, mend=mend))


def word(text: str) -> Scalar:
    """What a word without quotes means."""
    if text in _NULLS:
        return None
    if text in _YES or text in _NO:
        return text in _YES
    if _INT.fullmatch(text):
        return int(text)
    if _OTHER_INT.fullmatch(text):
        return int(text, 16) if text.startswith("0x") else int(text.replace("o", ""), 8)
    return float(text) if _FLOAT.fullmatch(text) else text
