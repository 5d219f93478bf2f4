"""The command line: one file per command."""

# each joins the application
from keyhole.cli import explain, explore, fit, heads, lens, predict, reproduce, theory  # noqa: F401
from keyhole.cli._app import app


def main() -> None:
    """Entry point of the `keyhole` command."""
    app()
