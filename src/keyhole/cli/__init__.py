"""The command line: one file per command."""

from keyhole.cli import (  # noqa: F401  (each joins the application)
    compare,
    fit,
    heads,
    lens,
    norm_ball,
    predict,
    prediction,
    reproduce,
    theory,
)
from keyhole.cli._app import app


def main() -> None:
    """Entry point of the `keyhole` command."""
    app()
