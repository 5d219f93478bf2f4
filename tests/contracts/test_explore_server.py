"""Whoever is not the page gets nothing from `keyhole explore`; what the page sends is refused in
words or served.
"""

import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, feather

from keyhole.data.reader import read_table, table_in_memory
from keyhole.lab.explore import connections, views
from keyhole.lab.explore import server as explore
from keyhole.lab.report.document import Chart, Report, Section, Series, Table
from keyhole.lab.report.html import fragment


@contextmanager
def running(folder):
    server = explore.ExploreServer(folder / "cells.sqlite")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.server.started:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield server
    server.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("explore")) as found:
        yield found


def ask(server, path, method="GET", body=None, token=None, **headers):
    """Status, headers and text; `path` is sent as it stands."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(
        method, f"/{server.token if token is None else token}{path}", skip_host="Host" in headers
    )
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
        connection.endheaders(body)
    try:
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def wait_until(condition):
    """Wait for something that another thread brings about; half a minute is for ever."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send_raw(server, text):
    """A connection on which a text was sent; nothing is read from it."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(text.encode())
    return connection


def upload_head(server, length):
    """The head of an upload whose body is yet to come."""
    host = f"Host: 127.0.0.1:{server.port}\r\n"
    return (
        f"POST /{server.token}/data?name=x.csv HTTP/1.1\r\n{host}Content-Length: {length}\r\n\r\n"
    )


@contextmanager
def closing(connections):
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


@pytest.fixture
def logged_errors():
    """What the server would print on the terminal."""
    records = []

    class Collect(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Collect(level=logging.ERROR)
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def alive(server):
    status, _, text = ask(server, "/view?view=surface&top=100")
    return status == 200 and "charts" in json.loads(text)


def test_the_page_is_served_locked(server):
    assert server.address == f"http://127.0.0.1:{server.port}/{server.token}/"
    assert len(server.token) >= 32
    status, headers, text = ask(server, "/")
    assert status == 200
    assert "<title>keyhole explore</title>" in text
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert text.count("<script") == 4
    assert "onclick" not in text
    for name in explore.ASSETS:
        assert f'"{name}"' in text
        assert ask(server, f"/{name}")[0] == 200
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (421, {"Host": "evil.example"}),
        (421, {"Host": "127.0.0.1"}),
        (421, {"Host": "127.0.0.1:1"}),
        (421, {"Host": "localhost.evil.example:{port}"}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "https://127.0.0.1:{port}"}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (403, {"Sec_Fetch_Site": "same-site"}),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/view"), ("POST", "/stop")])
def test_foreign_pages_are_refused(server, status, headers, method, path):
    given = {name: value.format(port=server.port) for name, value in headers.items()}
    found, answer, _ = ask(server, path, method, **given)
    assert found == status
    assert not any("access-control" in name.lower() for name in answer)


def test_our_own_page_is_not(server):
    for host in ("127.0.0.1", "localhost"):
        origin = f"http://{host}:{server.port}"
        assert (
            ask(
                server,
                "/stop",
                "POST",
                Host=origin[7:],
                Origin=origin,
                Sec_Fetch_Site="same-origin",
            )[0]
            == 200
        )


@pytest.mark.parametrize("token", ["", "x", "..", "%2e%2e", "{token}x", "é"])
def test_without_the_token_there_is_nothing(server, token):
    for path in ("/", "/view", "/plotly.js"):
        found = ask(server, path, token=quote(token.format(token=server.token), safe="%"))
        assert found[0] == 403
        assert "token" in found[2]


def test_an_address_without_its_last_slash_keeps_the_token(server):
    status, headers, _ = ask(server, "?view=heads&d=4")
    assert status == 307
    assert headers["location"] == f"/{server.token}/?view=heads&d=4"
    assert ask(server, "")[1]["location"] == f"/{server.token}/"
    assert (
        "<title>keyhole explore</title>"
        in ask(server, headers["location"].removeprefix(f"/{server.token}"))[2]
    )
    # nor does an address with one slash too many lose it
    assert ask(server, "/view/")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2fviews.py",
        "//etc/passwd",
        "/plotly.js/../../server.py",
        "/explore.js%00.css",
        "/file:///etc/passwd",
        "/server.py",
        "/view/",
        "/save/../../x",
    ],
)
def test_no_path_of_a_request_is_opened(server, path):
    status, _, text = ask(server, path)
    assert status in (307, 404)
    assert "root:" not in text
    assert "import" not in text


@pytest.mark.parametrize("path", ["/measure", "/stop", "/data"])
def test_what_changes_something_is_no_get(server, path):
    assert ask(server, path)[0] == 405


def test_a_target_with_a_script_is_text(server):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    for path in ("/view", "/save", "/offer"):
        status, headers, text = ask(server, f"{path}?{urlencode({'target': evil})}")
        assert status == 422
        assert "json" in headers["content-type"]
        assert "cannot read the target" in json.loads(text)["error"]
    assert ask(server, f"/?{urlencode({'target': evil})}")[2] == ask(server, "/")[2]


def test_a_saved_view_is_one_file(server):
    status, headers, text = ask(server, "/save?view=surface&top=1000&d=4")
    assert status == 200
    assert headers["content-disposition"] == 'attachment; filename="keyhole-surface.html"'
    assert "data:text/csv;base64," in text
    assert server.token not in text


def test_uploads_that_make_no_sense_are_explained(server, monkeypatch):
    """The look itself is called here without its process: what it says is what the page shows."""
    for content, words in (
        (b"", "does not read"),
        (b"\x00\xff" * 50, "does not read"),
        (b"PAR1 no parquet at all PAR1", "does not read"),
        (b"ARROW1 nor Arrow", "does not read"),
        (b"PK\x03\x04 nor npz", "does not read"),
        (b"a,b\n1,2\n3\n", "does not read"),
        (b"a,b\n1,2\n", "target|set|column"),
    ):
        with pytest.raises(ValueError, match=words):
            explore.looked(content, {"name": "x.csv"})
    with pytest.raises(ValueError, match="an upload has a name"):
        explore.looked(b"", {"path": "/etc/passwd"})
    monkeypatch.setattr(explore, "MOST_BYTES", 2**18)
    size = 2**22
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST /{server.token}/data HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: "
        f"{size}\r\n\r\n"
    )
    connection.sendall(head.encode())
    sent, block = 0, bytes(2**16)
    with suppress(OSError):
        while sent < size:
            connection.sendall(block[: size - sent])
            sent += len(block)
    with connection:
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]
    assert alive(server)


def test_a_file_in_memory_reads_as_on_the_disk(tmp_path, rng):
    """Every format, by its bytes; the name is not taken for a path."""
    table = pa.table(
        {"set": np.arange(24) // 3, "x": rng.normal(size=24), "target": np.arange(24) // 3 % 5}
    )
    writers = {
        "a.csv": lambda path: csv.write_csv(table, path),
        "a.tsv": lambda path: csv.write_csv(table, path, csv.WriteOptions(delimiter="\t")),
        "a.parquet": lambda path: pq.write_table(table, path),
        "a.arrow": lambda path: feather.write_feather(table, path),
        "a.npz": lambda path: np.savez_compressed(
            path, X=table["x"].to_numpy()[:, None], ptr=np.arange(9) * 3, y=np.arange(8) % 5
        ),
    }
    for name, write in writers.items():
        write(str(tmp_path / name))
        found = read_table(table_in_memory((tmp_path / name).read_bytes(), f"/nowhere/{name}"))
        there = read_table(tmp_path / name)
        np.testing.assert_array_equal(found.sets.tokens, table["x"].to_numpy()[:, None])
        np.testing.assert_array_equal(found.target, there.target)
        assert found.sets.lengths.tolist() == there.sets.lengths.tolist() == [3] * 8


def fails(content, query):
    os.abort()


class Here:
    """A pool without processes."""

    def __init__(self, workers):
        pass

    def submit(self, work, *arguments):
        done = Future()
        done.set_result(work(*arguments))
        return done

    def stop(self):
        pass


def evil_report(content, query):
    name = "<script>alert(1)</script>"
    chart = Chart(name, name, name, name, [Series(name, [1.0], [2.0], role=name, hover=[name])])
    return Report(
        name, name, [Section(name, name, name, [chart, Table(name, name, [{name: name}])])]
    )


def test_a_table_is_described_in_a_process_of_its_own(server, monkeypatch):
    """One that dies takes nothing along; names in the data are text; nothing is written."""
    monkeypatch.setattr(explore, "look_at", fails)
    status, _, text = ask(server, "/data?name=x.csv", "POST", b"a,b\n1,2\n")
    assert status == 422
    assert "ended the process that read it" in json.loads(text)["error"]
    monkeypatch.setattr(explore, "WorkerPool", Here)
    monkeypatch.setattr(explore, "look_at", evil_report)
    before = sorted(server.bench._store.path.parent.iterdir())
    status, _, text = ask(server, "/data?name=x.csv", "POST", b"a,b\n1,2\n")
    assert status == 200
    assert "<script>" not in json.loads(text)["html"]
    assert sorted(server.bench._store.path.parent.iterdir()) == before
    assert alive(server)


def test_a_table_is_described(seed, monkeypatch):
    """The learning curve, heads, spectrum and loading of a table that is nowhere but in memory."""
    monkeypatch.setattr(explore, "DATA_BUDGET", 2.0)
    rng = np.random.default_rng(seed)
    evil = "<img src=x onerror=alert(1)>"
    rows = [f"set,{evil},</script><script>alert(2)</script>,target"]
    for name in range(48):
        keys = rng.standard_normal((3, 2))
        rows += [f"{name},{a:.4f},{b:.4f},{(keys[:, 0] ** 2).mean():.4f}" for a, b in keys]
    report = explore.looked("\n".join(rows).encode(), {"name": "x.csv"})
    names = [block.name for section in report.sections for block in section.blocks]
    assert {"learning_curve", "heads", "eigenvalues", "power"} <= set(names)
    shown = fragment([block for section in report.sections for block in section.blocks])
    assert "<img" not in shown["html"]
    assert "<script" not in shown["html"]


def test_many_requests_at_once_are_served_or_refused(server):
    def one(k):
        try:
            return ask(server, "/" if k % 10 else "/view?view=surface&top=100")[0]
        except (ConnectionError, http.client.HTTPException):
            return 0

    with ThreadPoolExecutor(60) as pool:
        found = list(pool.map(one, range(500)))
    assert set(found) <= {200, 503, 0}
    assert found.count(200) > 50
    assert alive(server)


def test_half_sent_requests_lock_nobody_out(server):
    """300 connections that never finish the head of a request, held open: the newest of all is
    served.
    """
    half = f"GET /x HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    with closing([]) as held:
        for _ in range(300):
            held.append(send_raw(server, half))
        assert alive(server)
        assert len(server.server.server_state.connections) <= connections.MOST_CONNECTIONS + 1


def test_a_connection_that_knows_the_token_gives_way_last(server, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 4)
    known = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    known.request("GET", f"/{server.token}/report.css")
    known.getresponse().read()
    with closing([known]) as held:
        for _ in range(12):
            held.append(send_raw(server, "GET /x HTTP/1.1\r\n"))
        known.sock.settimeout(30)
        known.request("GET", f"/{server.token}/report.css")  # on the same connection
        assert known.getresponse().status == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GET /x HTTP/1.1\r\n",
        # refused, and then goes on sending
        "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc",
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_request_that_is_never_finished_is_ended(server, monkeypatch, text):
    monkeypatch.setattr(connections, "WAITING_SECONDS", 0.3)
    connection = send_raw(server, text)
    received = b""
    with closing([connection]), suppress(ConnectionResetError):
        while part := connection.recv(4096):  # blocks for half a minute where nobody closes
            received += part
    assert b" 200 " not in received


def test_slow_uploads_lock_nobody_out(server, monkeypatch):
    """70 tables that never arrive: two are waited for, the others and what else is asked are
    answered at once.
    """
    monkeypatch.setattr(explore, "BODY_SECONDS", 2.0)
    with closing([]) as held:
        for _ in range(70):
            held.append(send_raw(server, upload_head(server, length=1000) + "a,b"))
        assert alive(server)
        answers = [connection.recv(4096).split(b"\r\n")[0].split()[1] for connection in held]
    assert sorted(answers) == [b"408"] * explore.MOST_UPLOADS + [b"503"] * (
        70 - explore.MOST_UPLOADS
    )


def test_a_client_that_does_not_read_is_left(server, monkeypatch):
    """The chart library is larger than all buffers together."""
    monkeypatch.setattr(connections, "READING_SECONDS", 0.3)
    head = f"GET /{server.token}/plotly.js HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    with closing([send_raw(server, head)]):
        wait_until(lambda: len(server.server.server_state.connections) > 0)
        wait_until(lambda: len(server.server.server_state.connections) == 0)


def test_answers_are_sent_at_once(server):
    """Without TCP_NODELAY the body of an answer waits 40 ms for the acknowledgement of its head."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")  # so that the connection is there, and stays
        address = client.getsockname()

        def ours():
            connections = list(server.server.server_state.connections)
            return [each for each in connections if each.client == address]

        wait_until(ours)
        accepted = ours()[0].transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_client_that_leaves_is_no_error(server, logged_errors):
    """During an upload, and during an answer that takes a while."""
    for text in (
        upload_head(server, length=1000) + "a,b",
        f"GET /{server.token}/events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n",
    ):
        connection = send_raw(server, text)
        wait_until(lambda: len(server.server.server_state.tasks) > 0)
        connection.close()
        wait_until(lambda: len(server.server.server_state.tasks) == 0)
    assert alive(server)
    assert logged_errors == []


@pytest.mark.parametrize("target", ["rotated(0.5)^6", "rotated(0.5)^4 * token"])
@pytest.mark.parametrize("view", ["curves", "needs", "spectrum", "heads"])
def test_a_target_that_would_take_minutes_is_refused_in_words(server, target, view):
    status, _, text = ask(server, f"/view?{urlencode({'view': view, 'target': target})}")
    answer = json.loads(text)
    assert status == 200
    wait_until(lambda: not len(views.background))
    answer = json.loads(ask(server, f"/view?{urlencode({'view': view, 'target': target})}")[2])
    assert not answer["pending"]
    assert any("s are allowed here" in note for note in answer["notes"])


def test_a_view_to_be_saved_waits_no_longer_than_it_may(server, monkeypatch):
    """What is not known by then is named in the file; a thread is not held meanwhile."""
    going_on = threading.Event()
    numbers = views._numbers

    def slow(question, target):
        if question.arguments.mean is not None:
            going_on.wait(30)
        return numbers(question, target)

    monkeypatch.setattr(explore, "SAVE_SECONDS", 0.5)
    monkeypatch.setattr(views, "_numbers", slow)
    try:
        status, _, text = ask(server, "/save?d=9&c=0.77&n=100000")
    finally:
        going_on.set()
        wait_until(lambda: not len(views.background))
    assert status == 200
    assert "was not known after 0.5 s" in text


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
    ids=["garbage", "no host", "long", "negative", "two hosts"],
)
def test_malformed_requests_end_no_server(server, raw):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(raw)
        first = connection.recv(200).split(b"\r\n")[0]
    assert not first.startswith(b"HTTP/1.1 2")
    assert alive(server)


def test_news_of_a_measurement_reach_every_listener(server, monkeypatch):
    """Events tell progress; a second measurement waits; stopping ends the first and keeps the
    store.
    """
    started, ended = threading.Event(), threading.Event()

    def slow(plan, store, n_workers, report):
        started.set()
        try:
            while True:
                report([])
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(explore, "run_local", slow)
    connections = [
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(2)
    ]
    listeners = []
    for connection in connections:
        connection.request("GET", f"/{server.token}/events")
        listeners.append(connection.getresponse())
        assert listeners[-1].headers["content-type"].startswith("text/event-stream")
    assert ask(server, "/measure?d=4", "POST")[0] == 200
    assert started.wait(20)
    status, _, text = ask(server, "/measure?d=5", "POST")
    assert status == 422
    assert "one measurement runs at a time" in text
    for listener in listeners:
        seen = []
        while not (seen and seen[-1]["running"]):
            line = listener.readline()
            if line.startswith(b"data: "):
                seen.append(json.loads(line[6:]))
        assert seen[-1]["total"] > 0
    status, _, text = ask(server, "/stop", "POST")
    assert json.loads(text)["running"] is False
    assert ended.is_set()
    assert json.loads(text)["message"] == "stopped"
    for part in (*listeners, *connections):
        part.close()
    assert alive(server)


def start(*arguments, before=""):
    code = f"{before}\nfrom keyhole.cli import main; main()"
    command = [sys.executable, "-c", code, "explore", "--no-browser", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_prints_its_address_and_stops_by_ctrl_c(tmp_path, server):
    process = start("--out", str(tmp_path))
    taken = start("--port", str(server.port), "--out", str(tmp_path / "other"))
    try:
        address = process.stdout.readline().strip()
        host, port = address.split("/")[2].split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("GET", "/" + address.split("/", 3)[3])
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert out == ""
        assert "Traceback" not in err
        assert f"stopped; what was measured is in {tmp_path / 'cells.sqlite'}" in err
        out, err = taken.communicate(timeout=30)
        assert taken.returncode == 2
        assert out == ""
        assert f"port {server.port} of this machine cannot be had" in err
        assert "--port" in err
    finally:
        process.kill()
        taken.kill()


ENDLESS = """
import time
from keyhole.lab.explore import views
views._numbers = lambda *arguments: time.sleep(600)
"""


@pytest.mark.parametrize(
    "before", ["", ENDLESS], ids=["a target of minutes", "a theory that never ends"]
)
def test_ctrl_c_ends_what_is_being_computed(tmp_path, before):
    """Views, a saved page and an upload are on their way."""
    process = start("--out", str(tmp_path), before=before)
    try:
        address = process.stdout.readline().strip()
        port, token = int(address.split("/")[2].split(":")[1]), address.split("/")[3]
        head = f"HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        query = urlencode({"target": "rotated(0.5)^6"})
        requests = [f"GET /{token}/{path}?{query} {head}\r\n" for path in ("view", "save")]
        requests += [f"GET /{token}/view?{query}&view=spectrum {head}\r\n"]
        requests += [f"POST /{token}/data {head}Content-Length: 9\r\n\r\n"]
        with closing([]) as held:
            for text in requests:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=30))
                held[-1].sendall(text.encode())
            time.sleep(1.0)  # all are being answered
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err.splitlines()[1:] == [
            f"stopped; what was measured is in {tmp_path / 'cells.sqlite'}."
        ]
    finally:
        process.kill()
