"""The server of `keyhole explore`, for one person's browser.

On the loopback address only, behind a random token.

A request must name our own host, come from our own page where it says where it comes from, and know
the token. Nothing in it is ever taken for a path. Numbers of the theory are computed in threads,
none of which keeps the program from ending; fits and uploaded tables in processes of their own,
which can be ended and take nothing along when a damaged file ends them.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keyhole import __version__
from keyhole.lab.cells import Cell, Store, StoreError, Values
from keyhole.lab.explore.connections import ADMITTED, WAITING_SECONDS, Connection
from keyhole.lab.explore.views import (
    MEANWHILE,
    ExploreState,
    View,
    answer_by,
    background,
    cells_of,
    show,
)
from keyhole.lab.jobs import Plan, RunError, Timer, WorkerPool, cell_costs, run_local
from keyhole.lab.report.document import Chart, HeatMap, Report, Section, Table
from keyhole.lab.report.html import as_json, asset, fragment, library, one_page, page_of
from keyhole.theory.tasks import TASKS

MOST_BYTES = 2**25  # of an upload
MOST_WAITING = 64  # requests at a time; the page has two
MOST_COMPUTING = 4
MOST_LISTENING = 32  # tabs that hear of progress
MOST_UPLOADS = 2  # tables on their way, of which one is looked at
# that an upload may take to arrive; on the loopback address 32 MiB take less than one
BODY_SECONDS = 30.0
# of a measurement, by the clock; what is asked for must be half of it by estimate
MEASURE_SECONDS = 600.0
MEASURE_MEMORY = 2**30  # bytes of a job
DATA_SECONDS = 60.0  # of a look at an uploaded table
DATA_BUDGET = 15.0  # of which it plans to use so much
DATA_MEMORY = 2**32  # bytes of address space of the process that reads it
LEAST_RIDGE = 1e-9
NEWS_SECONDS = 0.25
PATIENCE_SECONDS = 0.25  # that a view waits for what is slow; the page then asks again
SAVE_SECONDS = 60.0  # that a view to be saved waits for it
LAST_SECONDS = 1.0  # that clients have to read their answers when the server ends

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
        "data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
        "'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer.

Styles may stand in elements, because the chart library puts them there; scripts may not.
"""

ASSETS = {
    "plotly.js": ("text/javascript", library),
    "report.js": ("text/javascript", lambda: asset("report.js")),
    "report.css": ("text/css", lambda: asset("report.css")),
    "explore.js": ("text/javascript", lambda: _own("explore.js")),
    "explore.css": ("text/css", lambda: _own("explore.css")),
}


def _own(name: str) -> str:
    """A file of the explorer's page."""
    return resources.files("keyhole.lab.explore").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=16)
def _asset(name: str) -> str:
    """The text of one of the `ASSETS`, read once."""
    _, read = ASSETS[name]
    return read()


class PortTakenError(RuntimeError):
    """Another program listens there; in words for the person who asked for the port."""


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, None where there is none.

    Tells whether a file is still the one that was opened.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Bench:
    """The measurements of all tabs: one at a time, into one store.

    Results are read from there by everyone.
    """

    def __init__(self, path: Path) -> None:
        self._store = Store(path)
        self._file = _file_identity(path)
        self._lock = threading.Lock()  # of everything below
        self._last_row = 0  # of the store that was read
        self._finished_keys: set[str] = set()
        self._values: dict[str, Values] = {}  # by key, of the cells that a page has shown
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._timer: Timer | None = None
        self._message = ""

    def results(self, cells: list[Cell]) -> dict[Cell, Values]:
        """Finished ones of the cells."""
        results = {}
        with self._lock:
            self._read_keys()
            # the keys of a page take milliseconds, and few stores have a result for it
            if not self._finished_keys:
                return {}
            for cell in cells:
                key = _key(cell)
                if key not in self._finished_keys:
                    continue
                if key not in self._values:
                    self._values[key] = self._store.get([cell])[cell]
                results[cell] = self._values[key]
        return results

    def _read_keys(self) -> None:
        """Take notice of what was written to the store since."""
        self._check_store()
        self._last_row, new_keys = self._store.keys(self._last_row)
        self._finished_keys.update(new_keys)

    def _check_store(self) -> None:
        """Open the store anew where its file was removed or replaced.

        SQLite goes on with the old one in silence.
        """
        path = self._store.path
        if _file_identity(path) == self._file:
            return
        with suppress(StoreError):
            self._store.close()
        try:
            self._store = Store(path)
        except OSError as error:
            raise StoreError(
                f"the store {path} must stay where it is: it was removed, and a new one cannot be "
                f"made ({error.strerror}). Put its folder back, or start `keyhole explore` again."
            ) from error
        # nothing that was read from the old file holds for the new one
        self._file = _file_identity(path)
        self._last_row = 0
        self._finished_keys = set()
        self._values = {}
        self._message = f"the store was removed or replaced: {path} has been opened anew"

    @property
    def finished(self) -> int:
        """How many cells were in the store when it was last looked at."""
        return len(self._finished_keys)

    def _planned(self, state: ExploreState) -> tuple[Plan, dict[Cell, float], str]:
        """What is missing of a state, and why it may not be measured.

        With the seconds that each fit takes by estimate.
        """
        cells = cells_of(state)
        self._check_store()
        plan = Plan.of(cells, self._store)
        costs: dict[Cell, float] = {}
        for job in plan.jobs:
            costs.update(cell_costs(plan.wanted(job)))
        memory = max((job.memory for job in plan.jobs), default=0)
        return plan, costs, self._refusal(state, cells, sum(costs.values()), memory)

    def offer(self, state: ExploreState) -> dict[str, Any]:
        """What measuring this state would take, and why not if not."""
        with self._lock:
            plan, costs, refused = self._planned(state)
        seconds = round(sum(costs.values()), 1)
        return {
            "cells": len(plan.cells),
            "missing": len(plan.missing),
            "seconds": seconds,
            "refused": refused,
        }

    @staticmethod
    def _refusal(state: ExploreState, cells: list[Cell], seconds: float, memory: int) -> str:
        """Why the cells of a state may not be measured; empty where they may."""
        most_seconds = MEASURE_SECONDS / 2
        if not cells and state.view == "surface":
            return "click places on the surface first"
        if not cells and state.named_activation is not None:
            return "layers are fitted with relu here: choose it to measure"
        if not cells:
            return "there is nothing to measure here"
        # the tasks of the literature choose their penalties
        if state.ridge < LEAST_RIDGE and state.view != "tasks":
            return f"fits need a penalty λ of {LEAST_RIDGE:g} at least"
        if seconds > most_seconds:
            return (
                f"these fits take about {seconds:,.0f} s, and {most_seconds:g} s are allowed: "
                "lower d, N or M"
            )
        if memory > MEASURE_MEMORY:
            return (
                f"these fits take {memory / 2**30:.1f} GiB, and {MEASURE_MEMORY / 2**30:g} GiB are "
                "allowed"
            )
        return ""

    def start(self, state: ExploreState) -> None:
        """Measure what is missing; a ValueError where that is not allowed."""
        with self._lock:
            plan, costs, refused = self._planned(state)
            if refused:
                raise ValueError(f"this cannot be measured: {refused}.")
            if self._thread is not None and self._thread.is_alive():
                raise ValueError(
                    "one measurement runs at a time: stop the one that does, or wait for it."
                )
            timer = Timer(plan, {cell.key: cost for cell, cost in costs.items()})
            self._timer = timer
            self._message = ""
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(plan, timer), daemon=True)
            self._thread.start()

    def _run(self, plan: Plan, timer: Timer) -> None:
        """What the thread of a measurement does."""
        path = self._store.path
        file = _file_identity(path)

        def report(keys: Any) -> None:
            """Count finished cells, and end the measurement where it must not go on."""
            timer.finish(keys)
            if self._stop.is_set():
                raise RunError("stopped")
            if timer.seconds > MEASURE_SECONDS:
                raise RunError(f"stopped after {MEASURE_SECONDS:g} s: what is finished is kept")
            # workers that find no file make one, and others write on to the file that has gone
            if _file_identity(path) != file:
                raise RunError(
                    f"the store {path} was removed or replaced while it was written: what was "
                    "measured is lost. Measure again"
                )

        try:
            with Store(path) as store:
                run_local(plan, store, None, report)
        except Exception as error:
            # whatever a fit dies of is told in the page, and the server goes on
            self._message = str(error) or type(error).__name__

    def stop(self) -> None:
        """End the measurement; cells that are finished stay."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=30)

    def close(self) -> None:
        """Stop, and close the store."""
        self.stop()
        self._store.close()

    def news(self) -> dict[str, Any]:
        """How far it is: what every tab hears."""
        with self._lock:
            try:
                self._read_keys()
            except StoreError as error:
                self._message = str(error)
            timer = self._timer
            is_running = self._thread is not None and self._thread.is_alive()
            news = {"running": is_running, "message": self._message, "finished": self.finished}
        if timer is not None:
            news |= {"done": timer.done, "total": timer.total, "left": timer.left}
        return news


@lru_cache(maxsize=2**15)
def _key(cell: Cell) -> str:
    return cell.key


class Guard:
    """Lets nobody in but our own page.

    Checks host, origin and token, and puts the headers on every answer.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.busy: Counter[str] = Counter()  # requests that are being answered, by lane
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        # refuse whoever is not our own page
        sealed = _Sealed(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, sealed)
            return
        scope["state"][ADMITTED] = True

        # refuse what would be too much at a time; the token is no business of the routes
        path = scope["path"][1 + len(self.token) :]
        lane, most = _lane(path)
        if self.busy[lane] >= most:
            busy = _plain(f"at most {most} such requests are answered at a time. Ask again.", 503)
            await busy(scope, receive, sealed)
            return
        inner_scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._answer(inner_scope, receive, sealed, lane)

    async def _answer(self, scope: Scope, receive: Receive, sealed: _Sealed, lane: str) -> None:
        """Answer a request, unless the client leaves or the server ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.busy[lane] += 1
        try:
            await self.app(scope, receive, sealed)
        except ClientDisconnect:
            pass  # nobody is there to hear of it
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            await sealed.finish(scope, receive)
        finally:
            self.busy[lane] -= 1
            self._tasks.discard(task)

    def end(self) -> None:
        """End all requests at once.

        What they wait for may take longer than anybody waits after Ctrl-C.
        """
        self._is_ending = True
        for task in list(self._tasks):
            task.cancel()

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not answered; None where it is."""
        # a header may stand several times, which our own page does not do
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

        # the host must be ours, or the name of another site leads here (DNS rebinding)
        hosts = headers.get("host", [])
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return _plain("this server answers to its own address only.", 421)

        # browsers say which page a request comes from
        origins = headers.get("origin", [])
        if origins and origins != [f"http://{hosts[0]}"]:
            return _plain("requests of other pages are not answered.", 403)
        if headers.get("sec-fetch-site", ["same-origin"])[0] not in ("same-origin", "none"):
            return _plain("requests of other pages are not answered.", 403)

        # compared in constant time, so that nobody guesses the token letter by letter
        token, slash, _ = scope["path"][1:].partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode()):
            return _plain(
                "the address must have its token: copy all of the line that `keyhole explore` "
                "printed.",
                403,
            )

        # without its last slash the names of the page's files would take the place of the token
        if not slash:
            location = f"/{self.token}/"
            query = scope["query_string"].decode("latin-1")
            if query:
                location += f"?{query}"
            return Response(status_code=307, headers={"Location": location})
        return None


def _lane(path: str) -> tuple[str, int]:
    """What a request competes with, and how many of these are answered at a time."""
    if path == "/events":
        return path, MOST_LISTENING
    if path == "/data":
        return path, MOST_UPLOADS
    return "", MOST_WAITING


class _Sealed:
    """Sends an answer with our headers, and knows how much of it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_started = False
        self._is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message["headers"], *ours]
            self._is_started = True
        else:
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def finish(self, scope: Scope, receive: Receive) -> None:
        """End the answer of a server that ends."""
        if not self._is_started:
            await _plain("the server has ended.", 503)(scope, receive, self)
        elif not self._is_complete:
            await self({"type": "http.response.body", "body": b"", "more_body": False})


def _plain(text: str, status: int) -> Response:
    """An answer in plain words."""
    return Response(text, status, media_type="text/plain")


@dataclass(frozen=True)
class _Task:
    """A piece of work for a thread, and where its result goes."""

    context: Context
    future: Future[Any]
    work: Callable[[], Any]


class DaemonThreads:
    """Threads for work that must not block the server.

    None of them keeps the program from ending.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What a piece of work returns."""
        if len(self._threads) < self.count:
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
        task = _Task(context=copy_context(), future=Future(), work=partial(work, *arguments))
        self._tasks.put(task)
        return await asyncio.wrap_future(task.future)

    def _serve(self) -> None:
        """What a thread does: one piece of work after the other."""
        while True:
            task = self._tasks.get()
            if not task.future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                result = task.context.run(task.work)
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)


class Explorer:
    """The application: the page, its views, measurements, uploads."""

    def __init__(self, bench: Bench, ended: Callable[[], bool] = lambda: False) -> None:
        self.bench = bench
        self.ended = ended
        self.listening = 0  # tabs
        self.looking = threading.Lock()  # held while a table is looked at
        self._threads = DaemonThreads(MOST_COMPUTING)
        self._look_threads = DaemonThreads(MOST_UPLOADS)
        self._slots = asyncio.Semaphore(MOST_COMPUTING)
        self._look_pool: WorkerPool | None = None
        routes = [
            Route("/", self.page),
            Route("/events", self.events),
            Route("/save", self.save),
            Route("/view", self._end_point(self.view)),
            Route("/offer", self._end_point(self.offer)),
            Route("/data", self.data, methods=["POST"]),
            Route("/measure", self._end_point(self.measure), methods=["POST"]),
            Route("/stop", self._end_point(self.stop), methods=["POST"]),
        ]
        routes += [Route(f"/{name}", self.asset) for name in ASSETS]
        self.app = Starlette(routes=routes)
        # Starlette knows nothing of the token, and would redirect to an address without it
        self.app.router.redirect_slashes = False

    def close(self) -> None:
        """End what is being computed for those who have left."""
        background.cancel_all()
        pool = self._look_pool
        if pool is not None:
            pool.stop()

    async def _computed(self, request: Request, work: Callable[..., Any], *arguments: Any) -> Any:
        """What a piece of work gives, in a thread, unless the client has left before its turn."""
        async with self._slots:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await self._threads.run(work, *arguments)

    async def _answered(self, work: Awaitable[Any]) -> Response:
        """JSON of what a piece of work gives, or of why it does not."""
        try:
            result = await work
        except (ValueError, ArithmeticError, RunError, StoreError) as error:
            return JSONResponse({"error": str(error) or type(error).__name__}, 422)
        if isinstance(result, Response):
            return result
        return Response(as_json(result), media_type="application/json")

    async def asset(self, request: Request) -> Response:
        """One of the files of the page, by its exact name."""
        name = request.url.path.rpartition("/")[2]
        return Response(_asset(name), media_type=ASSETS[name][0])

    def _end_point(
        self, work: Callable[[dict[str, str]], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An end point for what is computed from the state in an address."""

        async def respond(request: Request) -> Response:
            return await self._answered(self._computed(request, work, dict(request.query_params)))

        return respond

    async def page(self, request: Request) -> Response:
        """The page itself; a state that cannot be read is shown as the page shows a slip."""
        # the browser takes no icon, the style sheets, the data of no charts yet, and the scripts
        head = ['<link rel="icon" href="data:,">']
        scripts = [
            '<script type="application/json" id="keyhole:data">{"inks":{},"charts":{}}</script>'
        ]
        for name in ASSETS:
            if name.endswith(".css"):
                head.append(f'<link rel="stylesheet" href="{name}">')
            else:
                scripts.append(f'<script src="{name}"></script>')

        # the template has the header, an empty line, and the body
        boxes = [f'<label><input type="checkbox" value="{name}"> {name}</label>' for name in TASKS]
        template = Template(_own("explore.html")).substitute(
            version=__version__, tasks="\n".join(boxes)
        )
        header, _, body = template.partition("\n\n")
        page = page_of(
            kind="explore",
            title="keyhole explore",
            head="\n".join(head),
            header=header,
            body=body,
            scripts="\n".join(scripts),
        )
        return Response(page, media_type="text/html")

    def view(self, query: dict[str, str]) -> dict[str, Any]:
        """A view of the state in the address."""
        state = ExploreState.read(query)
        view = self._view(state)
        return {
            **fragment(view.blocks),
            "notes": view.notes,
            "pending": view.pending,
            "python": "\n".join(view.lines),
            "expanded": state.text,
            "finished": self.bench.finished,
        }

    def offer(self, query: dict[str, str]) -> dict[str, Any]:
        """What measuring would take."""
        return self.bench.offer(ExploreState.read(query))

    def measure(self, query: dict[str, str]) -> dict[str, Any]:
        """Start to measure the state."""
        self.bench.start(ExploreState.read(query))
        return self.bench.news()

    def stop(self, query: dict[str, str]) -> dict[str, Any]:
        """Stop measuring."""
        self.bench.stop()
        return self.bench.news()

    def _view(self, state: ExploreState) -> View:
        """What can be shown of a view by now."""
        answer_by.set(time.monotonic() + PATIENCE_SECONDS)
        return show(state, self.bench.results(cells_of(state)))

    async def events(self, request: Request) -> Response:
        """Server-sent events: how far the measurement is, whenever that changes.

        Pages then ask for their view anew.
        """
        if self.listening >= MOST_LISTENING:
            return _plain(f"at most {MOST_LISTENING} tabs hear of progress.", 503)

        async def stream() -> AsyncIterator[str]:
            self.listening += 1
            last_news = None
            quiet_seconds = 0.0
            try:
                while not self.ended():
                    # the same news again after a while, so that the connection is seen to live
                    news = as_json(await self._threads.run(self.bench.news))
                    if news != last_news or quiet_seconds > 15:
                        last_news = news
                        quiet_seconds = 0.0
                        yield f"data: {news}\n\n"
                    quiet_seconds += NEWS_SECONDS
                    await asyncio.sleep(NEWS_SECONDS)
            finally:
                self.listening -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def save(self, request: Request) -> Response:
        """The view as one file that needs no server."""
        return await self._answered(self._saved(request, dict(request.query_params)))

    async def _saved(self, request: Request, query: dict[str, str]) -> Response:
        """A view with all that is known of it within `SAVE_SECONDS`.

        No thread is held meanwhile.
        """
        # look again and again, until nothing is missing or time is up
        state = await self._computed(request, ExploreState.read, query)
        end = time.monotonic() + SAVE_SECONDS
        view = await self._computed(request, self._view, state)
        while view.pending and time.monotonic() < end:
            await asyncio.sleep(NEWS_SECONDS)
            view = await self._computed(request, self._view, state)

        # a file does not complete itself as the page does
        missing = (
            f"was not known after {SAVE_SECONDS:g} s: look at the view until it is complete, and "
            "save it then."
        )
        view = replace(view, notes=[note.replace(MEANWHILE, missing) for note in view.notes])
        content = await self._computed(request, saved_page, state, view)
        headers = {"Content-Disposition": f'attachment; filename="keyhole-{state.view}.html"'}
        return Response(content, media_type="text/html", headers=headers)

    async def data(self, request: Request) -> Response:
        """Look at an uploaded table.

        It lives in memory, in a process of its own, and is never written.
        """
        # receive it, within bounds of size and time
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    content += part
                    if len(content) > MOST_BYTES:
                        words = (
                            f"a table on this page must be at most {MOST_BYTES >> 20} MiB: this "
                            "one is larger. Use `keyhole lens`."
                        )
                        return JSONResponse({"error": words}, 413)
        except TimeoutError:
            words = (
                f"a table must arrive within {BODY_SECONDS:g} s: {len(content)} bytes had come by "
                "then. Send it again."
            )
            return JSONResponse({"error": words}, 408)

        query = dict(request.query_params)
        return await self._answered(self._look_threads.run(self._look, bytes(content), query))

    def _look(self, content: bytes, query: dict[str, str]) -> dict[str, Any]:
        """What the page shows of an upload: the blocks of its report, and its sentences."""
        if not self.looking.acquire(blocking=False):
            raise ValueError("one table is looked at at a time: wait for the one before.")
        try:
            report = self._look_apart(content, query)
        finally:
            self.looking.release()
        blocks: list[Chart | HeatMap | Table] = []
        notes = [report.lead]
        for section in report.sections:
            blocks += section.blocks
            if section.verdict is not None:
                notes.append(f"{section.title} {section.verdict.sentence}")
        return {**fragment(blocks), "notes": notes}

    def _look_apart(self, content: bytes, query: dict[str, str]) -> Report:
        """Look at a table in a process of its own."""
        pool = WorkerPool(1)
        self._look_pool = pool
        try:
            if self.ended():
                raise ValueError("the server has ended.")
            report: Report = pool.submit(look_at, content, query).result(timeout=DATA_SECONDS)
            return report
        except FutureTimeoutError:
            raise ValueError(
                f"a look at a table may take {DATA_SECONDS:g} s, and this took longer. Use "
                "`keyhole lens`."
            ) from None
        except (BrokenProcessPool, MemoryError):
            raise ValueError(
                "the table ended the process that read it: it is damaged, or too large for its "
                "memory."
            ) from None
        finally:
            self._look_pool = None
            pool.stop()


def saved_page(state: ExploreState, view: View) -> str:
    """A view as one HTML file."""
    view_section = Section(
        slug=state.view,
        title=view.title,
        claim="",
        blocks=view.blocks,
        settings=state.describe(),
        text=view.notes,
    )
    lines = ["`" + line.replace("`", "'") + "`" for line in view.lines if line]
    python_section = Section(slug="python", title="The same in Python", claim="", text=lines)
    report = Report(
        title=view.title,
        lead=f"A view of `keyhole explore`: {state.describe()}.",
        sections=[view_section, python_section],
        provenance={
            "keyhole": __version__,
            "NumPy": np.__version__,
            "address": f"?{state.address}",
        },
    )
    return one_page(report)


def look_at(content: bytes, query: dict[str, str]) -> Report:
    """What a process of its own does with an upload.

    Within bounds of memory where the system has such.
    """
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (DATA_MEMORY, DATA_MEMORY))
    return looked(content, query)


def looked(content: bytes, query: dict[str, str]) -> Report:
    """Read an upload in memory, and look at it as `keyhole lens` does."""
    from keyhole.data.reader import read_table, table_in_memory

    # read the table
    unknown = set(query) - {"name", "set", "target"}
    if unknown:
        raise ValueError(
            "an upload has a name, and perhaps columns for set and target: got "
            f"{sorted(unknown)!r:.80}."
        )
    target = query.get("target") or None
    table = table_in_memory(content, query.get("name", ""), target)
    data = read_table(table, set_id=query.get("set") or None, target=target)
    if data.target is None:
        raise ValueError(
            "a table must have a target to learn: no column target, label, class or y. Name it "
            "above."
        )

    # what is expensive to import waits until there is something to look at
    from keyhole.estimators.classes import likely_task
    from keyhole.lab.lens.findings import LensConfig
    from keyhole.lab.lens.look import look
    from keyhole.lab.lens.page import report_of

    config = LensConfig(
        likely_task(data.target), DATA_BUDGET, n_heads=128, max_samples=800, steps=0
    )
    return report_of(look(data, config))


def listen(port: int) -> socket.socket:
    """A socket on the loopback address; port 0 is any that is free.

    The protocol is named because asyncio sends small pieces at once (TCP_NODELAY) only where it is:
    without it the body of an answer waited 40 ms for the acknowledgement of its head.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortTakenError(
            f"port {port} of this machine cannot be had ({error.strerror}). Choose another --port, "
            "or leave it out."
        ) from None
    return listener


class _Uvicorn(uvicorn.Server):
    """A server that ends all requests when it ends."""

    def __init__(self, config: uvicorn.Config, guard: Guard) -> None:
        super().__init__(config)
        self.guard = guard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is being answered, then the connections, then the server."""
        self.guard.end()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        # clients have a moment to read what was sent; one that does not read is left
        end = time.monotonic() + LAST_SECONDS
        while connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        await super().shutdown(sockets)


class ExploreServer:
    """A running server; `address` is what opens the page."""

    def __init__(self, store: Path, port: int = 0) -> None:
        # a store that cannot be opened must not keep the port
        self.socket = listen(port)
        try:
            self.bench = Bench(store)
        except BaseException:
            self.socket.close()
            raise
        self.port = self.socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        self.address = f"http://127.0.0.1:{self.port}/{self.token}/"

        # the application behind its guard, on the loopback address and with nothing else enabled
        self.explorer = Explorer(self.bench, lambda: self.server.should_exit)
        guard = Guard(self.explorer.app, self.token, self.port)
        config = uvicorn.Config(
            guard,
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=int(WAITING_SECONDS),
            h11_max_incomplete_event_size=2**16,
            ws="none",
            http=Connection,
            loop="asyncio",
        )
        self.server = _Uvicorn(config, guard)

    def run(self) -> None:
        """Serve until stopped (Ctrl-C); the store is closed in order."""
        try:
            self.server.run(sockets=[self.socket])
        finally:
            self.explorer.close()
            self.bench.close()
            self.socket.close()

    def stop(self) -> None:
        """Ask a server that runs in another thread to end."""
        self.server.should_exit = True
