"""Connections to the server of `keyhole explore`: each may wait, send and read for so long only.

uvicorn gives a client all the time it wants to send the head of a request, and counts connections
against a limit beyond which everybody is refused. Clients that send half a request then lock the
page out. Here a connection that is not being answered is closed after a while whatever it sends,
and when there are too many of them the one that has waited longest gives way to the newest.

On the loopback address clients cannot be told apart by where they come from. They can be told apart
by the token: connections that have never shown it give way first.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WAITING_SECONDS = 10.0
"""From the opening of a connection, or from its last answer, to the end of the head of its next
request.
"""

READING_SECONDS = 30.0
"""That a client may take to read what was sent to it, once that no longer fits into the buffers."""

MOST_CONNECTIONS = 192
"""At a time; a browser opens six."""

ADMITTED = "admitted"
"""Set in the state of a request that knows the token."""


class _Clock:
    """Ends a connection when it runs out.

    ``started`` is when it was last started, by the clock of the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.started = 0.0
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Start it, from the beginning if it runs."""
        self.stop()
        self.started = self._loop.time()
        # aborted, not closed: a connection that is closed stays until its client has read
        # everything
        self._timer = self._loop.call_later(seconds, self._transport.abort)

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self._timer is not None:
            self._timer.cancel()


class Connection(H11Protocol):
    """One connection with its clocks.

    uvicorn calls its methods: when the connection opens and ends, when bytes were read, when an
    answer is complete, and when the buffers of what is sent are full and have room again.
    """

    _waiting: _Clock  # for the head of the next request
    _reading: _Clock  # for the client to read what was sent
    _is_admitted = False  # whether any of its requests knew the token

    @property
    def is_answered(self) -> bool:
        """Whether a request was read, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, and make room."""
        super().connection_made(transport)
        self._waiting = _Clock(self.loop, transport)
        self._reading = _Clock(self.loop, transport)
        self._waiting.start(WAITING_SECONDS)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        super().connection_lost(exc)
        self._waiting.stop()
        self._reading.stop()

    def handle_events(self) -> None:
        """A request that was read to the end of its head need not be waited for."""
        super().handle_events()
        if self.is_answered:
            self._waiting.stop()

    def on_response_complete(self) -> None:
        """Wait for the next request; what the last one has still to send does not count."""
        state: dict[str, Any] = self.scope.get("state", {})
        self._is_admitted = self._is_admitted or ADMITTED in state
        self._waiting.start(WAITING_SECONDS)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._reading.start(READING_SECONDS)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._reading.stop()

    def _make_room(self) -> None:
        """Where there are too many connections, end the one that has waited longest.

        Those that never knew the token give way first, and those that are being answered never.
        The newest, this one, is among those that wait.
        """
        # connections that are open
        connections = []
        for connection in self.connections:
            if isinstance(connection, Connection) and not connection.transport.is_closing():
                connections.append(connection)
        if len(connections) <= MOST_CONNECTIONS:
            return

        # the first to give way among those that wait
        waiting = [connection for connection in connections if not connection.is_answered]
        first = min(
            waiting, key=lambda connection: (connection._is_admitted, connection._waiting.started)
        )
        first.transport.abort()
