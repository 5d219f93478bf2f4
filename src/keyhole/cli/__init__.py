"""The command line: one file per command. `keyhole.__main__` is where the process starts."""

import warnings

# each joins the application
from keyhole.cli import (  # noqa: F401
    explain,
    explore,
    export,
    fit,
    heads,
    lens,
    predict,
    reproduce,
    theory,
)
from keyhole.cli._app import app
from keyhole.cli._output import show_traceback, show_warning


def main() -> None:
    """Run the command that the arguments of the process name, and end the process."""
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            app()
        except Exception as error:
            show_traceback(error)
            raise SystemExit(1) from None
