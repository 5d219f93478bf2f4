"""The command line: one file per command."""

from keyhole.cli import explain, fit, heads, lens, predict, reproduce, theory  # noqa: F401  (each joins the application)
from keyhole.cli._app import app


def main() -> None:
    """Entry point of the `keyhole` command."""
    app()
