"""No command prints a control character that came from a file."""

import ast
import itertools
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from typer.testing import CliRunner

import keyhole
from keyhole.cli._app import app
from keyhole.cli._output import echo_json, printable

SOURCE = Path(keyhole.__file__).parent
TITLE = "\x1b]0;owned\x07"  # sets the title of the window
RED = "\x1b[31m"
RAW = "\x9b31m"  # the same in one character, for terminals of eight bits
REVERSED = "\u202e"  # what follows is shown from right to left
FORGED = "\nwrote all of it\r"
MARKUP = "[red]x[/red]"
ATTACK = TITLE + RED + RAW + REVERSED + FORGED + "\x08\x7f"


def control_characters(text):
    """Control and formatting characters in an output, but for the ends of lines."""
    return {
        c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


def check_output(*arguments, codes=(0, 2)):
    """Run a command, and look at all it says; rich is told that it has a terminal that is wide."""
    environment = {"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert result.exit_code in codes, result.output
    assert not control_characters(result.output), repr(result.output)
    assert "wrote all of it" not in result.output.splitlines()
    return result.output


def test_printable_leaves_text_alone_and_spells_out_the_rest():
    for text in ("plain", "β = 1.5×10⁻⁵ ± 2 %", "naïve 数据 \u200c\u200d", "C:\\folder", MARKUP):
        assert printable(text) == text
    assert printable(RED + "x") == "\\x1b[31mx"
    assert printable(RAW) == "\\x9b31m"
    assert printable(REVERSED) == "\\u202e"
    assert printable("two\nlines\r\t") == "two\\nlines\\r\\t"
    assert printable("\ud800 \U000e0041") == "\\ud800 \\U000e0041"


def hostile_columns(attack, n=120):
    """One row per token: headers, ids, texts and labels that hold an attack."""
    rng = np.random.default_rng(0)
    owner = np.arange(n) // 2
    return {
        "set": [f"{attack}{i}" for i in owner],
        f"x{attack}": rng.normal(size=n),
        f"c{attack}{MARKUP}": [f"{attack}{i % 3}" for i in range(n)],
        f"id{attack}": np.arange(n),
        f"target{attack}": [f"{attack}{MARKUP}{i % 2}" for i in owner],
    }


def test_commands_that_read_tables(tmp_path, monkeypatch):
    """Headers, texts, labels, ids and names of files, in reports and in refusals."""
    monkeypatch.chdir(tmp_path)
    attack = ATTACK
    columns = hostile_columns(attack)
    name = f"t{attack}".replace("/", "")
    parquet.write_table(pa.table(columns), f"{name}.parquet")
    target = f"target{attack}"
    options = (
        "--target",
        target,
        "--n-heads",
        "4",
        "--heads",
        "zero-mean",
        "--scaling",
        "none",
    )
    said = check_output("fit", f"{name}.parquet", f"{name}.model", *options, codes=(0,))
    assert "left out: 'id" in said
    look = ("--no-report",)
    check_output("lens", f"{name}.parquet", "--target", target, *look, codes=(0,))
    check_output("predict", f"{name}.model", f"{name}.parquet", f"{name}.out.parquet", codes=(0,))
    check_output("predict", f"{name}.model", f"{name}.parquet", f"{name}.out.parquet", codes=(2,))
    check_output(
        "explain",
        f"{name}.model",
        f"{name}.parquet",
        "--set",
        columns["set"][0],
        "--out",
        f"{name}.svg",
        codes=(0,),
    )
    check_output(
        "explain",
        f"{name}.model",
        f"{name}.parquet",
        "--set",
        "none",
        codes=(2,),
    )
    # refusals that quote a name or a cell
    check_output("fit", f"{name}.parquet", "m", "--target", "none", codes=(2,))
    check_output(
        "fit", f"{name}.parquet", "m", "--target", target, "--keys", f"id{attack},none", codes=(2,)
    )
    check_output("fit", f"{name}.parquet", name, codes=(2,))
    check_output("fit", f"{name}.none", "m", codes=(2,))
    check_output("predict", f"{name}.parquet", f"{name}.parquet", "o", codes=(2,))
    other = pa.table({**columns, f"c{attack}{MARKUP}": [f"{attack}new"] * 120})
    parquet.write_table(other, f"{name}2.parquet")
    check_output("predict", f"{name}.model", f"{name}2.parquet", "o", codes=(2,))
    Path(f"{name}.csv").write_text(f'set,"x{attack}",y\n1,2,3\n1,{attack},3,4\n')
    check_output("fit", f"{name}.csv", "m", codes=(2,))
    check_output("heads", f"{name}.parquet", codes=(2,))
    check_output("reproduce", attack, codes=(2,))
    check_output("theory", "--target", attack, codes=(2,))
    # what the command line itself refuses
    check_output(f"none{attack}", codes=(2,))
    check_output("fit", f"--none{attack}", codes=(2,))
    check_output("fit", "a", "b", f"c{attack}", codes=(2,))
    check_output("lens", "a", "--seed", f"5{attack}", codes=(2,))


def test_json_keeps_what_it_escapes(capsys):
    echo_json({ATTACK: [ATTACK, "β"]})
    said = capsys.readouterr().out
    assert not control_characters(said)
    assert json.loads(said) == {ATTACK: [ATTACK, "β"]}


def test_warnings_and_tracebacks_are_escaped(tmp_path):
    """What Python itself prints of a warning, or of an error that nobody expected."""
    code = (
        "import sys, warnings, keyhole.cli.theory, keyhole.lab.theory_answers as answers\n"
        "def report(*arguments):\n"
        "    warnings.warn('odd \\x1b[31m column')\n"
        "    raise RuntimeError('broken \\x1b[31m column')\n"
        "answers.report = report\n"
        "from keyhole.__main__ import main\n"
        "sys.argv = ['keyhole', 'theory']\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "warning: odd \\x1b[31m column\n" in done.stderr
    assert done.stderr.endswith("RuntimeError: broken \\x1b[31m column\n")


PRINTING = {"echo", "secho", "print", "print_json", "log", "print_exception"}


def printing_calls(text):
    """Calls in a piece of source that print: by the name of the function or method."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    owners = [getattr(getattr(call.func, "value", None), "id", "") for call in calls]
    return [
        f"{owner}.{name}"
        for owner, name in zip(owners, named, strict=True)
        if name in PRINTING and owner
    ]


def test_only_one_module_of_the_command_line_prints():
    files = [file for file in sorted((SOURCE / "cli").glob("*.py")) if file.name != "_output.py"]
    assert len(files) > 8
    found = {file.name: printing_calls(file.read_text()) for file in files}
    assert not list(itertools.chain.from_iterable(found.values())), found
    assert printing_calls("typer.echo(text)\nconsole.print(table)") == [
        "typer.echo",
        "console.print",
    ]
