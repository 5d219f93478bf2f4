"""The `keyhole` command. Ctrl-C ends it with one line and exit code 130, whenever it comes.

Nothing heavy is imported here before Ctrl-C is taken care of. NumPy and the rest take half a second
to load, and an interrupt that arrives meanwhile would be a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended: 128 + 2, the number of the signal."""


def _end(signum: int, frame: object) -> None:
    """End the process: there is nothing to unwind before a command starts."""
    os.write(2, b"interrupted.\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Entry point of the `keyhole` command."""
    # whoever started the process may want interrupts ignored
    listens = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if listens:
        signal.signal(signal.SIGINT, _end)
        # and may hold them back until now
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from keyhole.cli import main as run_command

    # a command is unwound, and removes what it has half written
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_command()
    except KeyboardInterrupt:  # it came between the command's own care and here
        os.write(2, b"interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    finally:
        # all is done: while Python takes itself down, an interrupt changes nothing
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
