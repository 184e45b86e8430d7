"""The style that can be counted: sizes, sentences, where the outside world may be touched, and that whatever is
referred to is there.

Every exception stands here with its reason; one that is no longer used must go.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import subprocess
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "holdfast"
TESTS = ROOT / "tests"
BENCH = ROOT / "bench"
FILE_LINES_MAX = 600  # 100 to 600 lines are normal: one idea is not cut in pieces to make files small
MACHINE_LINES_MAX = 1000  # a pure machine: its state, words, table and `step` stay together
FUNCTION_LINES_MAX = 70

MEASURES = "measures and breaks real processes in real time"
OPERATOR = "a command waits for real processes, with no event loop"
# file or folder -> why it may
CLOCK = {
    "core/ports.py": "the real clocks behind the port",
    "worker/beat.py": "beats come from a thread of its own, not from the event loop (facts 31)",
    "engines/host/step_thread.py": "steps are timed in their own thread, which has no event loop",
    "engines/torch/stepper.py": "likewise",
    "engines/vllm/stepper.py": "likewise",
    "engines/torch/computer.py": "what compiling cost is told, from the same thread",
    "engines/host/memory.py": "a takeover's marks, on the one clock all processes share",
    "cli/": OPERATOR,
    "roles/": OPERATOR,
    "testing/": MEASURES,
}
RANKS = "an engine's processes: descriptors, and a step's words, over socket pairs"
SOCKETS = {
    "core/procfs.py": "asks the kernel about a socket that somebody else opened",
    "wire/net.py": "the real network behind the port",
    "wire/accepting.py": "the listening half of the real network",
    "worker/beat.py": "beats come from a thread of its own, not from the event loop (facts 31)",
    "engines/sim/": "the fault socket, outside of what it breaks",
    "engines/ranks/": RANKS,
    "engines/host/rank.py": RANKS,
    "memory/": "descriptors travel over Unix sockets only, which no simulated network can carry",
    "cli/": "looks whether a port is free before it starts anything",
    "testing/": MEASURES,
}
ROOTS = {
    "frontend/metrics.py": "a scrape's task: a bug there must not leave its client without an answer",
    "engines/torch/files/hub_fetch.py": "the root of a process that only fetches: it says what went wrong, and ends",
    "frontend/app.py": "the root of a request: a bug becomes a 500 and a log line",
    "frontend/text/tokenizer.py": "the binding raises bare Exception, and nothing narrower",
    "worker/admin_actions.py": "the root of an operator's action: a bug becomes a 500 and a log line",
    "engines/host/step_thread.py": "the root of the step thread: after any error no step can be believed",
    "engines/vllm/engine.py": "vLLM's libraries raise bare subclasses of Exception while it makes its engine",
    "engines/host/rank.py": "the root of a rank's step thread, likewise",
    "streams/roster.py": "the root of a worker's task: a bug costs one session",
    "streams/link.py": "the root of one stream's part of a step that many share: a bug costs one stream",
    "streams/hold_policy.py": "the root of one stream's part of a worker's end or of a round through held streams",
    "control/event_mirror.py": "the root of a mirror: a bug there costs those who read it a rest, and serving nothing",
    "control/process.py": "the root of a leadership: a bug gives the lock back, and the next one begins",
    "control/leadership.py": "the root of one worker's part of what happens: a bug costs that step",
    "control/worker_probe.py": "the root of a worker's task: a bug costs one session",
    "control/fleet_loop.py": "the root of what is written of a fleet: a bug begins it anew, and no verdict waits",
    "control/outbox.py": "the root of what follows from one verdict: a bug costs that action only",
    "store/client.py": "the root of the client's task",
    "store/etcd_client.py": "the root of the client's task",
    "roles/ray/cluster.py": "the root of a thread that asks Ray: who waits for it is told",
    "supervise/hosting.py": "a look at its replicas, which costs the supervisor nothing",
}
ENVIRONMENT = {
    "settings.py": "the only reader",
    "roles/ray/model_actor.py": "handed on, unread, to a replica's processes, without what Ray put there",
    "roles/__main__.py": "written, unread: the variables that its launch says",
    "roles/engine_vllm.py": "written, unread: what vLLM reads of it as it is imported",
    "testing/rig.py": "handed on to what is started, with a state directory of its own",
    "memory/vault/keeper.py": "handed on, unread, to the vault it starts",
}

TIME = {
    "time": {"time", "monotonic", "perf_counter", "process_time", "sleep", "time_ns", "monotonic_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
RANDOM_ALLOWED = {"Random", "SystemRandom"}
SPAWNS = {"core/tasks.py": "the one helper"}
NO_DEADLINE = {
    "src/holdfast/health/liveness.py": "its time is its observer's ticks, which come anyway",
    "src/holdfast/fleet/agent.py": "its node looks at its processes twice a second anyway",
}
ACTING = {"asyncio", "os", "random", "select", "signal", "socket", "subprocess", "threading", "time"}
CONNECTING = {"open_connection", "open_unix_connection", "start_server", "start_unix_server"}


@cache
def trees(folder: Path) -> dict[str, ast.Module]:
    """Every Python file under a folder, read once."""
    return {str(path.relative_to(folder)): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def violations(found: Callable[[ast.AST], str | None], allowed: dict[str, str]) -> list[str]:
    """What is found in files that may not, and exceptions that are not used any more."""
    wrong: list[str] = []
    used: set[str] = set()
    for name, tree in trees(SRC).items():
        reason = next(
            (entry for entry in allowed if name == entry or (entry[-1] == "/" and name.startswith(entry))), ""
        )
        for node in ast.walk(tree):
            what = found(node)
            if what and reason:
                used.add(reason)
            elif what:
                wrong.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return wrong + [f"exception no longer used: {entry}" for entry in allowed if entry not in used]


def named(node: ast.AST) -> list[tuple[str, str]]:
    """("time", "monotonic") for `time.monotonic` and for `from time import monotonic`."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "", alias.name) for alias in node.names]
    if not isinstance(node, ast.Attribute):
        return []
    value = node.value
    return [(value.id if isinstance(value, ast.Name) else getattr(value, "attr", ""), node.attr)]


# -- sizes


SOURCES = {
    str(folder.relative_to(ROOT) / name): tree for folder in (SRC, BENCH) for name, tree in trees(folder).items()
}
ALL_TESTS = {f"tests/{name}": tree for name, tree in trees(TESTS).items()} | {
    name: tree for name, tree in SOURCES.items() if name.startswith("bench/tests/")
}


@cache
def machines() -> frozenset[str]:
    """Files of pure machines (state, words, table, step): those with a `step` that is given the time."""
    return frozenset(
        name
        for name, tree in SOURCES.items()
        for function in functions(tree)
        if function.name == "step" and "now_s" in {argument.arg for argument in function.args.args}
    )


def test_a_file_is_one_idea() -> None:
    """No source file is longer than the bound: past it, it is usually two ideas. A pure machine is one."""
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in SOURCES}
    bounds = {name: MACHINE_LINES_MAX if name in machines() else FILE_LINES_MAX for name in SOURCES}
    assert not {name: count for name, count in lines.items() if count > bounds[name]}


def test_a_function_can_be_read_at_once() -> None:
    """No function is longer than the hard bound."""
    sizes = {
        f"{name}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in SOURCES.items()
        for function in functions(tree)
    }
    assert not {name: size for name, size in sizes.items() if size > FUNCTION_LINES_MAX}


# -- sentences


def test_every_module_says_what_it_is_for() -> None:
    """Sources and tests open with a docstring."""
    silent = [name for name, tree in (SOURCES | ALL_TESTS).items() if not ast.get_docstring(tree)]
    assert not silent


def test_every_test_says_what_must_be_true() -> None:
    """A test's docstring is its sentence."""
    silent = [
        f"{name}: {function.name}"
        for name, tree in ALL_TESTS.items()
        for function in functions(tree)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert not silent


def test_no_two_test_files_share_a_name() -> None:
    """They are imported by their base name; rigs are a package."""
    names = Counter(Path(name).name for name in ALL_TESTS if Path(name).name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_is_left_for_later_and_nothing_names_a_machine() -> None:
    """No marks of unfinished work, no paths of the machine something was written on."""
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b|/(work|home|Users|root)/")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for folder in (SRC, TESTS, BENCH)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", ".txt", ".jinja", ".toml") and path != Path(__file__)
        for match in marks.finditer(path.read_text())
    ]
    assert not found


# -- machines


@pytest.mark.parametrize("name", sorted(machines()))
def test_a_machine_is_pure_and_has_the_one_shape(name: str) -> None:
    """It imports nothing that acts or tells the time, and says when it is to be stepped next."""
    tree = SOURCES[name]
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in modules} & ACTING
    assert (name in NO_DEADLINE) != ("next_deadline_s" in {function.name for function in functions(tree)})


# -- where the world may be touched


@pytest.mark.parametrize(
    ("touches", "allowed"),
    [
        pytest.param(lambda owner, name: name in TIME.get(owner, ()), CLOCK, id="time comes from the event loop"),
        # `self.random.x` would read the same: an injected generator is named rng.
        pytest.param(
            lambda owner, name: (
                (owner == "random" and name not in RANDOM_ALLOWED)
                or (owner, name) in {("os", "urandom"), ("uuid", "uuid4")}
                or owner == "secrets"
            ),
            {},
            id="randomness is injected",
        ),
        pytest.param(
            lambda owner, name: owner == "socket" or (owner == "asyncio" and name in CONNECTING),
            SOCKETS,
            id="connections come through the port",
        ),
        pytest.param(
            lambda owner, name: owner == "os" and name in ("environ", "getenv", "environb"),
            ENVIRONMENT,
            id="the environment is read once",
        ),
    ],
)
def test_the_world_is_touched_in_named_files_only(touches: Callable[[str, str], bool], allowed: dict[str, str]) -> None:
    """Clocks and sleeps, random numbers, sockets and variables: everybody else is handed them."""

    def found(node: ast.AST) -> str | None:
        return next((f"{owner}.{name}" for owner, name in named(node) if touches(owner, name)), None)

    assert violations(found, allowed) == []


def test_tasks_are_spawned_by_the_one_helper() -> None:
    """Or in a task group: nobody else starts a task that can be lost, or fail without a word."""
    groups: set[str] = set()

    def found(node: ast.AST) -> str | None:
        if isinstance(node, ast.Module):  # another file
            groups.clear()
        if isinstance(node, ast.withitem) and ast.unparse(node.context_expr) == "asyncio.TaskGroup()":
            groups.add(ast.unparse(node.optional_vars) if node.optional_vars else "")
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "asyncio.TaskGroup":
            groups.add(node.arg)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in groups:
            return None
        tasks = [f"{owner}.{name}" for owner, name in named(node) if name in ("create_task", "ensure_future")]
        return tasks[0] if tasks else None

    assert violations(found, SPAWNS) == []


def test_every_setting_is_read() -> None:
    """A field of a struct of settings that nobody reads would be a wish that is quietly dropped."""
    fields: set[str] = set()
    read: set[str] = set()
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if name.startswith("src/holdfast/spec/") and isinstance(node, ast.ClassDef):
                own = [one for one in node.body if isinstance(one, ast.AnnAssign) and "about(" in ast.unparse(one)]
                fields |= {ast.unparse(one.target) for one in own}
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert len(fields) > 50
    assert sorted(fields - read) == []


def test_everything_is_caught_at_the_root_of_a_task_only() -> None:
    """`except Exception` in named places; `except BaseException` only to clean up and raise again; never bare."""

    def found(node: ast.AST) -> str | None:
        if not isinstance(node, ast.ExceptHandler):
            return None
        names = {getattr(part, "id", "") for part in ast.walk(node.type)} if node.type is not None else {"bare except"}
        raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if names & {"bare except", "BaseException"} and not raises:
            return "catches everything and does not raise it again"
        return "except Exception" if "Exception" in names else None

    assert violations(found, ROOTS) == []


# -- what is tracked, and what is referred to

STRAY = {".orig", ".rej", ".bak", ".swp", ".pyc", ".log", ".tmp", ".diff", ".patch"}
FILE_BYTES_MAX = 100_000
LARGE = {"src/holdfast/engines/sim/data/tokenizer.json": "a whole tokenizer, as models have it"}
NAMED_ELSEWHERE = {"toml": "holdfast.toml, a person's own settings", "pip.py": "a stranger's, which is not loaded"}

ROOMS = "|".join(sorted(path.name for path in SRC.iterdir() if (path / "__init__.py").exists()))
FACT = re.compile(r"\bfacts? (\d+[a-z]?(?:(?:, | and |-)\d+[a-z]?)*)")
A_PATH = re.compile(r"(?<![\w/.$~*-])((?:[\w-]+/)*[\w-]+\.(?:py|md|sh)|(?:docs|tests|bench|scripts)/[\w/.-]+\w)\b")
A_MODULE = re.compile(rf"\bholdfast((?:\.[A-Za-z_]\w*)+)|`((?:{ROOMS})(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?)(?:\(\))?`")
A_FOLDER = re.compile(rf"`((?:{ROOMS})/[\w/]*)`")
A_TARGET = re.compile(r"`make ([a-z][a-zA-Z-]*)|^(?:    |\$ )make ([a-z][a-z-]*)", re.MULTILINE)
A_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


@cache
def tracked() -> dict[str, Path]:
    """Every file under version control, by its path from the root."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a checkout: {error}")
    return {name: ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@cache
def sentences(path: Path) -> tuple[str, ...]:
    """What a file says to people: a page's text, a source file's comments and docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return (text,)
    comments = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return ("\n".join(comments), *(ast.get_docstring(node, clean=False) or "" for node in nodes))


def said(*suffixes: str) -> Iterator[tuple[str, str]]:
    """(file, what it says) for all tracked files of these kinds, except the history of releases."""
    for name, path in tracked().items():
        if path.suffix in suffixes and name != "CHANGELOG.md":
            yield from ((name, text) for text in sentences(path))


def is_there(name: str, where: str) -> bool:
    """Whether a file or folder of that name can be found from the file that speaks of it, or anywhere by its tail."""
    bases = (ROOT, SRC, (ROOT / where).parent)
    return any((base / name).exists() for base in bases) or any(path.endswith(f"/{name}") for path in tracked())


def is_module(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something that one names."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = SRC.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.exists():
            return all(re.search(rf"\b{word}\b", file.read_text()) for word in parts[count:])
    return False


def test_no_stray_files() -> None:
    """No editor's or patch's leavings are tracked, and nothing large but results."""
    stray = [name for name, path in tracked().items() if path.suffix in STRAY or name.endswith("~")]
    large = {name for name, path in tracked().items() if path.stat().st_size > FILE_BYTES_MAX}
    assert stray == []
    assert {name for name in large if not name.startswith("bench/results/")} == set(LARGE)


def test_cited_facts_are_there() -> None:
    """Each "facts 31" is a row of docs/facts.md; 31a is a part of row 31."""
    rows = re.findall(r"^\| ([\d, a-z]+) \|", (ROOT / "docs" / "facts.md").read_text(), re.MULTILINE)
    known = {number for row in rows for number in row.split(", ")}
    cited = [
        (name, number)
        for name, text in said(".py", ".md", ".txt", ".sh")
        for match in FACT.finditer(text)
        for number in re.findall(r"\d+[a-z]?", match[1])
    ]
    missing = {f"{name}: {number}" for name, number in cited if not {number, number.rstrip("abcdefgh")} & known}
    assert not missing, "\n".join(sorted(missing))


def test_nothing_refers_to_what_is_not_there() -> None:
    """Files, folders, modules, make's targets and links, in comments, docstrings and docs."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    dangling: list[str] = []
    for name, text in said(".py", ".md"):
        found = {word for word in A_PATH.findall(text) if not is_there(word, name)}
        found |= {word for word in A_FOLDER.findall(text) if not is_there(word.rstrip("/"), name)}
        modules = {ours.lstrip(".") or quoted for ours, quoted in A_MODULE.findall(text)}
        found |= {word for word in modules if not is_module(word)}
        made = {re.sub(r"-(NAME)?$", "-[a-z-]+", quoted or typed) for quoted, typed in A_TARGET.findall(text)}
        found |= {f"make {word}" for word in made if not any(re.fullmatch(word, target) for target in targets)}
        if name.endswith(".md"):
            found |= {word for word in A_LINK.findall(text) if not ((ROOT / name).parent / word).exists()}
        dangling += [f"{name}: {word}" for word in sorted(found) if word not in NAMED_ELSEWHERE]
    assert not dangling, "\n".join(dangling)


def test_the_readme_fits_a_screen() -> None:
    """No line of README.md is wider than people's terminals."""
    assert [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 120] == []


# -- imports between files


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    named = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    return named & modules


def test_tests_do_not_import_benchmarks() -> None:
    """What both need is in `tests/rigs`; tests of a benchmark lie beside it, in `bench/tests`."""
    importing = {
        name
        for name, tree in trees(TESTS).items()
        for node in ast.walk(tree)
        for module in (
            [node.module or ""] if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        if module.split(".")[0] == "bench"
    }  # fmt: skip
    assert sorted(importing) == []


def test_no_circles_between_files() -> None:
    """What a file imports never imports it back, by whatever way."""
    by_module = {name[:-3].removeprefix("src/").replace("/", "."): tree for name, tree in SOURCES.items()}
    graph = {module: imports_of(tree, set(by_module)) for module, tree in by_module.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# -- what CI runs


def imports_at_once(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports as it is loaded, not inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_at_once(node)


def test_no_suite_that_ci_leaves_out_loads_what_it_is_said_not_to_depend_on() -> None:
    """Every path that `.ci/suites.py` lists is there, and no file that counts for a suite loads one that does not: a
    change to what is left out is one that no process of the suite sees, unless it imports that inside a function. (The
    long tests, which load `bench`, are not what CI runs.)"""
    suites = runpy.run_path(str(ROOT / ".ci" / "suites.py"))
    wrong = []
    for suite, depends in suites["DEPENDS"].items():
        wrong += [f"{suite}: {path}" for path in depends if not (ROOT / path.removeprefix("!")).exists()]
        for name in suites["files_of"](suite):
            tree = ast.parse((ROOT / name).read_text()) if name.endswith(".py") else ast.Module([], [])
            for module in filter(re.compile(r"(holdfast|tests)\.").match, imports_at_once(tree)):
                path = f"{'src/' if module.startswith('holdfast') else ''}{module.replace('.', '/')}"
                found = [each for each in (f"{path}.py", f"{path}/__init__.py") if (ROOT / each).exists()]
                wrong += [f"{suite}: {name} loads {each}" for each in found if not suites["counts"](each, depends)]
    assert wrong == []


def test_names_that_docs_give_beside_a_file_are_in_it() -> None:
    """A file and a name in it: in a table's two cells, or in a sentence of the documents."""
    pattern = re.compile(
        r"`((?:[a-z_]+/)+[a-z_]+\.py)`(?:,| \|)\s+`([\w.]+)`|`([\w.]+)`(?:\s+in)?\s+\(?`((?:[a-z_]+/)+[a-z_]+\.py)`"
    )
    pages = [name for name in tracked() if name.startswith("docs/") and name.endswith(".md")]
    missing = [
        f"{page}: {file} has no {name}"
        for page in pages
        for before, after, first, last in pattern.findall((ROOT / page).read_text())
        for file, name in [(before or last, after or first)]
        if (SRC / file).exists()
        and not all(re.search(rf"\b{part}\b", (SRC / file).read_text()) for part in name.split("."))
    ]
    assert not missing, "\n".join(missing)
