"""The server of `keyhole explore`, for one person's browser.

On the loopback address only, behind a random token. A request must name our own host, come from
our own page where it says where it comes from, and know the token; nothing in it is ever taken for
a path. What is computed is computed in processes of their own, which can be ended and take nothing
along when they die: one for the theory, one for measurements, and one for each uploaded table.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keyhole import __version__
from keyhole.lab.explore.fits import Results, Run
from keyhole.lab.explore.measurement import Measurement
from keyhole.lab.explore.state import ExploreState
from keyhole.lab.explore.views import (
    View,
    refusal_to_measure,
    runs_of_view,
    show,
)
from keyhole.lab.explore.worker import Worker, WorkerEndedError
from keyhole.lab.lens import Findings
from keyhole.lab.report.document import Report, Section, Table
from keyhole.lab.report.html import as_json, asset, fragment, library, one_page, page_of
from keyhole.registry import POINTWISE
from keyhole.theory.tasks import TASKS

MOST_BYTES = 2**25  # of an upload
ANSWER_SECONDS = 60.0  # of a view, beyond which its process is ended; it ends by itself far before
DATA_SECONDS = 60.0  # of a look at an uploaded table
MOST_LOOKED_AT = 400
"""Samples of an upload that are looked at."""
QUICK_SECONDS = 0.3  # of the answers of a view that is shown at once
VIEW_SECONDS = 6.0  # of all its answers
LAST_SECONDS = 0.5  # that clients have to read their answers when the server ends

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


# ---- what the processes do -----------------------------------------------------------------------


@lru_cache(maxsize=1)
def _results(folder: Path) -> Results:
    """What is measured: a process keeps what it has read."""
    return Results(folder)


def quick_answer(query: dict[str, str], folder: Path) -> dict[str, Any]:
    """What the page shows at once of the state in an address."""
    return _shown(query, folder, QUICK_SECONDS)


def view_answer(query: dict[str, str], folder: Path) -> dict[str, Any]:
    """All that the page shows of it."""
    answer = _shown(query, folder, VIEW_SECONDS)
    return {**answer, "notes": answer["notes"] + answer["late"], "late": []}


def _shown(query: dict[str, str], folder: Path, seconds: float) -> dict[str, Any]:
    """A view with so much time for the theory; what is late may be there the next time."""
    state = ExploreState.read(query)
    results = _results(folder)
    view = show(state, results, seconds)
    runs = runs_of_view(state)
    return {
        **fragment(view.blocks),
        "notes": view.notes,
        "late": view.late,
        "python": "\n".join(view.lines),
        "expanded": state.text,
        "fits": len(runs),
        "missing": len(results.missing(runs)),
        "refused": refusal_to_measure(state),
    }


def saved_answer(query: dict[str, str], folder: Path) -> tuple[str, str]:
    """The name of a view, and the view as one file that needs no server."""
    state = ExploreState.read(query)
    return state.view, saved_page(state, show(state, _results(folder), VIEW_SECONDS))


def missing_runs(query: dict[str, str], folder: Path) -> list[Run]:
    """What is to be fitted for a state; a ValueError where it cannot be measured."""
    state = ExploreState.read(query)
    refused = refusal_to_measure(state)
    if refused:
        raise ValueError(f"this cannot be measured: {refused}.")
    return _results(folder).missing(runs_of_view(state))


def looked(content: bytes, query: dict[str, str]) -> dict[str, Any]:
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
    from keyhole.lab.lens import lens

    n_samples = len(data.sets)
    if n_samples > MOST_LOOKED_AT:
        rows = np.random.default_rng(0).permutation(n_samples)[:MOST_LOOKED_AT]
        data = data[np.sort(rows)]
    return look_answer(lens(data))


def look_answer(findings: Findings) -> dict[str, Any]:
    """What the page shows of a look at data: the table of learners, and the answers."""
    table = Table(name="learners", title=findings.measure, rows=findings.table)
    notes = [findings.description]
    notes += [f"{a.question} {a.sentence}" for a in findings.answers.values()]
    notes.append(f"Start from {findings.recommendation}")
    return {**fragment([table]), "notes": notes}


def saved_page(state: ExploreState, view: View) -> str:
    """A view as one HTML file."""
    view_section = Section(
        slug=state.view,
        title=view.title,
        claim="",
        blocks=view.blocks,
        settings=state.describe(),
        text=view.notes + view.late,
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


# ---- the application -----------------------------------------------------------------------------


class Guard:
    """Lets nobody in but our own page: checks host, origin and token, and sets the headers."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def send_sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            return
        app = self._refusal(scope) or self.app
        await app(scope, receive, send_sealed)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not answered; None where it is."""
        headers = Headers(scope=scope)

        # the host must be ours, or the name of another site leads here (DNS rebinding)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return PlainTextResponse("this server answers to its own address only.", 421)

        # browsers say which page a request comes from
        origins = headers.getlist("origin")
        is_foreign = bool(origins) and origins != [f"http://{hosts[0]}"]
        site = headers.get("sec-fetch-site", "same-origin")
        if is_foreign or site not in ("same-origin", "none"):
            return PlainTextResponse("requests of other pages are not answered.", 403)

        # compared in constant time, so that nobody guesses the token letter by letter
        token = scope["path"].split("/")[1]
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode()):
            return PlainTextResponse(
                "the address must have its token: copy all of the line that `keyhole explore` "
                "printed.",
                403,
            )
        return None


class Explorer:
    """The application: the page, its views, measurements, uploads."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.measurement = Measurement(folder)
        self._theory = Worker()
        self._looks: set[Worker] = set()  # at uploaded tables: one at a time
        self._turn = asyncio.Lock()  # of requests for the process of the theory
        routes = [
            Route("/", self.page),
            Route("/quick", self._answer(self.quick)),
            Route("/view", self._answer(self.view)),
            Route("/save", self._answer(self.save)),
            Route("/news", self._answer(self.news)),
            Route("/measure", self._answer(self.measure), methods=["POST"]),
            Route("/stop", self._answer(self.stop), methods=["POST"]),
            Route("/data", self._answer(self.data), methods=["POST"]),
        ]
        routes += [Route(f"/{name}", self.asset) for name in ASSETS]
        self.app = Starlette(routes=[Mount(f"/{token}", routes=routes)])

    def close(self) -> None:
        """End all processes: whoever waits for one is told so."""
        self._theory.close()
        self.measurement.close()
        for worker in list(self._looks):
            worker.close()

    def _answer(
        self, work: Callable[[Request], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An end point that answers with JSON, or says why it does not."""

        async def respond(request: Request) -> Response:
            try:
                answer = await work(request)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 422)
            except WorkerEndedError as error:
                return JSONResponse({"error": f"this was not computed: {error}"}, 503)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody is there to read it
            if isinstance(answer, Response):
                return answer
            return Response(as_json(answer), media_type="application/json")

        return respond

    async def _ask_theory(self, request: Request, function: Callable[..., Any]) -> Any:
        """What a function of the state in an address gives, in the process of the theory.

        A client that has left before its turn is not waited upon.
        """
        query = dict(request.query_params)
        async with self._turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(
                self._theory.ask, function, query, self.folder, seconds=ANSWER_SECONDS
            )

    async def asset(self, request: Request) -> Response:
        """One of the files of the page, by its exact name."""
        name = request.url.path.rpartition("/")[2]
        return Response(_asset(name), media_type=ASSETS[name][0])

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
        options = [f'<option value="{name}">{name}</option>' for name in POINTWISE]
        template = Template(_own("explore.html")).substitute(
            version=__version__, tasks="\n".join(boxes), activations="\n".join(options)
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

    async def quick(self, request: Request) -> dict[str, Any]:
        """What is known at once of a view of the state in the address."""
        answer: dict[str, Any] = await self._ask_theory(request, quick_answer)
        return {**answer, "finished": self.measurement.news()["finished"]}

    async def view(self, request: Request) -> dict[str, Any]:
        """All of a view of the state in the address."""
        answer: dict[str, Any] = await self._ask_theory(request, view_answer)
        return {**answer, "finished": self.measurement.news()["finished"]}

    async def save(self, request: Request) -> Response:
        """The view as one file that needs no server."""
        name, content = await self._ask_theory(request, saved_answer)
        headers = {"Content-Disposition": f'attachment; filename="keyhole-{name}.html"'}
        return Response(content, media_type="text/html", headers=headers)

    async def news(self, request: Request) -> dict[str, Any]:
        """How far the measurement is."""
        return self.measurement.news()

    async def measure(self, request: Request) -> dict[str, Any]:
        """Start to measure the state."""
        runs = await self._ask_theory(request, missing_runs)
        self.measurement.start(runs)
        return self.measurement.news()

    async def stop(self, request: Request) -> dict[str, Any]:
        """Stop measuring."""
        await asyncio.to_thread(self.measurement.stop)
        return self.measurement.news()

    async def data(self, request: Request) -> Any:
        """Look at an uploaded table, which lives in memory and is never written."""
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > MOST_BYTES:
                words = (
                    f"a table on this page must be at most {MOST_BYTES >> 20} MiB: this one is "
                    "larger. Use `keyhole lens`."
                )
                return JSONResponse({"error": words}, 413)

        if self._looks:
            raise ValueError("one table is looked at at a time: wait for the one before.")
        worker = Worker()
        self._looks.add(worker)
        query = dict(request.query_params)
        try:
            return await asyncio.to_thread(
                worker.ask, looked, bytes(content), query, seconds=DATA_SECONDS
            )
        except WorkerEndedError as error:
            raise ValueError(
                f"the table was not read: {error} It is damaged, or too large for this page. Use "
                "`keyhole lens`."
            ) from None
        finally:
            self._looks.discard(worker)
            worker.close()


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
    """A server that ends its processes first, so that no request waits for them."""

    def __init__(self, config: uvicorn.Config, explorer: Explorer) -> None:
        super().__init__(config)
        self.explorer = explorer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the processes, then connections that do not end by themselves, then the server."""
        await asyncio.to_thread(self.explorer.close)
        await asyncio.sleep(LAST_SECONDS if self.server_state.tasks else 0.0)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


class ExploreServer:
    """A running server; `address` is what opens the page."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.socket = listen(port)
        self.port = self.socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        self.address = f"http://127.0.0.1:{self.port}/{self.token}/"
        self.explorer = Explorer(folder, self.token)
        config = uvicorn.Config(
            Guard(self.explorer.app, self.token, self.port),
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            limit_concurrency=64,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=2**16,
            http="h11",
            ws="none",
            loop="asyncio",
        )
        self.server = _Uvicorn(config, self.explorer)

    def run(self) -> None:
        """Serve until stopped (Ctrl-C)."""
        try:
            self.server.run(sockets=[self.socket])
        finally:
            self.explorer.close()
            self.socket.close()

    def stop(self) -> None:
        """Ask a server that runs in another thread to end."""
        self.server.should_exit = True
