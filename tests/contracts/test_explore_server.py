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
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyhole.lab.explore import fits
from keyhole.lab.explore import server as explore
from keyhole.lab.explore.measurement import Measurement
from keyhole.lab.explore.worker import Worker, WorkerEndedError
from keyhole.lab.report.document import Chart, Report, Section, Series, Table
from keyhole.lab.report.html import fragment, one_page


@contextmanager
def running(folder):
    server = explore.ExploreServer(folder)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.server.started)
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


def alive(server):
    status, _, text = ask(server, "/view?view=needs")
    return status == 200 and "charts" in json.loads(text)


# ---- who is let in -------------------------------------------------------------------------------


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
    assert "content-security-policy" in answer
    assert not any("access-control" in name.lower() for name in answer)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_our_own_page_is_not(server, host):
    origin = f"http://{host}:{server.port}"
    headers = {"Host": origin[7:], "Origin": origin, "Sec_Fetch_Site": "same-origin"}
    assert ask(server, "/stop", "POST", **headers)[0] == 200


@pytest.mark.parametrize("token", ["", "x", "..", "%2e%2e", "{token}x", "é"])
def test_without_the_token_there_is_nothing(server, token):
    for path in ("/", "/view", "/plotly.js"):
        found = ask(server, path, token=quote(token.format(token=server.token), safe="%"))
        assert found[0] == 403
        assert "token" in found[2]


def test_an_address_without_its_last_slash_leads_to_the_page(server):
    status, headers, _ = ask(server, "?view=heads&d=4")
    assert status == 307
    assert headers["location"] == f"{server.address}?view=heads&d=4"


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
        "/save/../../x",
    ],
)
def test_no_path_of_a_request_is_opened(server, path):
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("path", ["/measure", "/stop", "/data"])
def test_what_changes_something_is_no_get(server, path):
    assert ask(server, path)[0] == 405


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


# ---- views ---------------------------------------------------------------------------------------


def test_a_target_with_a_script_is_text(server):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    for path in ("/view", "/save"):
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
    assert "The same in Python" in text
    assert server.token not in text


def test_what_takes_long_is_late_and_then_left_out_with_a_note(server, monkeypatch):
    """rotated(0.5)^6 with a mean takes minutes; the rest of the view is shown at once."""
    query = urlencode({"target": "rotated(0.5)^6", "d": 8})
    start = time.monotonic()
    quick = json.loads(ask(server, f"/quick?{query}")[2])
    assert time.monotonic() - start < 4
    assert any("takes more than" in words for words in quick["late"])
    assert "MLP, ∞ wide" in quick["html"]
    patient = json.loads(ask(server, f"/view?{query}")[2])
    assert patient["late"] == []
    assert any("takes more than" in words for words in patient["notes"])
    assert not any("takes more than" in words for words in quick["notes"])


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


NAMES = [
    *explore.ASSETS,
    "",
    "quick",
    "view",
    "save",
    "news",
    "measure",
    "stop",
    "data",
    "x",
    "..",
    "%00",
]
VALUES = {
    "view": st.sampled_from(["curves", "needs", "surface", "spectrum", "heads", "rotation"]),
    "target": st.sampled_from(
        ["corr * token", "token^2", "rotated(0.5)^2 * token", "corr/0", "1", "1e300*corr", "query"]
    ),
    "activation": st.sampled_from(["relu", "linear", "square", "step", "exp", "x"]),
    "picks": st.sampled_from(["100x20", "10x10,20x20", "1x", "4000x4096"]),
    "tasks": st.sampled_from(["lookup", "lookup,majority", "x", ""]),
    "set": st.text(max_size=5),
}
NUMBERS = st.one_of(
    st.integers(-1, 600).map(str),
    st.floats(0, 100).map(repr),
    st.sampled_from(["1e7", "1e400", "nan", "-0", "", "é", "0x10", "1e-9"]),
)
QUERIES = st.fixed_dictionaries(
    {},
    optional={
        **VALUES,
        **dict.fromkeys(["d", "N", "n", "M", "c", "ridge", "noise", "top"], NUMBERS),
        "path": st.just("/etc/passwd"),
    },
)
REQUESTS = st.one_of(
    st.tuples(st.just("GET"), st.sampled_from(["quick", "save"]), QUERIES, st.none()),
    st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS"]),
        st.sampled_from(NAMES),
        QUERIES,
        st.none() | st.binary(max_size=100),
    ),
)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests_are_answered_or_refused_in_words(server, monkeypatch, count):
    """Any method, path, settings and body: no error of ours, and the server lives."""
    monkeypatch.setattr(Measurement, "start", lambda self, runs: None)  # fits take their time
    statuses = set()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(REQUESTS)
    def check(request):
        method, name, query, body = request
        status, _, text = ask(server, f"/{name}?{urlencode(query)}", method, body)
        statuses.add(status)
        assert status in (200, 404, 405, 422), (status, text[:500])
        if status == 422 and method != "HEAD":
            assert len(json.loads(text)["error"]) > 10

    check()
    assert {200, 404, 405, 422} <= statuses
    assert alive(server)


# ---- uploaded tables -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not read"),
        (b"\x00\xff" * 50, "does not read"),
        (b"PAR1 no parquet at all PAR1", "does not read"),
        (b"ARROW1 nor Arrow", "does not read"),
        (b"PK\x03\x04 nor npz", "does not read"),
        (b"a,b\n1,2\n3\n", "does not read"),
        (b"a,b\n1,2\n", "target|set|column"),
    ],
)
def test_uploads_that_make_no_sense_are_explained(content, words):
    with pytest.raises(ValueError, match=words):
        explore.looked(content, {"name": "x.csv"})


def test_an_upload_names_no_file():
    with pytest.raises(ValueError, match="an upload has a name"):
        explore.looked(b"", {"path": "/etc/passwd"})


def test_a_table_that_is_too_large_is_refused(server, monkeypatch):
    monkeypatch.setattr(explore, "MOST_BYTES", 2**18)
    status, _, text = ask(server, "/data?name=x.csv", "POST", bytes(2**20))
    assert status == 413
    assert "keyhole lens" in json.loads(text)["error"]


def ends(content, query):
    os.abort()


def test_a_table_that_ends_its_process_takes_nothing_along(server, monkeypatch):
    monkeypatch.setattr(explore, "looked", ends)
    status, _, text = ask(server, "/data?name=x.csv", "POST", b"a,b\n1,2\n")
    assert status == 422
    assert "the table was not read: its process has ended" in json.loads(text)["error"]
    assert not list(server.explorer.folder.rglob("*.csv"))
    assert alive(server)


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_a_table_is_described(rng):
    """The learners of a table that is nowhere but in memory, and the answers."""
    evil = "<img src=x onerror=alert(1)>"
    rows = [f"set,{evil},</script><script>alert(2)</script>,target"]
    for name in range(48):
        keys = rng.standard_normal((3, 2))
        rows += [f"{name},{a:.4f},{b:.4f},{(keys[:, 0] ** 2).mean():.4f}" for a, b in keys]
    answer = explore.looked("\n".join(rows).encode(), {"name": "x.csv"})
    assert "default settings" in answer["html"]
    assert any(note.startswith("Does attention pay?") for note in answer["notes"])
    assert "<img" not in answer["html"]
    assert "<script" not in answer["html"]


def test_names_in_a_report_are_text():
    name = "<script>alert(1)</script>"
    chart = Chart(name, name, name, name, [Series(name, [1.0], [2.0], role=name, hover=[name])])
    section = Section(name, name, name, [chart, Table(name, name, [{name: name}])])
    assert "<script>" not in fragment(section.blocks)["html"]
    report = Report(name, name, [section])
    assert "<script>alert" not in one_page(report)


# ---- measuring -----------------------------------------------------------------------------------


def news_of(server):
    return json.loads(ask(server, "/news")[2])


def endless(self):
    time.sleep(600)


def test_a_measurement_tells_how_far_it_is_and_its_points_appear(tmp_path):
    with running(tmp_path) as server:
        query = "view=heads&d=4&n=50"
        before = json.loads(ask(server, f"/view?{query}")[2])
        assert (before["fits"], before["missing"], before["refused"]) == (24, 24, "")
        status, _, text = ask(server, f"/measure?{query}", "POST")
        assert (status, json.loads(text)["total"]) == (200, 24)
        wait_until(lambda: not news_of(server)["running"])
        assert news_of(server)["message"] == ""
        after = json.loads(ask(server, f"/view?{query}")[2])
        assert (after["missing"], after["finished"]) == (0, 24)
        assert "measured, n = 50" in json.dumps(after["charts"])
    assert len(list((tmp_path / "explore").iterdir())) == 24


def test_a_state_that_cannot_be_measured_is_refused(server):
    status, _, text = ask(server, "/measure?view=spectrum", "POST")
    assert status == 422
    assert "this cannot be measured: there is nothing to measure here" in text


def test_one_measurement_runs_at_a_time_and_stops_while_it_runs(server):
    """10,000 keys in 500 dimensions take long: the process is ended in the middle of a fit."""
    long = "/measure?view=surface&d=500&N=6&picks=4000x4096"
    assert ask(server, long, "POST")[0] == 200
    status, _, text = ask(server, "/measure?d=5", "POST")
    assert status == 422
    assert "one measurement runs at a time" in text
    time.sleep(2.0)  # the process has started to fit
    start = time.monotonic()
    status, _, text = ask(server, "/stop", "POST")
    assert time.monotonic() - start < 5
    news = json.loads(text)
    assert (status, news["running"], news["message"]) == (200, False, "stopped")
    # and another one starts
    assert ask(server, "/measure?view=heads&d=4&n=20", "POST")[0] == 200
    wait_until(lambda: not news_of(server)["running"])
    assert news_of(server)["message"] == ""


def test_stop_while_a_measurement_starts(server, monkeypatch):
    """`POST /stop` was an error 500 where the thread of the measurement had yet to start."""
    start = threading.Thread.start

    def slow_start(thread):
        if "_fit" in repr(thread._target):
            time.sleep(0.5)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    statuses = {}
    measuring = threading.Thread(
        target=lambda: statuses.update(measure=ask(server, "/measure?d=6", "POST")[0])
    )
    measuring.start()
    time.sleep(0.3)
    statuses["stop"] = ask(server, "/stop", "POST")[0]
    measuring.join()
    assert statuses == {"measure": 200, "stop": 200}
    ask(server, "/stop", "POST")
    assert not news_of(server)["running"]


def test_a_fit_that_fails_is_told_in_words(tmp_path):
    measurement = Measurement(tmp_path)
    layer = fits.MeasuredLayer("attention", "corr * token", 8, 4, None, 0.0, ridge=-1.0, noise=0.0)
    measurement.start([fits.Run(layer, (50,), 0)])
    wait_until(lambda: not measurement.news()["running"])
    assert "a fit has failed" in measurement.news()["message"]
    measurement.close()


def square(x):
    return x * x


def refuse(x):
    raise ValueError(f"not {x}")


def test_a_worker_answers_raises_and_starts_again():
    worker = Worker()
    assert worker.ask(square, 7) == 49
    with pytest.raises(ValueError, match="not 7"):
        worker.ask(refuse, 7)
    with pytest.raises(WorkerEndedError, match=r"more than 0\.1 s"):
        worker.ask(time.sleep, 60, seconds=0.1)
    assert worker.ask(square, 8) == 64
    threading.Timer(0.5, worker.stop).start()
    with pytest.raises(WorkerEndedError, match="has ended"):
        worker.ask(time.sleep, 60)
    worker.close()
    with pytest.raises(WorkerEndedError, match="the server has ended"):
        worker.ask(square, 7)


# ---- the end -------------------------------------------------------------------------------------


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


def upload_head(port, token, length):
    """The head of an upload whose body is yet to come."""
    host = f"Host: 127.0.0.1:{port}\r\n"
    return f"POST /{token}/data?name=x.csv HTTP/1.1\r\n{host}Content-Length: {length}\r\n\r\n"


def test_a_client_that_leaves_is_no_error(server, logged_errors):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(upload_head(server.port, server.token, 1000).encode() + b"a,b")
    wait_until(lambda: len(server.server.server_state.tasks) > 0)
    connection.close()
    wait_until(lambda: len(server.server.server_state.tasks) == 0)
    assert alive(server)
    assert logged_errors == []


def start(*arguments):
    command = [sys.executable, "-m", "keyhole", "explore", "--no-browser", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def press_ctrl_c(process):
    """Exit code, output and errors; a terminal sends the signal to all processes of a command."""
    os.killpg(process.pid, signal.SIGINT)
    start_of_end = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - start_of_end < 5
    return process.returncode, out, err


def test_a_port_that_is_taken_is_named(tmp_path, server):
    process = start("--port", str(server.port), "--out", str(tmp_path))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert f"port {server.port} of this machine cannot be had" in err
    assert "--port" in err


def test_the_first_line_is_the_address_and_ctrl_c_ends_what_is_computed(tmp_path):
    """A view of minutes, a measurement, and an upload that never arrives are on their way."""
    process = start("--out", str(tmp_path))
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        port, token = int(address.split("/")[2].split(":")[1]), address.split("/")[3]
        host = f"HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        slow = urlencode({"target": "rotated(0.5)^6"})
        requests = [
            f"POST /{token}/measure?view=surface&d=500&N=6&picks=4000x4096 {host}\r\n",
            f"GET /{token}/view?{slow} {host}\r\n",
            f"GET /{token}/save?{slow} {host}\r\n",
            upload_head(port, token, 9),
        ]
        connections = []
        for text in requests:
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            connections[-1].sendall(text.encode())
            time.sleep(1.0)  # all are being answered
        code, out, err = press_ctrl_c(process)
        assert (code, out) == (130, "")
        assert err.splitlines()[0] == "Open it in a browser on this machine; Ctrl-C stops."
        assert err.splitlines()[-1] == f"stopped; what was measured is in {tmp_path / 'explore'}."
        assert "Traceback" not in err
        for connection in connections:
            connection.close()
    finally:
        process.kill()


@pytest.mark.parametrize("delay", [0.1, 0.3])
def test_ctrl_c_while_the_process_of_the_theory_starts(tmp_path, delay):
    process = start("--out", str(tmp_path))
    try:
        address = process.stdout.readline().strip()
        connection = http.client.HTTPConnection(address.split("/")[2], timeout=30)
        connection.request("GET", f"/{address.split('/')[3]}/quick")
        time.sleep(delay)
        code, out, err = press_ctrl_c(process)
        assert (code, out) == (130, "")
        assert err.splitlines() == [
            "Open it in a browser on this machine; Ctrl-C stops.",
            f"stopped; what was measured is in {tmp_path / 'explore'}.",
        ]
        connection.close()
    finally:
        process.kill()
