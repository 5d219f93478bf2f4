"""The `keyhole` command. Ctrl-C ends it with one line and exit code 130, whenever it comes.

Nothing heavy is imported here before Ctrl-C is taken care of. NumPy and the rest take half a second
to load, and an interrupt that arrives meanwhile would be a traceback, or be lost in a library that
catches all errors while it loads.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended: 128 + 2, the number of the signal."""
SECONDS_BEFORE_AGAIN = 0.02


class Interrupts:
    """What Ctrl-C does: it unwinds a command that runs, and before and after it ends the process.

    During a command it is a KeyboardInterrupt, and the command removes what it has half written.
    There are two places where a KeyboardInterrupt would be lost: in the middle of an import, since
    libraries try out imports and take any error for a no; and in callbacks and destructors, of
    which Python ignores all errors. There it is tried again a moment later, until it comes through.
    """

    def __init__(self) -> None:
        self._unwinds = False
        self._outermost = sys._getframe()

    def listen(self) -> None:
        """Take care of Ctrl-C from now on, unless whoever started the process wants it ignored."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        signal.signal(signal.SIGINT, self._press)
        # Python calls what was registered first last: all other callbacks can be interrupted
        atexit.register(self._ignore)
        sys.unraisablehook = self._retry_ignored
        # whoever starts a process may hold the signal back until now
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def begin_command(self) -> None:
        """From now on an interrupt unwinds what the calling function runs."""
        self._outermost = sys._getframe(1)
        self._unwinds = True

    def end_command(self) -> None:
        """From now on there is nothing left to unwind, and an interrupt ends the process."""
        try:  # noqa: SIM105 - contextlib takes longer to load than all of this
            sys.stdout.flush()
        except (OSError, ValueError):  # whoever read the output may be gone
            pass
        self._unwinds = False

    @staticmethod
    def _ignore() -> None:
        """Let the process end with its own exit code: all that it had to do is done.

        While Python takes itself down it removes our handler, and an interrupt would kill the
        process by the signal, without a line and with exit code -2. A signal that is ignored
        stays ignored.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _press(self, signum: int, frame: object) -> None:
        if not self._unwinds:
            os.write(2, b"interrupted.\n")
            os._exit(INTERRUPTED)
        if self._is_import(frame):
            self._press_again()
            return
        raise KeyboardInterrupt

    def _is_import(self, frame: object) -> bool:
        """Whether the command is importing something, in whatever depth."""
        while frame is not None and frame is not self._outermost:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # type: ignore[attr-defined]
                return True
            frame = frame.f_back  # type: ignore[attr-defined]
        return False

    def _press_again(self) -> None:
        def wait_and_press() -> None:
            time.sleep(SECONDS_BEFORE_AGAIN)
            _thread.interrupt_main()

        _thread.start_new_thread(wait_and_press, ())

    def _retry_ignored(self, ignored: object) -> None:
        """Instead of `sys.unraisablehook`: an interrupt that Python ignored is not over."""
        if issubclass(ignored.exc_type, KeyboardInterrupt):  # type: ignore[attr-defined]
            self._press_again()
        else:
            sys.__unraisablehook__(ignored)  # type: ignore[arg-type]


def main() -> None:
    """Entry point of the `keyhole` command."""
    interrupts = Interrupts()
    interrupts.listen()
    from keyhole.cli import main as run_command

    interrupts.begin_command()
    try:
        run_command()
    except KeyboardInterrupt:  # it came between the command's own care and here
        os.write(2, b"interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    finally:
        interrupts.end_command()


if __name__ == "__main__":
    main()
