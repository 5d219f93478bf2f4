"""`keyhole reproduce`: every figure from its settings, killed and continued, and slips refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from keyhole.cli._app import app
from keyhole.lab.report.document import Section, Verdict
from keyhole.lab.reproduce import check_names, choose_figures

SMALL = ["d=3", "N=3", "M=5", "n=32", "repetitions=2", "n_test=50", "powers=1,2"]
LONG = ["d=3", "N=3", "M=70", "n=512", "repetitions=8", "n_test=50", "powers=1,2"]
runner = CliRunner()


def start(folder):
    """`keyhole reproduce averages`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "keyhole", "reproduce", "averages", *settings(LONG)]
    command += ["--out", str(folder), "--jobs", "2", "--json"]
    folder.mkdir(exist_ok=True)
    # a file and no pipe: workers of a killed run would hold that open
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.DEVNULL)


def finished(folder):
    """The cells that are kept, with the moment at which each was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("rows.json")}


def test_killed_at_three_moments_and_continued_is_the_same_table(tmp_path, seed):
    """What is finished is not computed again, and the table is that of a run in one go."""
    [figure] = choose_figures(["averages"], "quick", 0, LONG)
    total = len(figure.cells())
    luck = random.Random(seed)
    kept = {}
    for kill in range(3):
        run = start(tmp_path / "killed")
        enough = len(kept) + luck.randint(1, total // 6)
        while run.poll() is None and len(finished(tmp_path / "killed")) < enough:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        run.wait()
        kept = finished(tmp_path / "killed")
        assert len(kept) >= kill + 1
    assert len(kept) < total

    assert start(tmp_path / "killed").wait(timeout=300) == 0
    output = (tmp_path / "killed" / "output").read_text()
    assert json.loads(output.splitlines()[-1])["computed"] <= total - len(kept)
    after = finished(tmp_path / "killed")
    assert len(after) == total
    assert all(after[path] == moment for path, moment in kept.items())

    assert start(tmp_path / "whole").wait(timeout=300) == 0
    tables = [tmp_path / name / "tables" / "averages.csv" for name in ("killed", "whole")]
    assert tables[0].read_bytes() == tables[1].read_bytes()


def test_ctrl_c_stops_and_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("keyhole.lab.run.compute", interrupted)
    result = invoke("averages", *settings(SMALL), "--out", tmp_path, code=130)
    words = " ".join(result.output.split())
    assert "stopped: finished cells are kept in" in words
    assert "The same command goes on from there." in words


def settings(overrides):
    return [word for override in overrides for word in ("--set", override)]


def invoke(*arguments, code=0):
    result = runner.invoke(app, ["reproduce", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def stand_in(monkeypatch):
    """A writer of reports that keeps what it is given."""
    seen = []

    def write(report, folder):
        seen.append(report)
        return [folder / "report.html"]

    monkeypatch.setattr("keyhole.lab.report.html.write_report", write)
    return seen


FIGURES = {
    "averages": SMALL,
    "correlation": SMALL,
    "rotation": [*SMALL[:-4], "n=32", "M=5", "repetitions=2", "gammas=0,1", "n_sizes=2"],
    "head-count": [
        "d=3",
        "N=3",
        "heads=2,70",
        "sizes=16,32",
        "slope_heads=2,4",
        "slope_dim=2",
        "slope_samples=64",
    ],
    "complexity": [
        "dims=3",
        "keys=2",
        "n=64",
        "targets=token,query,corr,token^2,query^2",
        "n_test=50",
    ],
    "dimension": [
        "d=3",
        "N=2",
        "dims=2,3",
        "keys=1,2",
        "n=64",
        "far_dims=8",
        "far_keys=16",
        "n_test=50",
    ],
    "learner": ["d=3", "N=2", "M=5", "sizes=16,24", "repetitions=2", "n_test=50"],
    "prediction": [
        *("dims=3", "keys=2", "heads=4", "sizes=16,24", "repetitions=3,2", "n_test=50"),
        *(
            "level=0.5",
            "ratio_dim=3",
            "ratio_keys=2",
            "attention_repetitions=2",
            "mlp_repetitions=2",
            "ratio_test=50",
        ),
    ],
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_the_rows_of_its_cells(tmp_path, stand_in, name):
    overrides = [
        text for text in FIGURES[name] if name == "averages" or not text.startswith("powers")
    ]
    command = [name, *settings(overrides), "--out", tmp_path, "--jobs", 1, "--json"]
    summary = json.loads(invoke(*command).stdout.splitlines()[-1])
    assert summary["cells"] == summary["computed"] > 0
    [section] = stand_in[0].sections
    assert section.slug in summary["verdicts"]
    assert section.rule
    assert section.verdict.sentence
    assert "median deviation of prediction" in section.verdict.numbers
    assert all(block.rows for block in section.blocks)
    names = [block.name for block in section.blocks]
    assert len(names) == len(set(names))
    series = [series for block in section.blocks for series in getattr(block, "series", ())]
    looks = {curve.look for curve in series}
    assert "dashed" in looks
    assert looks & {"points", "dots"}

    # again: nothing to compute, and the same report
    again = json.loads(invoke(*command).stdout.splitlines()[-1])
    assert again["computed"] == 0
    assert str(stand_in[1].sections) == str(stand_in[0].sections)


def test_a_report_is_written(tmp_path):
    overrides = [text for text in SMALL if not text.startswith("powers")]
    invoke("averages", *settings([*overrides, "powers=2"]), "--out", tmp_path, "--jobs", 1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Averages of token functions" in page
    assert {path.suffix for path in (tmp_path / "charts").iterdir()} == {".csv", ".svg"}


def test_the_report_counts_verdicts_and_says_where_it_comes_from(tmp_path, stand_in, monkeypatch):
    real = Section(
        "transformer",
        "Heads of a transformer",
        "A claim.",
        verdict=Verdict("not tested", "No checkpoint."),
    )
    monkeypatch.setattr("keyhole.lab.reproduce.transformer_section", lambda: real)
    invoke("averages", "transformer", *settings(SMALL), "--out", tmp_path, "--jobs", 1, "--seed", 3)
    [report] = stand_in
    assert [section.slug for section in report.sections] == ["averages", "transformer"]
    assert "2 not tested" in report.lead  # with 32 sets attention does not come to 30 % error
    assert report.provenance["seed"] == "3"
    assert {"command", "NumPy", "machine", "BLAS"} <= set(report.provenance)


def test_an_unknown_preset_is_refused(tmp_path):
    assert (
        "one of quick, full"
        in invoke("averages", "--preset", "huge", "--out", tmp_path, code=2).output
    )


def test_names():
    assert check_names([])[0] == "averages"
    assert check_names(["rotation", "averages"]) == ["averages", "rotation"]
    words = " ".join(invoke("averagse", code=2).output.split())
    assert "unknown figure 'averagse'. Did you mean 'averages'?" in words
    assert "correlation, rotation, head-count" in words


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("d", "--set takes field=value, such as d=8: got 'd'"),
        ("dimm=8", "no figure asked for has a setting 'dimm'. Did you mean 'dim'?"),
        ("d=8.5", "--set d=8.5: '8.5' must be a whole number"),
        ("level=low", "'low' must be a number"),
        ("powers=1,two", "'two' must be a whole number"),
        ("seed=-1", "-1 must be from 0"),
        ("n=1", "the settings of 'averages' do not go together"),
    ],
)
def test_overrides_are_checked(tmp_path, override, message):
    result = invoke("averages", "--set", override, "--out", tmp_path, code=2)
    assert message in " ".join(result.output.split())


def test_overrides_reach_every_figure_that_has_the_field():
    figures = choose_figures(
        ["averages", "head-count", "complexity"],
        "quick",
        7,
        ["d=5", "sizes=8, 16", "targets=token"],
    )
    averages, heads, complexity = (figure.config for figure in figures)
    assert (averages.dim, heads.dim) == (5, 5)
    assert heads.sizes == (8, 16)
    assert complexity.targets == ("token",)
    assert {config.seed for config in (averages, heads, complexity)} == {7}
