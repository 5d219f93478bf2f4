"""The standing attack: damaged files of every format that keyhole reads, and sequences of calls.

    make fuzz SECONDS=600 SEED=0      # keeps what failed in out/fuzz, shrunk
    make fuzz-keep CASE=out/fuzz/…    # turns one into a test: it joins tests/fuzz/corpus
    python tests/fuzz/attack.py --seed 0 --number 12            # one case again
    python tests/fuzz/attack.py --only "stream,one by one"      # some kinds only
    python tests/fuzz/attack.py --show out/fuzz/….json          # a case that was kept, again

Each case runs in a child with limits (`formats` draws files, `sequences` calls).

A case is allowed to be read, or to be refused by a ValueError, TypeError or OSError that a
``raise`` statement of keyhole's raised with words of its own (a command: exit code 2 for such a
reason, or for a wrong usage). All else is a finding: a signal, more than 5 seconds, more than
512 MiB, another exception, one that comes from a library, something read that does not hang
together, a file written where none should be, code or a process started. A sequence of calls is
"read" if all numbers are as they should be; wrong ones are a finding that says which, and by how
much.

Case number i of a seed is always the same, however many there are and whoever runs it.
"""

from __future__ import annotations

import os
import sys

ENVIRONMENT = {
    # address space is what is limited: allocators that reserve gigabytes in advance would use it up
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "MPLBACKEND": "agg",
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})

import argparse  # noqa: E402
import base64  # noqa: E402
import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import zlib  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from itertools import count  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 512 * 2**20
PLENTY = 8 * 2**30
SECONDS = 5.0
OPEN_FILES = 256
BATCH = 40
"""Cases per child: a fork of a warm parent takes as long as several cases.

Whatever is found is run again alone.
"""
WORKERS = 2
ENOUGH = 10
TRIALS = 120
"""Runs spent on making one finding smaller."""
ALLOWED = (ValueError, TypeError, OSError)


@dataclass(frozen=True)
class Verdict:
    """What came of a case: "read", "refused", or the kind of a finding; the place names it among
    others.
    """

    state: str
    words: str = ""
    place: str = ""

    @property
    def fine(self) -> bool:
        return self.state in ("read", "refused")

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.state}-{self.place}").strip("-")[:100]


# ---------------------------------------------------------------- in the child


class Watch:
    """Hears of everything that Python opens for writing, removes, starts, connects to or
    executes.
    """

    WRITING = (
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.truncate",
        "os.chown",
        "shutil.rmtree",
        "sqlite3.connect",
        "os.utime",
    )
    STARTING = (
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "socket.connect",
        "socket.bind",
        "socket.getaddrinfo",
        "pickle.find_class",
        "ctypes.dlopen",
        "sqlite3.load_extension",
        "sqlite3.enable_load_extension",
        "webbrowser.open",
    )

    def __init__(self) -> None:
        self.inside: str | None = None
        self.seen: list[str] = []
        self.allowed: tuple[str, ...] = ()
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        inside = self.inside
        if inside is None:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and not isinstance(path, int):
                self._path(event, path, inside)
        elif event in self.WRITING:
            for path in arguments[:2]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._path(event, path, inside)
        elif event in self.STARTING and event not in self.allowed:
            self.seen.append(f"{event} {arguments!r:.100}")
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(inside):
            self.seen.append(f"exec of {arguments[0].co_filename}")
        elif (
            event == "import" and isinstance(arguments[1], str) and arguments[1].startswith(inside)
        ):
            self.seen.append(f"import of {arguments[1]}")

    def _path(self, event: str, path: Any, inside: str) -> None:
        full = os.path.abspath(os.fsdecode(path))
        if not full.startswith(inside) and full != "/dev/null":
            self.seen.append(f"{event} {full}")


def judge(case: Any, folder: Path, watch: Watch | None) -> Verdict:
    """Run one case in this process."""
    import formats
    from sequences import LOADS_PICKLES

    place = folder / "case"
    place.mkdir()
    formats.put(place, case.files)
    os.chdir(place)
    before, outside = listing(place), listing(folder / "outside")
    said = io.StringIO()
    if watch is not None:
        watch.seen, watch.inside = [], str(place)
        watch.allowed = ("pickle.find_class",) if case.reader in LOADS_PICKLES else ()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            formats.READERS[case.reader](place, dict(case.options))
        verdict = Verdict("read")
    except SystemExit as error:
        verdict = of_command(error, said.getvalue(), case)
    except BaseException as error:
        verdict = of_error(error, case)
    if watch is not None:
        watch.inside = None
        if watch.seen:
            verdict = Verdict(
                "touched", "; ".join(watch.seen[:5]), f"{case.reader} {watch.seen[0].split(' ')[0]}"
            )
    os.chdir(folder)
    if listing(folder / "outside") != outside:
        verdict = Verdict("touched", "files outside of the folder changed", case.reader)
    after, may = listing(place), formats.WRITES.get(case.reader, ())
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    changed = {name for name in changed if not name.startswith(may)} if may else changed
    if changed:
        verdict = Verdict("touched", f"changed {sorted(changed)[:5]}", f"{case.reader} files")
    shutil.rmtree(place)
    return verdict


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            status = os.lstat(path)
            found[os.path.relpath(path, folder)] = (status.st_size, status.st_mtime_ns)
    return found


def of_error(error: BaseException, case: Any) -> Verdict:
    """The verdict on an exception: in our words by our hand, or a finding."""
    from cases import LateError, is_refusal
    from sequences import SEQUENCES

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    words = f"{type(error).__name__}: {error}"[:600]
    memory = next((e for e in chain if isinstance(e, MemoryError)), None)
    had_plenty = GRANTED.get("memory", 0) > MEMORY
    if memory is not None and not (had_plenty and isinstance(error, ALLOWED)):
        return Verdict("memory", words, f"{case.reader} {origin(memory)}")
    if isinstance(error, LateError) and error.__cause__ is not None:
        return Verdict(
            "late",
            words,
            f"{case.reader} {type(error.__cause__).__name__} {origin(error.__cause__)}",
        )
    if isinstance(error, AssertionError):
        return Verdict(
            "wrong",
            words,
            f"{case.reader} {origin(error)} {re.sub(r'[^a-z ]', '', str(error))[:30]}",
        )
    # numbers that float64 cannot hold are refused as such by fits; no file is worth that
    excused = isinstance(error, ALLOWED) or case.format in SEQUENCES
    if excused and is_refusal(error):
        return Verdict("refused", words)
    return Verdict("foreign", words, f"{case.reader} {type(error).__name__} {origin(error)}")


def origin(error: BaseException) -> str:
    """The innermost frame of keyhole, and the innermost of all."""
    names = [
        f"{Path(f.f_code.co_filename).stem}.{f.f_code.co_name}"
        for f, _ in traceback.walk_tb(error.__traceback__)
    ]
    files = [f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__)]
    ours = [n for n, file in zip(names, files, strict=True) if f"{os.sep}keyhole{os.sep}" in file]
    return " ".join(dict.fromkeys([*ours[-1:], *names[-1:]]))


def of_command(error: SystemExit, said: str, case: Any) -> Verdict:
    """The verdict on a command that ended by itself: why it refused is the context of its exit."""
    if error.code not in (1, 2) or "Traceback" in said or len(said.strip()) < 15:
        return Verdict(
            "foreign", f"exit code {error.code}: {said[-300:]}", f"{case.reader} exit {error.code}"
        )
    link: BaseException | None = error.__context__
    while link is not None:
        kinds = {kind.__name__ for kind in type(link).__mro__}
        if "UsageError" in kinds:
            break
        if not kinds & {"Exit", "SystemExit"}:
            verdict = of_error(link, case)
            return Verdict("refused", said[:600]) if verdict.fine or of_run(link) else verdict
        link = link.__context__
    return Verdict("refused", said[:600])


def of_run(error: BaseException) -> bool:
    from cases import raised_by

    return type(error).__name__ == "RunError" and raised_by(error, ("keyhole",))


def pages(which: int) -> int:
    """Bytes of address space (0) or of memory held (1)."""
    return int(Path("/proc/self/statm").read_text().split()[which]) * resource.getpagesize()


GRANTED: dict[str, int] = {}
"""Bytes of address space that this child was granted beside what it had: "memory"."""


def limit(memory: int) -> None:
    GRANTED["memory"] = memory
    size = pages(0) + memory
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for clock in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(clock, signal.SIG_DFL)
        # where a case was when its time was over is written to its last words before it ends
        faulthandler.register(clock, file=2, all_threads=True, chain=True)


def arm(seconds: float, wall: float) -> None:
    """The kernel ends us when a case takes too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall)


# ---------------------------------------------------------------- children


def in_child(
    cases: list[tuple[int, Any]], *, alone: bool, memory: int = MEMORY
) -> tuple[list[tuple[int, Verdict]], int, str]:
    """Run cases in one fork: the verdicts of those that ended, the status of the child, and its
    last words.

    ``cases`` are (number, case) or (number, seed): those are drawn in the child.
    """
    folder = Path(tempfile.mkdtemp(prefix="keyhole-fuzz-"))
    (folder / "outside").mkdir()
    (folder / "outside" / "precious").write_text("precious")
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reads)
            errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            os.environ["HOME"] = str(folder)
            _run_all(cases, folder, writes, alone, memory)
            status = 0
        except BaseException:
            traceback.print_exc(file=os.fdopen(2, "w", closefd=False))
        finally:
            os._exit(status)
    os.close(writes)
    done, rest = [], b""
    deadline = time.monotonic() + len(cases) * 20 * SECONDS + 20
    while True:
        ready, _, _ = select.select([reads], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(reads, 65536)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        done += [(number, Verdict(*verdict)) for number, *verdict in map(json.loads, lines)]
    os.close(reads)
    _, status = os.waitpid(child, 0)
    words = (
        (folder / "stderr").read_bytes()[:3000].decode("utf-8", "replace")
        if (folder / "stderr").exists()
        else ""
    )
    shutil.rmtree(folder, ignore_errors=True)
    return done, status, words


def _run_all(
    cases: list[tuple[int, Any]], folder: Path, pipe: int, alone: bool, memory: int
) -> None:
    import formats

    watch = Watch()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts anew
    limit(memory)
    held = pages(1)
    for number, case in cases:
        part = folder / str(number)
        part.mkdir()
        os.symlink(folder / "outside", part / "outside")
        if isinstance(case, int):
            try:
                case, _ = formats.draw(case, number)
            except (
                Exception
            ) as error:  # a fault of the attack, which must not pass for a case that went well
                words = [
                    number,
                    "attack",
                    "".join(traceback.format_exception(error))[-500:],
                    type(error).__name__,
                ]
                os.write(pipe, json.dumps(words).encode() + b"\n")
                continue
        if alone:  # whoever reads our last words wants to know
            Path(folder / "stderr").write_text(f"reader {case.reader}\n")
        # alone, only its own seconds count: the machine may be busy with others
        arm(SECONDS, 20 * SECONDS if alone else SECONDS)
        verdict = judge(case, part, watch)
        arm(0, 0)
        shutil.rmtree(part)
        if memory > MEMORY:
            most = 1024 * int(
                re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
            )
            if most - held > MEMORY:
                verdict = Verdict(
                    "memory", f"held {(most - held) / 2**20:.0f} MiB; {verdict.words}", case.reader
                )
        line = json.dumps([number, verdict.state, verdict.words, verdict.place]) + "\n"
        os.write(pipe, line.encode("utf-8", "replace"))


def run_alone(number: int, case: Any) -> Verdict:
    """The verdict on one case, whatever becomes of the child.

    Memory that was asked for and refused, in words of ours, may be a promise that nobody would have
    kept: what counts is how much is held where there is plenty.
    """
    done, status, words = in_child([(number, case)], alone=True)
    if done and done[0][1].state == "memory":
        done, status, words = in_child([(number, case)], alone=True, memory=PLENTY)
    if done:
        return done[0][1]
    if isinstance(case, int):
        if not words.startswith("reader "):
            return Verdict("attack", f"died while drawing case {number}: {words}", "draw")
        reader, _, words = words.removeprefix("reader ").partition("\n")
    else:
        reader = case.reader
    if os.WIFSIGNALED(status):
        which = os.WTERMSIG(status)
        if which in (signal.SIGALRM, signal.SIGPROF, signal.SIGKILL):
            # its own two clocks, and the parent's, which kills it
            clock, seconds = {
                signal.SIGALRM: ("of wall time", 20 * SECONDS),
                signal.SIGPROF: ("of processor time", SECONDS),
                signal.SIGKILL: ("of wall time", 20 * SECONDS + 20),
            }[which]
            return Verdict("hang", f"more than {seconds:g} s {clock}: {words}", reader)
        return Verdict(
            "signal",
            f"{signal.Signals(which).name} {words}",
            f"{reader} {signal.Signals(which).name}",
        )
    return Verdict("signal", f"ended with status {status}: {words}", f"{reader} status")


def run_batch(cases: list[tuple[int, Any]], sure: Counter[str]) -> list[tuple[int, Verdict]]:
    """Verdicts on some cases. What is not fine in company is run again alone, and that counts.

    ``sure`` are findings so far by name: what was seen alone that often is believed.
    """
    found: list[tuple[int, Verdict]] = []
    while cases:
        done, _, _ = in_child(cases, alone=False)
        if len(done) < len(cases):
            done.append((cases[len(done)][0], run_alone(*cases[len(done)])))
        for (number, case), (_, verdict) in zip(cases, done, strict=False):
            if (
                not verdict.fine
                and verdict.state not in ("signal", "hang")
                and sure[verdict.name] < ENOUGH
            ):
                alone = run_alone(number, case)
                # wrong numbers of a sequence are wrong wherever they were seen: threads may not
                # meet again
                if not (alone.fine and verdict.state == "wrong" and of_sequence(verdict)):
                    verdict = alone
                sure[verdict.name] += 1
            found.append((number, verdict))
        cases = cases[len(done) :]
    return found


def of_sequence(verdict: Verdict) -> bool:
    """Whether a finding is one of a sequence of calls: its place begins with the kind."""
    from sequences import SEQUENCES

    return verdict.place.startswith(tuple(SEQUENCES))


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Plan:
    """Which cases to run: those of a seed, for some seconds or so many, on some workers.

    With ``only``, cases of other formats are passed over; those of these keep their numbers.
    """

    seed: int
    seconds: float
    cases: int | None = None
    only: tuple[str, ...] = ()
    workers: int = WORKERS

    def batches(self, worker: int) -> Iterator[list[int]]:
        """The numbers that a worker runs, as many at a time as a child takes."""
        import formats

        full: list[int] = []
        for block in count(worker, self.workers):
            first = block * BATCH
            if self.cases is not None and first >= self.cases:
                break
            last = first + BATCH if self.cases is None else min(first + BATCH, self.cases)
            for number in range(first, last):
                if not self.only or formats.format_of(self.seed, number) in self.only:
                    full.append(number)
            if len(full) >= BATCH:
                yield full
                full = []
        if full:
            yield full


def attack(plan: Plan, quiet: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the attack on its workers; the table, and for each kind of finding the first case that
    showed it.
    """
    from sequences import SEQUENCES

    began = time.monotonic()
    pipes = []
    for worker in range(plan.workers):
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.close(reads)
            _work(worker, plan, began + plan.seconds, writes)
            os._exit(0)
        os.close(writes)
        pipes.append(os.fdopen(reads, "rb"))
    table: dict[str, Counter[str]] = {}
    first: dict[str, Any] = {}
    n_cases, last, open_pipes = 0, time.monotonic(), list(pipes)
    while open_pipes:
        for pipe in select.select(open_pipes, [], [], 5.0)[0]:
            line = pipe.readline()
            if not line:
                open_pipes.remove(pipe)
                continue
            for number, name, state, words, place in json.loads(line):
                verdict = Verdict(state, words, place)
                row = table.setdefault(name, Counter())
                row["cases"] += 1
                row[state if verdict.fine else "findings"] += 1
                n_cases += 1
                if not verdict.fine:
                    if not quiet and verdict.name not in first:
                        print(f"case {number}, {name}: {state}, {words[:200]}", flush=True)
                    held = first.setdefault(
                        verdict.name, {"number": number, "verdict": verdict, "times": 0}
                    )
                    held["times"] += 1
                    if number < held["number"]:
                        held |= {"number": number, "verdict": verdict}
        if not quiet and time.monotonic() - last > 15:
            last = time.monotonic()
            print(
                f"{n_cases} cases, {n_cases / (last - began):.0f} per second, {len(first)} "
                "findings",
                flush=True,
            )
    for _ in pipes:
        os.wait()
    spent = time.monotonic() - began
    run = {
        "seed": plan.seed,
        "cases": n_cases,
        "seconds": round(spent, 1),
        "workers": plan.workers,
        "formats": table,
        "sequences": list(SEQUENCES),
    }
    return run, first


def _work(worker: int, plan: Plan, deadline: float, pipe: int) -> None:
    """What one worker does: its share of the numbers, a child full at a time, until the
    deadline.
    """
    import formats

    with os.fdopen(pipe, "wb") as out:
        sure = Counter[str]()
        for numbers in plan.batches(worker):
            if plan.cases is None and time.monotonic() >= deadline:
                break
            verdicts = run_batch([(number, plan.seed) for number in numbers], sure)
            rows = [
                (
                    number,
                    formats.format_of(plan.seed, number),
                    verdict.state,
                    verdict.words,
                    verdict.place,
                )
                for number, verdict in verdicts
            ]
            out.write(json.dumps(rows).encode("utf-8", "replace") + b"\n")
            out.flush()


def shrink(seed: int, number: int, verdict: Verdict) -> Any:
    """A smaller case with the same verdict: fewer mutations first, then fewer bytes."""
    import formats

    case, count = formats.draw(seed, number)
    left, kept = TRIALS, list(range(count))

    def same(candidate: Any) -> bool:
        nonlocal left
        left -= 1
        return run_alone(0, candidate).name == verdict.name

    for k in list(kept):
        fewer = [j for j in kept if j != k]
        candidate, _ = formats.draw(seed, number, tuple(fewer))
        if left > 0 and same(candidate):
            case, kept = candidate, fewer
    case = simplest(case, same, lambda: left > 0)
    for name in sorted(case.files, key=lambda n: -len(case.files[n])):
        size = len(case.files[name]) // 2
        while size >= 1 and left > 0:
            at = 0
            while at < len(case.files[name]) and left > 0:
                content = case.files[name]
                smaller = formats.Case(
                    case.format,
                    case.reader,
                    {**case.files, name: content[:at] + content[at + size :]},
                    case.options,
                )
                if same(smaller):
                    case = smaller
                else:
                    at += size
            size //= 2
    return case


def simplest(case: Any, same: Callable[[Any], bool], may_try: Callable[[], bool]) -> Any:
    """The case with every setting at its plainest value that keeps the finding."""
    import formats

    variants = formats.FORMATS[case.format].simpler
    simpler = True
    while simpler:
        simpler = False
        for candidate in variants(case):
            if may_try() and same(candidate):
                case = candidate
                simpler = True
                break
    return case


# ---------------------------------------------------------------- cases on disk


def write_case(path: Path, case: Any, expected: str, note: str) -> None:
    files = {n: base64.b85encode(zlib.compress(c, 9)).decode() for n, c in case.files.items()}
    held = {
        "format": case.format,
        "reader": case.reader,
        "expected": expected,
        "note": note,
        "options": case.options,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**held, "files": files}, indent=1) + "\n")


def read_case(path: Path) -> tuple[Any, str]:
    import formats

    held = json.loads(path.read_text())
    files = {n: zlib.decompress(base64.b85decode(c)) for n, c in held["files"].items()}
    return formats.Case(held["format"], held["reader"], files, held["options"]), held["expected"]


def keep(path: Path) -> Path:
    """Copy a case that failed to the corpus; it has to be read or refused as it is now, or fine if
    it is not yet.
    """
    case, _ = read_case(path)
    verdict = run_alone(0, case)
    note = json.loads(path.read_text())["note"]
    place = CORPUS / path.name
    write_case(place, case, verdict.state if verdict.fine else "fine", note)
    return place


def check_corpus() -> list[str]:
    """What is wrong with the cases of the corpus, in words."""
    wrong, paths = [], sorted(CORPUS.glob("*.json"))
    cases, expectations = zip(*map(read_case, paths), strict=True)
    for number, verdict in run_batch(list(enumerate(cases)), Counter()):
        expected = expectations[number]
        if not verdict.fine or (expected != "fine" and verdict.state != expected):
            wrong.append(
                f"{paths[number].name}: must be {expected}, is {verdict.state} "
                f"({verdict.words[:200]})"
            )
    return wrong


def printed(found: dict[str, Any]) -> str:
    """The table of a run, in Markdown."""
    columns = ("cases", "refused", "read", "findings")
    rows = [
        [name, *(row.get(c, 0) for c in columns)] for name, row in sorted(found["formats"].items())
    ]
    rows.append(["**all**", *(sum(row[i + 1] for row in rows) for i in range(4))])
    lines = [
        "| format | cases | refused | read | findings |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join(
        [*lines, *("| " + " | ".join([r[0], *(f"{n:,}" for n in r[1:])]) + " |" for r in rows)]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="this many, instead of --seconds")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument(
        "--corpus", action="store_true", help="the cases of tests/fuzz/corpus first"
    )
    parser.add_argument("--keep", type=Path, help="add this case to the corpus, and stop")
    parser.add_argument(
        "--show", type=Path, help="run this case alone, print the verdict, and stop"
    )
    parser.add_argument(
        "--number", type=int, help="run this case of the seed alone, print the verdict, and stop"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that run cases")
    parser.add_argument(
        "--only", default="", help="formats and kinds of sequences to run, separated by commas"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import formats

    formats.warm()
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    import formats

    say = print
    if arguments.keep is not None:
        say(f"kept as {keep(arguments.keep)}")
        return 0
    if arguments.show is not None:
        say(run_alone(0, read_case(arguments.show)[0]))
        return 0
    if arguments.number is not None:
        case, _ = formats.draw(arguments.seed, arguments.number)
        say(f"{case.format}, {case.reader}: {json.dumps(case.options)}")
        say(run_alone(arguments.number, case))
        return 0
    wrong = check_corpus() if arguments.corpus else []
    for words in wrong:
        say(words)
    only = tuple(name for name in arguments.only.split(",") if name)
    unknown = set(only) - set(formats.FORMATS)
    if unknown:
        say(f"--only takes {', '.join(formats.FORMATS)}: got {', '.join(sorted(unknown))}.")
        return 2
    plan = Plan(
        seed=arguments.seed,
        seconds=arguments.seconds,
        cases=arguments.cases,
        only=only,
        workers=arguments.workers,
    )
    table, first = attack(plan, quiet=arguments.corpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, held in sorted(first.items(), key=lambda item: item[1]["number"]):
        verdict = held["verdict"]
        if verdict.state == "attack":
            say(f"the attack itself failed at case {held['number']}: {verdict.words}")
            continue
        case = shrink(arguments.seed, held["number"], verdict)
        note = f"seed {arguments.seed}, case {held['number']}: {verdict.state}, {verdict.words}"
        write_case(arguments.out / f"{name}.json", case, "fine", note)
        say(
            f"{verdict.state} ({held['times']} times) {case.format}, {case.reader}: "
            f"{verdict.words[:300]}\n"
            f"    {arguments.out / name}.json"
        )
    table["findings"] = [
        {"name": n, "times": h["times"], **asdict(h["verdict"])} for n, h in first.items()
    ]
    (arguments.out / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    say(printed(table))
    say(
        f"{table['cases']:,} cases in {table['seconds']:g} s, seed {table['seed']}: {len(first)} "
        "kinds of findings"
    )
    return 1 if first or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
