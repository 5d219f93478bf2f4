"""`make mutants`: change the core in one place at a time, and see whether a test notices.

A seeded sample of changes (`changes.py`) is tried. One process collects all tests; each mutant is a fork of it in which
the code of the changed function is exchanged, and which then runs the tests that execute the changed lines, those that
name the module and the quickest first, until one fails. Nothing is written to the source files or to numba's cache.
What is computed on import cannot be exchanged: such mutants are forks of a process that has not imported keyhole yet,
and import the changed file.

Which test executes which lines is measured once per version of the source and kept under out/mutants. Tests that
start another process see no mutant there, and so do not count.

A survivor is met with a test, or with an entry in `equivalent.toml` that says why nobody could notice.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import inspect
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from changes import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "keyhole"
CORE = (
    "data/arrays.py",
    "data/sets.py",
    "data/tokens.py",
    "attention",
    "ridge",
    "ball",
    "layer.py",
    "refits.py",
    "streaming.py",
    "packing.py",
    "models.py",
)
CORE += ("theory",)
ENOUGH = 0.9  # of the mutants must be caught or marked
# imported before any fork, so that no mutant pays for it
WARM = ["numpy", "scipy.linalg", "scipy.optimize", "scipy.sparse", "scipy.special", "scipy.stats", "numba", "pandas"]
WARM += ["sklearn.linear_model", "pyarrow.parquet", "pyarrow.compute", "matplotlib.figure"]
WARM += ["beartype", "jaxtyping", "mpmath", "hypothesis"]
MEMORY = 16 << 30  # bytes of address space of one mutant
COMPILING = 120.0  # seconds more for a mutant that compiles its loops anew

KEY = ("function", "line", "change")  # what names a mutant wherever its file may move

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A mutant and the tests to run on it."""

    mutant: Mutant
    tests: list[str]
    seconds: float  # what these tests took on the original

    @property
    def limit(self) -> float:
        """Return the seconds of processor time after which the mutant counts as one that never ends."""
        return 30.0 + 5.0 * self.seconds + (COMPILING if is_compiled(self.mutant.path) else 0.0)


class Mutants:
    """A plugin of pytest: once that has configured itself, try mutants instead of running the tests."""

    def __init__(self, sample: list[Mutant], options: argparse.Namespace) -> None:
        self.sample = sample
        self.options = options
        self.failed: list[str] = []
        self.results: dict[int, Result] = {}  # by place in the sample
        self.begun = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        if "keyhole" in sys.modules:
            raise SystemExit("keyhole was imported before the tests were collected: no change of it could be seen.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other packages
            for name in WARM:
                importlib.import_module(name)
        import hypothesis

        # no examples kept from mutants, and none shrunk: that one fails is enough
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", database=None, deadline=None, phases=phases, derandomize=True)
        hypothesis.settings.load_profile("mutants")
        # this process stays without keyhole: one child collects, and tells what is left to do
        [(_, answer)] = forked(lambda _: self.exchange_all(session), [None])
        if "later" not in answer:
            raise SystemExit(answer["by"])
        self.results = {int(i): result for i, result in answer["results"].items()}
        self.try_all([(i, Job(self.sample[i], *rest)) for i, *rest in answer["later"]], self.imported_anew(session))
        return True

    def pytest_runtestloop(self) -> bool:
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def first_failure(self, items: Sequence[pytest.Item]) -> str | None:
        """Run tests until one fails, and return its name."""
        for i, item in enumerate(items):
            if self.failed:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items[i + 1] if i + 1 < len(items) else None)
        return self.failed[0] if self.failed else None

    def exchange_all(self, session: pytest.Session) -> Result:
        """Collect all tests, try the mutants whose code can be exchanged, and return the rest under "later"."""
        with Tracing() as on_import:
            items = {item.nodeid: item for item in session.perform_collect()}
            for path in core_files():
                importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        if self.failed:
            raise SystemExit(f"Tests of {', '.join(self.failed)} cannot be collected: `make test` says why.")
        where = Path(sys.modules["keyhole"].__file__ or "").parent
        if where != PACKAGE:
            raise SystemExit(f"The tests import keyhole from {where}, not {PACKAGE}: set PYTHONPATH, or use `make`.")
        cover = Cover(self.measured(items))
        self.begun = time.monotonic()
        now, later = [], []
        for i, mutant in enumerate(self.sample):
            job = Job(mutant, *cover.tests(mutant, self.options.seconds))
            if not job.tests:
                self.keep(i, job, {"outcome": "survived", "by": "no test executes it"})
            elif mutant.on_import or on_import.lines & {(mutant.path, n) for n in mutant.lines}:
                later.append((i, job))
            else:
                now.append((i, job))

        def exchanged(pair: tuple[int, Job]) -> Result:
            if not exchange(pair[1].mutant):
                return {"outcome": "later"}
            return {"by": self.first_failure([items[test] for test in pair[1].tests])}

        later += self.try_all(now, exchanged)
        return {"results": self.results, "later": [(i, job.tests, job.seconds) for i, job in later]}

    def imported_anew(self, session: pytest.Session) -> Callable[[tuple[int, Job]], Result]:
        def run(pair: tuple[int, Job]) -> Result:
            import_changed(pair[1].mutant)
            files = sorted({test.partition("::")[0] for test in pair[1].tests})
            try:
                items = {item.nodeid: item for item in session.perform_collect(files)}
            except pytest.UsageError:  # the file cannot be imported any more
                return {"by": "import"}
            return {"by": self.first_failure([items[test] for test in pair[1].tests if test in items])}

        return run

    def try_all(self, pairs: list[tuple[int, Job]], task: Callable[[tuple[int, Job]], Result]) -> list[tuple[int, Job]]:
        """Try mutants in forks; return those that must be tried another way."""
        later = []
        for pair, result in forked(task, pairs, self.options.jobs, [job.limit for _, job in pairs]):
            if result.get("outcome") == "later":
                later.append(pair)
            else:
                self.keep(*pair, result)
        return later

    def keep(self, i: int, job: Job, result: Result) -> None:
        mutant = job.mutant
        outcome = result.get("outcome") or ("caught" if result["by"] else "survived")
        self.results[i] = {
            "place": mutant.place(ROOT),
            "function": mutant.function,
            "line": mutant.line,
            "change": mutant.change,
            "outcome": outcome,
            "by": result["by"],
            "tests": len(job.tests),
            "seconds": result.get("seconds", 0.0),
        }
        # what is known so far, should somebody lose patience
        (self.options.out / "summary.json").write_text(json.dumps({"tried": list(self.results.values())}))
        if outcome != "caught":
            say(f"{mutant.place(ROOT)}  {mutant.function}: {mutant.change}" + " (broke here)" * (outcome == "error"))
        if len(self.results) % 25 == 0:
            say(f"… {len(self.results)} of {len(self.sample)} mutants after {time.monotonic() - self.begun:.0f} s")

    def measured(self, items: dict[str, pytest.Item]) -> dict[str, Result]:
        """Return what each test executes and how long it takes, file by file from out/mutants where that is known."""
        folder = self.options.out / "executed"
        folder.mkdir(parents=True, exist_ok=True)
        source, tests = sorted(PACKAGE.rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
        helpers = [path for path in tests if not path.name.startswith("test_") and path.parent.name != "mutants"]
        common = digest(source + helpers)
        files: dict[str, list[str]] = defaultdict(list)
        for test in items:
            files[test.partition("::")[0]].append(test)
        kept = {file: folder / f"{common}-{digest([ROOT / file])}.json" for file in files}
        unknown = [file for file in files if not kept[file].exists()]
        if unknown:
            say(f"measuring which lines the tests of {len(unknown)} files execute, once per version of the source …")

        def traced(file: str) -> Result:
            executed: dict[str, Result] = {}
            for test in files[file]:
                self.failed.clear()
                begun = processor_time()
                with Tracing() as tracing:
                    self.first_failure([items[test]])
                seconds = processor_time() - begun
                lines: dict[str, list[int]] = defaultdict(list)
                for path, line in sorted(tracing.lines):
                    lines[str(path.relative_to(ROOT))].append(line)
                executed[test] = {"seconds": round(seconds, 3), "lines": lines, "failed": bool(self.failed)}
            return {"executed": executed}

        for file, result in forked(traced, unknown, self.options.jobs, [1e6] * len(unknown)):
            if "executed" not in result:
                raise SystemExit(f"The tests of {file} end the process: {result['by']}")
            kept[file].write_text(json.dumps(result["executed"]))
        known = {test: executed for file in files for test, executed in json.loads(kept[file].read_text()).items()}
        for test in items:
            if known[test]["failed"]:
                say(f"left out, for it fails without any change (or while traced): {test}")
        return {test: known[test] for test in items if not known[test]["failed"]}


class Tracing:
    """Records which lines of the core are executed, in all threads.

    Tracing makes loops slow, so a function that executed ENOUGH lines without a new one among them is watched no more.
    """

    ENOUGH = 5000

    def __enter__(self) -> Tracing:
        # by id, since to hash a code object means to hash all of its constants
        seen: dict[int, tuple[types.CodeType, set[int]]] = {}
        known: Counter[int] = Counter()  # lines executed since the last new one
        files = {str(path) for path in core_files()}
        most = self.ENOUGH

        def line(frame: types.FrameType, event: str, _: object) -> Any:
            name, number = id(frame.f_code), frame.f_lineno
            lines = seen[name][1]
            known[name] += 1
            if number not in lines:
                lines.add(number)
                known[name] = 0
            return line

        def call(frame: types.FrameType, event: str, _: object) -> Any:
            code = frame.f_code
            if code.co_filename not in files or known[id(code)] > most:
                return None
            seen.setdefault(id(code), (code, set()))
            return line

        self._seen = seen
        threading.settrace(call)
        sys.settrace(call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.lines = {(Path(code.co_filename), line) for code, lines in self._seen.values() for line in lines}


class Cover:
    """Which tests execute a line, or use a name."""

    def __init__(self, executed: dict[str, Result]) -> None:
        self.seconds = {test: found["seconds"] for test, found in executed.items()}
        self.by_line: dict[tuple[Path, int], list[str]] = defaultdict(list)
        self.by_file: dict[Path, set[str]] = defaultdict(set)
        for test, found in executed.items():
            for file, lines in found["lines"].items():
                self.by_file[ROOT / file].add(test)
                for line in lines:
                    self.by_line[ROOT / file, line].append(test)
        self.mentions: dict[str, list[tuple[Path, int, str]]] = defaultdict(list)
        self.functions: dict[Path, list[str]] = defaultdict(list)
        self.overloaded: dict[str, str] = {}  # what numba puts in the place of another name
        for path in core_files():
            self._read_mentions(path, ast.parse(path.read_text()), "")

    def _read_mentions(self, path: Path, node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Name, ast.Attribute)) and isinstance(child.ctx, ast.Load):
                name = child.id if isinstance(child, ast.Name) else child.attr
                self.mentions[name].append((path, child.lineno, function))
            inner = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = child.name
                self.functions[path].append(inner)
                for decorator in child.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "overload":
                        self.overloaded[inner] = ast.unparse(decorator.args[0])
            self._read_mentions(path, child, inner)

    def tests(self, mutant: Mutant, limit: float) -> tuple[list[str], float]:
        """Return the tests that execute a mutant, as many as take `limit` seconds, and their time.

        Those that name its module come first, then the quickest.
        What is compiled leaves no trace: it is executed where Python mentions its name, or where that of another
        compiled function which mentions it is mentioned.
        """
        found: set[str] = set()
        if not mutant.on_import:
            found = self._executing(mutant.path, mutant.lines) or self._executing(mutant.path, mutant.statement)
        elif len(mutant.statement) > len(mutant.lines):  # a default: who executes the function
            found = self._executing(mutant.path, mutant.statement)
        generates = found and is_compiled(mutant.path)  # what writes loops runs for the first test that needs them
        found = found or self._using(mutant.names)
        if generates or (not found and is_compiled(mutant.path)):  # numba is told in ways that names do not tell
            found |= self._using(self.functions[mutant.path])
        if not found and mutant.on_import:
            found = self.by_file[mutant.path]
        tests, total = [], 0.0
        stem = mutant.path.stem
        for test in sorted(found, key=lambda test: (stem not in test.partition("::")[0], self.seconds[test], test)):
            if tests and total + self.seconds[test] > limit:
                break
            tests.append(test)
            total += self.seconds[test]
        return tests, total

    def _executing(self, path: Path, lines: Sequence[int]) -> set[str]:
        return {test for line in lines for test in self.by_line.get((path, line), ())}

    def _using(self, names: Sequence[str]) -> set[str]:
        found: set[str] = set()
        known, waiting = set(names), list(names)
        while waiting:
            name = waiting.pop()
            name = self.overloaded.get(name, name)
            for path, line, function in self.mentions.get(name, ()):
                tests = self._executing(path, [line])
                found |= tests
                # lines of a compiled file may have been executed while it was compiled, by whichever test came first
                if (not tests or is_compiled(path)) and function not in known:
                    known.add(function)
                    waiting.append(function)
        return found


def exchange(mutant: Mutant) -> bool:
    """Exchange the code of all functions that a mutant changes; False if this cannot be done."""
    path = str(mutant.path)
    old = codes(compile(mutant.path.read_text(), path, "exec", dont_inherit=True))
    new = codes(compile(mutant.tree(), path, "exec", dont_inherit=True))
    # shape checks add decorators, which move the first line of a function but not its last
    changed = {(code.co_qualname, last_line(code)): new.get(key) for key, code in old.items() if new.get(key) != code}
    exchanged = 0
    for function in gc.get_objects():
        if type(function) is not types.FunctionType or function.__code__.co_filename != path:
            continue
        key = (function.__code__.co_qualname, last_line(function.__code__))
        if key in changed:
            code = changed[key]
            if code is None or code.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = code
            exchanged += 1
    if is_compiled(mutant.path):
        leave_the_cache_of_numba()
    return exchanged > 0


def codes(module: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    found = {}
    for code in module.co_consts:
        if isinstance(code, types.CodeType):
            if code.co_flags & inspect.CO_NEWLOCALS:  # a function, not a class
                found[code.co_qualname, code.co_firstlineno] = code
            found.update(codes(code))
    return found


def last_line(code: types.CodeType) -> int:
    return max(line for _, _, line in code.co_lines() if line)


def import_changed(mutant: Mutant) -> None:
    """Let the next import of the changed file read the change, and nothing write any cache of it."""
    text = ast.unparse(mutant.tree()).encode()
    plain = importlib.machinery.SourceFileLoader.get_data

    def get_data(loader: Any, path: str) -> bytes:
        if Path(path) == mutant.path:
            return text
        if path.endswith(".pyc") and Path(path).name.startswith(mutant.path.stem + "."):
            raise OSError("compiled from the file as it was")
        return plain(loader, path)

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[assignment, method-assign]
    sys.dont_write_bytecode = True
    if is_compiled(mutant.path):
        leave_the_cache_of_numba()


def leave_the_cache_of_numba() -> None:
    """Compile everything anew, into a folder of this process."""
    from numba.core import config, dispatcher

    config.CACHE_DIR = tempfile.mkdtemp()
    for found in gc.get_objects():
        # the type itself: torch has objects that warn when asked for their class
        if issubclass(type(found), dispatcher.Dispatcher) and found.stats.cache_path:
            found.enable_caching()


@functools.cache
def is_compiled(path: Path) -> bool:
    return "\nfrom numba import" in path.read_text()


def forked(
    task: Callable[[Any], Result], jobs: Sequence[Any], at_once: int = 1, limits: Sequence[float] | None = None
) -> Iterator[tuple[Any, Result]]:
    """Run `task(job)` in forks of this process, and return each job with its result as it comes.

    With limits, of processor time in seconds, a child is silent and ends when its time is over.
    """
    running: dict[int, tuple[Any, Path, float, float]] = {}
    waiting = list(range(len(jobs)))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                i = waiting.pop()
                limit = limits[i] if limits else None
                folder = Path(tempfile.mkdtemp(prefix="mutant-"))
                sys.stdout.flush()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that a fork should have no other threads: none is running
                    pid = os.fork()
                if pid == 0:
                    _be_child(task, jobs[i], folder, limit)
                # waiting takes no processor time, and a busy machine gives little of it
                end = time.monotonic() + (4 * limit if limit else 1e9)
                running[pid] = (jobs[i], folder, time.monotonic(), end)
            time.sleep(0.02)
            for pid, (job, folder, begun, end) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() < end:
                    continue
                if not ended:
                    _end_family(pid)
                    _, status = os.waitpid(pid, 0)
                if limits:
                    _end_family(pid)  # what it started and left behind
                del running[pid]
                yield job, {**_result(folder, status), "seconds": round(time.monotonic() - begun, 2)}
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        for pid, (_, folder, _, _) in running.items():
            _end_family(pid)
            shutil.rmtree(folder, ignore_errors=True)


def _end_family(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _result(folder: Path, status: int) -> Result:
    file = folder / "result.json"
    if file.exists():
        return json.loads(file.read_text())
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGXCPU, signal.SIGKILL):
        return {"outcome": "caught", "by": f"ended by {signal.Signals(os.WTERMSIG(status)).name}"}
    return {"outcome": "caught", "by": "time"}


def _be_child(task: Callable[[Any], Result], job: Any, folder: Path, limit: float | None) -> None:
    try:
        if limit:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        tempfile.tempdir = None
        try:
            result = task(job)
        except SystemExit as error:
            result = {"by": str(error)}
        except BaseException:
            result = {"outcome": "error", "by": traceback.format_exc()}
        (folder / "partial.json").write_text(json.dumps(result))
        (folder / "partial.json").rename(folder / "result.json")
    finally:
        sys.stdout.flush()
        os._exit(0)


def core_files() -> list[Path]:
    files = []
    for name in CORE:
        path = PACKAGE / name
        if not path.exists():
            raise SystemExit(f"CORE names {name}, and there is no {path}: say in {__file__} where it went.")
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    # Triton's loops are imported and run only where there is a CUDA device
    return [path for path in files if not path.name.startswith("triton_")]


def digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


class Marks:
    """`equivalent.toml`: changes that nobody could notice, each with the reason."""

    def __init__(self, path: Path) -> None:
        table = tomllib.loads(path.read_text())
        self.marks: list[dict[str, Any]] = table.get("equivalent", [])
        for mark in [*self.marks, *table.get("left_out", [])]:
            if not mark.get("reason"):
                raise SystemExit(f"{path.name}: no reason is given for {mark}.")
        for mark in self.marks:
            if not (mark.get("function") and mark.get("line")):
                raise SystemExit(f"{path.name}: a mark needs a function and a line, and {mark} does not.")
        rules = table.get("left_out", [])
        self.names = {name for rule in rules for name in rule.get("names", [])}
        self.functions = {name for rule in rules for name in rule.get("functions", [])}
        self.used: set[int] = set()

    def reason(self, mutant: Mutant) -> str | None:
        for i, mark in enumerate(self.marks):
            changes = mark.get("change", [mutant.change])
            known = mutant.change in ([changes] if isinstance(changes, str) else changes)
            if known and mark["function"] == mutant.function and mark["line"] == mutant.line:
                self.used.add(i)
                return str(mark["reason"])
        return None


def processor_time() -> float:
    """Return the seconds that this process and its children worked, whatever else the machine does."""
    return sum(os.times()[:4])


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="Does a test notice a change of the core?")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests per mutant")
    parser.add_argument("--only", default="", help="only mutants whose place or function contains this")
    parser.add_argument("--again", action="store_true", help="try the survivors of the last run, and no others")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants")
    parser.add_argument("tests", nargs="*", help="only these tests; all of them unless told")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    marks = Marks(Path(__file__).with_name("equivalent.toml"))
    places = [place for path in core_files() for place in mutants_of(path, marks.names)]
    for name in marks.functions - {place[0].function for place in places}:
        say(f"equivalent.toml leaves out a function that is no longer there: {name}")
    places = [place for place in places if place[0].function not in marks.functions]
    for mutant in (mutant for place in places for mutant in place):
        marks.reason(mutant)
    for i, mark in enumerate(marks.marks):
        if i not in marks.used:
            say(f"equivalent.toml marks what is no longer there: {mark['function']}: {mark['line']}")
    rng = random.Random(options.seed)
    rng.shuffle(places)
    drawn = [rng.choice(place) for place in places]
    drawn = [m for m in drawn if options.only in m.place(ROOT) or options.only in m.function][: options.number]
    if options.again:
        last = json.loads((options.out / "summary.json").read_text())["tried"]
        wanted = {tuple(r[key] for key in KEY) for r in last if r["outcome"] != "caught"}
        drawn = [m for place in places for m in place if (m.function, m.line, m.change) in wanted]
    sample = [mutant for mutant in drawn if marks.reason(mutant) is None]
    say(f"{len(drawn)} mutants of {len(places)} places, seed {options.seed}; {len(drawn) - len(sample)} are equivalent")

    plugin = Mutants(sample, options)
    os.chdir(ROOT)
    # -s: children are silent anyway, and what captures must not be shared with them
    quiet = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--no-header", "--no-summary"]
    pytest.main([*quiet, "-m", "not slow", *options.tests], plugins=[plugin])
    results = [plugin.results[i] for i in sorted(plugin.results)]
    if len(results) != len(sample):
        say(f"only {len(results)} of {len(sample)} mutants were tried")
        return 2
    return conclude(drawn, results, options, time.monotonic() - begun)


def conclude(drawn: list[Mutant], results: list[Result], options: argparse.Namespace, seconds: float) -> int:
    counts = Counter(result["outcome"] for result in results)
    by_time = sum(result["by"] == "time" for result in results)
    equivalent = len(drawn) - len(results)
    share = (counts["caught"] + equivalent) / max(len(drawn), 1)
    summary = {
        "seed": options.seed,
        "mutants": len(drawn),
        "caught": counts["caught"],
        "caught_by_time": by_time,
        "equivalent": equivalent,
        "survived": counts["survived"],
        "never_tried": counts["error"],  # the trial itself broke
        "share": share,
        "seconds": round(seconds),
        "tried": results,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False))
    for result in results:
        if result["outcome"] != "caught":
            say(f"\n{result['place']}  {result['function']}\n    {result['line']}\n    {result['change']}")
            say(f"    {result['by'] or 'passes ' + str(result['tests']) + ' tests'}")
    say(
        f"\n{len(drawn)} mutants: {counts['caught']} caught ({by_time} of them never ended), {equivalent} equivalent, "
        f"{counts['survived']} survived. {share:.1%}, at least {ENOUGH:.0%} asked for; {seconds:.0f} s."
    )
    if counts["error"]:
        say(f"{counts['error']} were never tried, for the trial itself broke: the traces above say where.")
        return 2
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
