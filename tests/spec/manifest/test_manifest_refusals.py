"""Manifests that are refused: each with the exact words, all of them at once."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spec.manifest.checking import check, fields_by_name
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.yaml_text import BYTES_MAX, DEPTH_MAX, NODES_MAX, SHOWN_MAX
from tests.rigs.manifests import END_LINE, RIGHT, accepted, problems, warnings, worker
from tests.rigs.transcripts import FOLDER, must_go_as_written

TABLE = FOLDER / "manifest_refusals.txt"
FRONTEND = "      componentType: frontend\n"


def changed(command: str) -> str:
    """The manifest that a line of the table means."""
    if match := re.fullmatch(r'write ("(?:\\.|[^"])*") for ("(?:\\.|[^"])*")', command):
        new, old = json.loads(match[1]), json.loads(match[2])
        assert old in RIGHT
        return RIGHT.replace(old, new)
    where, _, rest = command.partition(" ")
    text = re.sub(r"\\(x..|.)", lambda escape: {"n": "\n", "t": "\t", "x07": "\x07", "\\": "\\"}[escape[1]], rest)
    match where:
        case "worker":
            return worker(text)
        case "frontend":
            return RIGHT.replace(FRONTEND, FRONTEND + worker(text).removeprefix(RIGHT))
        case "spec":
            return f"{RIGHT}  {text}\n"
        case "file":
            return f"{RIGHT}{text}\n"
        case "only":
            return text
    raise AssertionError(command)


class Refusals:
    def play(self, command: str) -> list[str]:
        return [f"  {line}" for line in problems(changed(command)) or ["accepted"]]


def test_every_refusal_goes_by_its_words() -> None:
    """Path, line, what is wrong, the name that was meant and the mend, for every mistake in the table."""
    must_go_as_written(TABLE, Refusals)


def test_the_table_is_long_and_of_refusals() -> None:
    """At least 30 bad manifests, and none that is accepted."""
    text = TABLE.read_text()
    assert text.count("\n> ") >= 80
    assert "  accepted" not in text


def test_the_right_one_is_right() -> None:
    """The manifest from which all of them differ has no mistake and no warning."""
    assert accepted(RIGHT).name == "chat"
    assert not warnings(RIGHT)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"#" * (BYTES_MAX + 1), [f"line 1: the file has {BYTES_MAX + 1} bytes, and may have {BYTES_MAX}"]),
        (b"a: " + b"[" * 100_000, [f"line 1: it is nested more than {DEPTH_MAX} deep"]),
        (b"a: " + b"{a: " * 50_000, [f"line 1: it is nested more than {DEPTH_MAX} deep"]),
        (b"a: [" + b"a," * 30_000 + b"]", [f"line 1: it has more than {NODES_MAX} values, aliases written out"]),
        (b"a: b\nc: \xff\n", ["line 2: the file is not UTF-8"]),
        (b"\xff\xfea\x00", ["line 1: the file is not UTF-8"]),
        (b"a: 'b", ["line 1: this is not YAML: found unexpected end of stream"]),
    ],
    ids=["large", "deep lists", "deep mappings", "many", "latin", "utf-16", "cut off"],
)
def test_what_is_read_is_bounded(data: bytes, said: list[str]) -> None:
    """A file that is too large, too deep, too long or no text is refused in one line, and soon."""
    assert [str(problem) for problem in check(data).problems] == said


def test_many_mistakes_are_told_soon() -> None:
    """What a struct's fields are is found out once, not for each of thousands that it does not have."""
    fields_by_name.cache_clear()
    found = problems(worker("".join(f"field{number}: 1\n" for number in range(5_000))))
    assert (len(found), found[-1]) == (SHOWN_MAX + 1, f"line {END_LINE + SHOWN_MAX}: and {5_000 - SHOWN_MAX} more")
    assert fields_by_name.cache_info().misses < 20


def test_a_name_as_long_as_the_file_is_cut() -> None:
    """A line is told, not a screen full of one word."""
    (told,) = problems(worker(f'? "{"x" * 200_000}"\n: 1'))
    assert len(told) < 1_000


PIECES = ["a", "b: ", "- ", "[", "]", "{", "}", "&a ", "*a", "!!int ", "? ", ": ", "\n", "  ", "|\n", '"', "'", "#"]
PIECES += ["---\n", '"\\UFFFFFFFF"', '"\\ud800"', "<<: ", "1_0", "0x", "%YAML 1.1\n", "\t", "\r", "\0", "é", ",", ">"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
LINES = RIGHT.splitlines(keepends=True)


@given(TEXTS | st.binary(max_size=60).map(lambda data: data.decode("latin1")))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever is written, there is a manifest or a reason why not, never a crash."""
    found = check(text.encode())
    assert found.manifest is None
    assert found.problems


@given(st.integers(0, len(LINES)), st.integers(0, 8), st.lists(st.sampled_from(PIECES), min_size=1, max_size=5))
def test_no_line_breaks_the_checks(place: int, indent: int, pieces: list[str]) -> None:
    """A right manifest with any one line more is accepted and can be planned, or is refused in words."""
    text = "".join([*LINES[:place], " " * indent + "".join(pieces) + "\n", *LINES[place:]])
    found = check(text.encode())
    assert (found.manifest is None) == bool(found.problems)
    if found.manifest is not None:
        assert pods(found.manifest)


def test_an_alias_bomb_is_refused() -> None:
    """Nine levels of nine aliases each would be 387 million values; they are counted before they are made."""
    levels = "abcdefghi"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise(levels)]
    assert problems("\n".join(lines)) == [f"line 5: it has more than {NODES_MAX} values, aliases written out"]


def test_very_many_mistakes_are_counted() -> None:
    """The first hundred are told, and how many there are more."""
    found = problems(RIGHT + "".join(f"field{number}: 1\n" for number in range(1000)))
    assert len(found) == 101
    assert found[-1] == "line 112: and 900 more"


def test_an_alias_is_what_it_stands_for() -> None:
    """Anchors may be used; a mistake in one is told where it is used, too."""
    text = worker("envs: &envs [{name: A, value: x}]\nextraPodSpec: {mainContainer: {env: *envs}}")
    service = accepted(text).spec.services["Worker"]
    assert service.envs == service.container.env != ()


@pytest.mark.parametrize("word", ["yes", "off", "True", "010", "0x1f", "1e3", ".5", "~", "null", ""])
def test_words_mean_what_they_mean_to_a_cluster(word: str) -> None:
    """Words that YAML 1.1 takes for something else are no strings, unless they are quoted."""
    wanted = [] if word in ("~", "null", "") else ["must be a string"]
    found = problems(worker(f"envs:\n- name: A\n  value: {word}"))
    assert [re.search("must be a string", one)[0] for one in found] == wanted  # type: ignore[index]
    assert accepted(worker(f"envs:\n- name: A\n  value: '{word}'")).spec.services["Worker"].envs[0].value == word
