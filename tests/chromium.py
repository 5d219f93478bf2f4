"""Headless Chromium driven over its DevTools protocol with the standard library: enough to open a
page and ask it.

`chromium()` starts a browser with a fresh profile and hands out tabs. A `Page` opens a file or an
address, evaluates JavaScript, and keeps what the console, the log and the network said, so that a
test can assert that a page is drawn in silence. Where no browser is installed, `find_chromium`
gives None and these tests are skipped.
"""

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_chromium():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class WebSocket:
    """A client that sends and receives whole text messages (RFC 6455, no extensions)."""

    def __init__(self, url, timeout=60.0):
        host, _, path = url.removeprefix("ws://").partition("/")
        name, _, port = host.partition(":")
        self.socket = socket.create_connection((name, int(port)), timeout=timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET /{path} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.stream = self.socket.makefile("rb")
        status = self.stream.readline()
        assert b" 101 " in status, status
        while self.stream.readline().strip():
            pass

    def send(self, text):
        payload = text.encode()
        size = len(payload)
        if size < 126:
            length = bytes([0x80 | size])
        elif size < 2**16:
            length = bytes([0x80 | 126]) + size.to_bytes(2, "big")
        else:
            length = bytes([0x80 | 127]) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[k % 4] for k, byte in enumerate(payload))
        self.socket.sendall(b"\x81" + length + mask + masked)

    def receive(self):
        message = b""
        while True:
            first, second = self.stream.read(2)
            size = second & 0x7F
            if size > 125:
                size = int.from_bytes(self.stream.read(2 if size == 126 else 8), "big")
            payload = self.stream.read(size)
            if first & 0x0F in (0, 1, 2):
                message += payload
                if first & 0x80:
                    return message.decode()

    def close(self):
        self.stream.close()
        self.socket.close()


class Page:
    """One tab.

    `complaints` collects console errors and warnings, uncaught exceptions and the browser's own
    log.
    """

    def __init__(self, url):
        self.channel = WebSocket(url)
        self.count = 0
        self.complaints = []
        self.requests = []
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.count += 1
        self.channel.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.channel.receive())
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        kind, parameters = event.get("method"), event.get("params", {})
        if kind == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(
                [
                    argument.get("value", argument.get("description"))
                    for argument in parameters["args"]
                ]
            )
        elif kind == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif kind == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def ask(self, expression):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path, width=1280, height=900, shade="light"):
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": shade}],
        )
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def wait(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not self.ask(f"!!({condition})"):
            assert time.monotonic() < end, (
                f"not within {seconds:g} s: {condition}; {self.complaints}"
            )
            time.sleep(0.1)

    def screenshot(self, path, whole=False):
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def close(self):
        self.channel.close()


@contextlib.contextmanager
def chromium():
    """Start a browser of our own, with a fresh profile; hand out a function that opens a tab."""
    with tempfile.TemporaryDirectory(
        prefix="keyhole-chromium-", ignore_cleanup_errors=True
    ) as profile:
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pages = []
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)

            def new_page():
                with urlopen(
                    Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
                ) as answer:
                    pages.append(Page(json.load(answer)["webSocketDebuggerUrl"]))
                return pages[-1]

            yield new_page
        finally:
            for page in pages:
                page.close()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(file, process, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, f"Chromium ended with code {process.returncode}"
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return int(file.read_text().splitlines()[0])
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not open its port within {seconds:g} s")
