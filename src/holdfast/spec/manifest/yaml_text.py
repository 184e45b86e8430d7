"""Parses YAML into a tree with line numbers, and writes plain data as YAML that parses to the same; no other file
handles YAML.

Always true:
- The input is bounded: bytes, depth, and nodes after aliases are expanded.
- It means the same as to kubectl. Plain scalars follow YAML 1.1: `yes`, `on` and `010` are not strings unless quoted.
- Constructs that parsers interpret differently (a duplicate key, a tag, a second document) are refused with path and
  line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from holdfast.core.text import printable

SHOWN_MAX = 100  # problems shown of one file; the user fixes those first
CHARS_MAX = 400  # of a path or text: a name or a value may be as long as the file
BYTES_MAX = 256 * 1024  # as much as kubectl stores of an applied manifest
DEPTH_MAX = 32  # a manifest has about ten
NODES_MAX = 20_000  # with aliases expanded; a manifest of 25 services has about a thousand

Scalar = str | int | float | bool | None
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_YES = frozenset(form(word) for word in ("yes", "true", "on") for form in (str.lower, str.upper, str.capitalize))
_NO = frozenset(form(word) for word in ("no", "false", "off") for form in (str.lower, str.upper, str.capitalize))
_UNTOLD = re.compile("[\x00\ud800-\udfff]")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_OTHER_INT = re.compile(r"0x[0-9a-fA-F]{1,16}|0o?[0-7]{1,16}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A problem or warning; its text is one line."""

    line: int
    path: str  # as kubectl writes it: spec.services.Worker.envs[0].name; "": the whole file
    what: str
    nearest: str = ""  # the known name that was probably meant
    mend: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: {printable(self.path, CHARS_MAX)}: " if self.path else f"line {self.line}: "
        meant = f"; did you mean {self.nearest}?" if self.nearest else ""
        mend = f"; {printable(self.mend, CHARS_MAX)}" if self.mend else ""
        return f"{where}{printable(self.what, CHARS_MAX)}{meant}{mend}"


def in_order(found: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return problems in the order of lines; of more than `SHOWN_MAX`, the first ones and a count."""
    everything = sorted(set(found))
    shown, rest = everything[:SHOWN_MAX], everything[SHOWN_MAX:]
    return (*shown, Problem(rest[0].line, "", f"and {len(rest)} more")) if rest else tuple(shown)


def inside(path: str, name: str) -> str:
    """Return the path of a field."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value, and the line of its key or of itself."""

    value: Scalar | tuple[YamlNode, ...] | dict[str, YamlNode]
    line: int
    size: int = 1  # nodes in it, including itself


class _Stop(Exception):
    """Parsing cannot continue."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read(data: bytes) -> tuple[YamlNode | None, list[Problem]]:
    """Return the one document in `data`, or None if it cannot be parsed, and the problems of its syntax."""
    if len(data) > BYTES_MAX:
        return None, [Problem(1, "", f"the file has {len(data)} bytes, and may have {BYTES_MAX}")]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return None, [Problem(data.count(b"\n", 0, error.start) + 1, "", "the file is not UTF-8")]
    reader = _Reader()
    try:
        for event in _events(text):
            reader.read_event(event)
    except _Stop as stop:
        return None, [*reader.problems, stop.problem]
    if reader.document is None:
        return None, [*reader.problems, Problem(1, "", "there is no manifest in it")]
    return reader.document, reader.problems


def _events(text: str) -> Iterator[Any]:
    """Yield the parser's events; raise `_Stop` at a syntax error."""
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
        self.entries: dict[str, YamlNode] = {}
        self.items: list[YamlNode] = []
        self.size = 1
        self.key: str | None = None  # key of the next value; None: a key comes next
        self.key_line = line

    def path_of_next(self) -> str:
        return inside(self.path, self.key or "") if self.is_mapping else f"{self.path}[{len(self.items)}]"

    def node(self) -> YamlNode:
        return YamlNode(self.entries if self.is_mapping else tuple(self.items), self.line, self.size)


class _Reader:
    """Builds a tree from the parser's events, without recursion."""

    def __init__(self) -> None:
        self.document: YamlNode | None = None
        self.problems: list[Problem] = []
        self._frames: list[_Frame] = []
        self._anchors: dict[str, YamlNode | None] = {}  # None: its node is not complete yet
        self._nodes = 0

    def read_event(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if getattr(event, "tag", None):
            self._tell(line, f"has the tag {event.tag}, and tags are not read", "leave it out, or quote the value")
        if isinstance(event, yaml.ScalarEvent):
            self._count(1, line)
            if _UNTOLD.search(event.value):
                self._tell(line, "has a character that no process can be told", "leave it out")
            self._add(YamlNode(scalar_value(event.value) if event.style is None else event.value, line), event.anchor)
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

    def _aliased(self, name: str, line: int) -> YamlNode:
        node = self._anchors.get(name)
        if node is None:
            why = "is inside what it stands for" if name in self._anchors else "stands for nothing that came before"
            raise _Stop(Problem(line, self._path(), f"the alias *{name} {why}"))
        self._count(node.size, line)
        return replace(node, line=line)

    def _add(self, node: YamlNode, anchor: str | None) -> None:
        """Add a complete node to its parent."""
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

    def _take_key(self, frame: _Frame, node: YamlNode) -> None:
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

    def _add_document(self, node: YamlNode) -> None:
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


def scalar_value(text: str) -> Scalar:
    """Return the value of a plain (unquoted) scalar."""
    if text in _NULLS:
        return None
    if text in _YES or text in _NO:
        return text in _YES
    if _INT.fullmatch(text):
        return int(text)
    if _OTHER_INT.fullmatch(text):
        return int(text, 16) if text.startswith("0x") else int(text.replace("o", ""), 8)
    return float(text) if _FLOAT.fullmatch(text) else text


# -- a manifest as plain data for JSON, and as YAML text


def plain(text: str) -> dict[str, Any]:
    """Return a checked manifest as plain data."""
    node, _ = read(text.encode())
    assert node is not None, "it was read before"
    said = _plain(node)
    assert isinstance(said, dict), "a manifest is a mapping"
    return said


def _plain(node: YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(inner) for key, inner in node.value.items()}
    return [_plain(inner) for inner in node.value] if isinstance(node.value, tuple) else node.value


def in_yaml(said: Any, *, in_order_of_names: bool = False) -> str:
    """Return YAML text that `read` parses to the same data, in its own order unless sorting is requested."""
    how = {"sort_keys": in_order_of_names, "default_flow_style": False, "allow_unicode": True, "width": 120}
    text: str = yaml.dump(said, Dumper=_Dumper, **how)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes equal values twice, not as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        """Quote a string that would be parsed as another value."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if scalar_value(data) == data else "'")


_Dumper.add_representer(str, _Dumper.represent_str)
