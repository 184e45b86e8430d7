"""Checks what a script can count of the style of `src`: plain words, docstrings that are sentences, class names that
are unique, folders that import in one direction, modules that are whole ideas. Words and docstrings also of `bench` and
`tests/rigs`.

`LATER` are the rooms whose code the merge of the control planes rewrites. Other bounds are ratchets: lower them when
the tree gets better, never raise them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# Rewritten when the three control planes become one.
LATER = (
    "rollout/",
    "cli/fleet/",
    "cli/deployments/",
    "supervise/",
    "roles/",
)

# Words for people; things are "it" and "which", and the actor has a name.
DIALECT = re.compile(r"\b(who|whoever|nobody|somebody|anew|wish)\b", re.IGNORECASE)
DIALECT_MAX = {"src/holdfast": 70, "bench": 2, "tests/rigs": 48}  # the rest are names of code that is rewritten later
DIALECT_IN_NAMES = {"who", "whoever", "nobody", "somebody", "anew", "wish", "wishes"}

VERBLESS_SHARE_MAX = 0.03

OWN_PROTOCOL = "a message; each protocol has its own, in the names of the field"
PUBLIC = "public in `holdfast.testing`, and used by other people's tests"
REPEATS = {
    "Hello": OWN_PROTOCOL,
    "Welcome": OWN_PROTOCOL,
    "Ping": OWN_PROTOCOL,
    "Pong": OWN_PROTOCOL,
    "Refused": OWN_PROTOCOL,
    "Done": OWN_PROTOCOL,
    "Failed": OWN_PROTOCOL,
    "Put": OWN_PROTOCOL,
    "Step": OWN_PROTOCOL,
    "Room": OWN_PROTOCOL,
    "Answer": PUBLIC,
    "CanaryQuestion": "the manifest's field, and the question that is made of it",
    "Limits": "the manifest's field, and what an engine declares",
}

SMALL_LINES = 80
# module -> why it is a file of its own though it is small and one module imports it
SMALL = {
    "cli/progress.py": "a bench uses it, too",
    "engines/vllm/environment.py": "read before vLLM is imported, so it imports nothing of it",
    "failover/opening.py": "the one place that knows all locks",
}
# Pairs of folders that import each other today; one that no longer does must go.
BOTH_WAYS = {
    (".", "cli"),
    ("engines/host", "engines/sim"),
    ("engines/torch", "engines/torch/gpu"),
    ("engines/torch", "engines/torch/ranks"),
    ("engines/torch/gpu", "engines/torch/model"),
    ("engines/vllm", "engines/vllm/ranks"),
    ("failover", "failover/lock_server"),
}

VERBS = frozenset(
    """
    accept acknowledge acquire act add admit adopt advance allocate allow announce answer append apply appear
    arrive ask assemble assert assign attach await become begin belong bind block break bring build call cancel
    carry catch change check choose claim classify clear close collect come commit compare compute configure
    confirm connect consider construct contain continue convert copy count cover create cut decide declare
    decode decrease defer define delete deliver deny derive describe detach detect differ discard distribute do
    donate drain draw drive drop emit enable encode end enforce enqueue ensure enter escape estimate evaluate evict
    examine exchange exclude execute exist exit expect explain export extend extract fail fall fence fetch fill
    find finish fit fold follow forget format forward free freeze gather generate get give go grant group grow
    guard halt hand handle hash have hide hold identify ignore implement import include increase index inform
    inspect install interpret introduce invalidate issue iterate join judge keep kill know lack last launch lead
    learn leave let limit link list listen live load lock log look lose lower make manage map mark match mean
    measure merge migrate mirror mount move name need negotiate normalise note notice notify observe obtain
    occur offer open order override own pack pad parse pass pause perform pick pin place plan play poll post prefer
    prefill prepare preserve prevent print probe process produce promote propose prove provide publish pull push
    put queue quit raise range reach react read reap rebuild recall receive recompute record recover refer
    refill refuse register reject relate release reload remain remap remember remove rename render renew repair
    repeat replace replay reply report request require reserve reset resolve respond restart restore resume
    retain retry return reuse rewrite roll round route run sample save say scale scan schedule score scrub seal
    search see seed select send separate serve set settle shed shift shorten show shrink shut sign signal
    simulate sit skip sleep slice sort spawn speak split spread stand start state stay step stop store stream
    strip submit subtract sum supply survive suspend swap switch sync take tell terminate test think throttle time
    touch trace track train transfer translate travel treat trim truncate try turn unbind unlink unlock unmap
    unpack unregister update upgrade use validate verify view visit wait wake walk want warm warn watch weigh
    work wrap write yield
    """.split()  # noqa: SIM905
)
FORMS = frozenset(
    """
    is are was were be been has had does did can may must will would should cannot made kept held sent ran gone
    went got took taken given gave known knew lost found told said written wrote ended began came died dies lies lie
    """.split()  # noqa: SIM905
)


class Definition(NamedTuple):
    """A module, class or function of a file."""

    kind: type[ast.AST]
    name: str
    line: int
    docstring: str


@dataclass(slots=True)
class Outline:
    """What the checks need of a file. Its tree is not kept: those of all files are millions of objects."""

    text: str
    definitions: list[Definition] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)  # dotted names, of modules or of what is in them


@cache
def modules(folder: str = "src/holdfast") -> dict[str, Outline]:
    """Return the outline of every file of a folder, by its path in it."""
    root = ROOT / folder
    return {str(path.relative_to(root)): outline(path.read_text()) for path in sorted(root.rglob("*.py"))}


def outline(text: str) -> Outline:
    """Return a file's outline. Only statements are looked at: expressions, nine of ten nodes, define nothing here."""
    found = Outline(text)
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:  # grows meanwhile
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
            found.definitions.append(Definition(type(node), name, line, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found.imported |= {alias.name for alias in node.names}
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, part, None)
            nodes += inside if isinstance(inside, list) else ()
    return found


def now(folder: str = "src/holdfast") -> dict[str, Outline]:
    """Return the modules that these checks hold for today."""
    later = LATER if folder == "src/holdfast" else ()
    return {name: module for name, module in modules(folder).items() if not name.startswith(later)}


def has_verb(docstring: str, *, sentence: bool) -> bool:
    """Return True if the first sentence (or else the first paragraph) begins with a verb or has one. A heuristic: it
    knows no grammar, only forms."""
    first = re.split(r"(?<=[.!?])\s|\n\n" if sentence else r"\n\n", docstring.strip(), maxsplit=1)[0]
    words = [word.lower() for word in re.findall(r"[A-Za-z']+", first)]
    if not words or words[0] in VERBS:
        return True
    if any(word in FORMS or _stem(word) in VERBS for word in words):
        return True
    return any(
        (before.endswith("s") or before in ("which", "that", "to", "they", "it")) and word in VERBS
        for before, word in itertools.pairwise(words)
    )


def _stem(word: str) -> str:
    """Return the verb of a third person ("holds", "catches", "carries"); empty for another form."""
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    if word.endswith("es") and word[:-2] in VERBS:
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else ""


@pytest.mark.parametrize("folder", DIALECT_MAX)
def test_code_speaks_of_things_in_plain_words(folder: str) -> None:
    """Words for people are rare outside the rooms that are rewritten later."""
    counts = {name: len(DIALECT.findall(one.text)) for name, one in now(folder).items()}
    worst = sorted(((count, name) for name, count in counts.items() if count), reverse=True)[:20]
    assert sum(counts.values()) <= DIALECT_MAX[folder], worst


def test_no_public_name_has_a_word_for_people() -> None:
    """Modules, classes, functions and arguments are named after things and what they do."""
    found = []
    for name, module in now().items():
        names = {Path(name).stem, *(one.name for one in module.definitions)}
        found += [f"{name}: {one}" for one in sorted(names) if DIALECT_IN_NAMES & set(_parts(one))]
    assert not found


def _parts(identifier: str) -> list[str]:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", identifier).lower().split("_")


@pytest.mark.parametrize("folder", DIALECT_MAX)
def test_docstrings_are_sentences(folder: str) -> None:
    """Nearly every function's docstring begins with a sentence that has a verb; a class or module may be named
    first."""
    docstrings = [
        (f"{name}:{one.line}", one.docstring, one.kind in (ast.FunctionDef, ast.AsyncFunctionDef))
        for name, module in now(folder).items()
        for one in module.definitions
        if one.docstring
    ]
    without = [
        f"{where}: {text.splitlines()[0]}"
        for where, text, sentence in docstrings
        if not has_verb(text, sentence=sentence)
    ]
    assert len(without) <= VERBLESS_SHARE_MAX * len(docstrings), "\n".join(without[:40])


def test_a_class_name_is_used_once() -> None:
    """A search for a class finds one class."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, module in modules().items():
        for one in module.definitions:
            if one.kind is ast.ClassDef:
                places[one.name].append(f"{name}:{one.line}")
    repeated = {
        name: found
        for name, found in places.items()
        if len([one for one in found if not one.startswith(LATER)]) > 1 and name not in REPEATS and name[0] != "_"
    }
    assert not repeated
    assert not [name for name in REPEATS if len(places[name]) < 2], "exceptions no longer used"


def imports() -> dict[str, set[str]]:
    """Return, for each module of the package, the modules that import it."""
    importers: dict[str, set[str]] = defaultdict(set)
    known = {_dotted(name): name for name in modules()}
    for name, module in modules().items():
        for one in module.imported:
            if one in known and known[one] != name:
                importers[known[one]].add(name)
    return importers


def _dotted(name: str) -> str:
    return "holdfast." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_folders_do_not_import_each_other_both_ways() -> None:
    """Of two folders at most one imports the other."""
    pairs = {
        (str(Path(importer).parent), str(Path(name).parent))
        for name, found in imports().items()
        for importer in found
        if Path(name).name != "__init__.py" and Path(importer).name != "__init__.py"
    }
    both = {
        tuple(sorted(pair))
        for pair in pairs
        if pair[0] != pair[1] and pair[::-1] in pairs and not any(f"{one}/".startswith(LATER) for one in pair)
    }
    assert both == BOTH_WAYS


def test_a_module_is_a_whole_idea() -> None:
    """A small module that one module imports belongs into that one."""
    found = imports()
    small = {
        f"{name} (of {next(iter(found[name]))})"
        for name, module in now().items()
        if len(module.text.splitlines()) < SMALL_LINES
        and len(found[name]) == 1
        and Path(name).name not in ("__init__.py", "__main__.py")
        and "__main__" not in module.text
        and name not in SMALL
    }
    assert sorted(small) == []
