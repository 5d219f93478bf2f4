"""`keyhole export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli._app import app, check_output
from keyhole.cli._output import echo, refuse


@app.command(short_help="Write a model as an ONNX graph.")
def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model written by kh.save or keyhole fit.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: NAME.onnx.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Write a model as an ONNX graph, for services that have neither Python nor keyhole.

    Its inputs are padded sets: keys (n, N, d), mask (n, N), true where a key is there, and query
    and extras if the model was fitted to them. Its outputs are predictions; of a classifier
    scores and probabilities, with the labels in the metadata of the graph.
    """
    check_output(out, [model])
    from keyhole.export import OPSET, save_onnx, sizes_of_inputs
    from keyhole.state import read_model

    saved = read_model(model)
    try:
        document = save_onnx(saved.estimator, out, overwrite=overwrite)
    except (TypeError, FileExistsError) as error:
        refuse(str(error).replace("overwrite=True", "--overwrite"))

    # what was written, and which number stands where
    echo(f"wrote {out}: ONNX, opset {OPSET}")
    schema = saved.schema
    names_of_inputs = {
        "keys": schema.names,
        "query": schema.names_of("query"),
        "extras": schema.names_of("extras"),
    }
    for input_name, sizes in sizes_of_inputs(document).items():
        line = f"{input_name} ({', '.join(sizes)})"
        names = names_of_inputs.get(input_name)
        if names:
            line = f"{line}: {', '.join(names)}"
        echo(line)
