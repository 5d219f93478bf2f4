"""`keyhole explore`."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli._app import INTERRUPTED, app, check_folder
from keyhole.cli._output import echo, refuse


@app.command()
def explore(
    port: Annotated[
        int,
        typer.Option(help="Port on the loopback address; 0 means any free one.", min=0, max=65535),
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    out: Annotated[
        Path,
        typer.Option(help="Folder of measured points; the points of keyhole reproduce there show."),
    ] = Path("out/reproduce"),
) -> None:
    """Theory and experiment on one page.

    Change sizes, head distribution and target, see the predicted curves, and measure them.

    The first line of output is the address of the page. Only programs on this machine that know
    the address can open it. Measured points are kept in OUT/explore. Stop with Ctrl-C.
    """
    # refuse before any work; the server needs packages that the rest of keyhole does not
    check_folder(out)
    try:
        from keyhole.lab.explore.server import ExploreServer, PortTakenError
    except ImportError as error:
        refuse(
            f"`keyhole explore` needs {error.name or 'starlette and uvicorn'}: pip install "
            "'keyhole-ml[lab]', or in a clone pip install '.[lab]'."
        )
    try:
        server = ExploreServer(out, port)
    except PortTakenError as error:
        refuse(str(error))
    # the address is the first line of standard output, for programs that start this one
    echo(server.address)
    echo("Open it in a browser on this machine; Ctrl-C stops.", err=True)
    # opened from a thread: some browsers block until they are closed
    if browser:
        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    try:
        server.run()
    except KeyboardInterrupt:
        echo(f"stopped; what was measured is in {out / 'explore'}.", err=True)
        raise typer.Exit(INTERRUPTED) from None
