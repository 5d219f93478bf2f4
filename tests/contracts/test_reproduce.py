"""`keyhole reproduce`: killed, resumed, shared out or run at once, it ends with the same table."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keyhole.cli._app import app
from keyhole.lab.cells import Store, export
from keyhole.lab.jobs import Plan, RunError, run_dask, run_local
from keyhole.lab.report.document import Section, Verdict
from keyhole.lab.reproduce import check_names, choose_figures

TINY = ["d=3", "N=3", "M=70", "n=256", "repetitions=3", "n_test=50", "powers=1,2"]
SMALL = [*TINY, "n=32", "M=5", "repetitions=2"]
runner = CliRunner()

SCRIPT = """
import sys
from pathlib import Path
from keyhole.lab.reproduce import choose_figures
from keyhole.lab.jobs import Plan, run_local
from keyhole.lab.cells import Store, export

if __name__ == "__main__":
    folder, seed, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    [figure] = choose_figures(["averages"], "quick", seed, settings)
    with Store(folder / "cells.sqlite") as store:
        plan = Plan.of(figure.cells(), store)
        run_local(plan, store, 2, lambda keys: None)
        export(store.get(plan.cells), folder)
"""


def cells_of(seed, settings):
    [figure] = choose_figures(["averages"], "quick", seed, settings)
    return figure.cells()


def run_here(folder, seed, settings):
    with Store(folder / "cells.sqlite") as store:
        plan = Plan.of(cells_of(seed, settings), store)
        run_local(plan, store, 1, lambda keys: None)
        export(store.get(plan.cells), folder)
    return table(folder)


def table(folder):
    return [(folder / f"cells.{kind}").read_bytes() for kind in ("csv", "parquet")]


def start(folder, seed, settings=None):
    script = folder / "run.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder), str(seed), *(settings or TINY)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def count(folder):
    with Store(folder / "cells.sqlite") as store:
        return len(store.keys()[1])


def kill_and_resume(folder, seed, kills, settings):
    """Kill the run whenever it has some more cells than before, at no moment in particular."""
    luck = random.Random(seed)
    total = len(set(cells_of(seed, settings)))
    for _ in range(kills):
        before, run = count(folder), start(folder, seed, settings)
        enough = before + luck.randint(0, max(1, total // (kills + 2)))
        while run.poll() is None and count(folder) <= enough:
            time.sleep(0.002)
        time.sleep(luck.random() * 0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
    killed_at = count(folder)
    assert start(folder, seed, settings).wait(timeout=300) == 0
    return killed_at, total


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_and_resumed_is_the_same_table(tmp_path, seed, kills):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    # more kills need more to kill: a run must not be over before the last of them
    settings = [*TINY, f"repetitions={4 * kills}"]
    killed_at, total = kill_and_resume(tmp_path / "killed", seed, kills, settings)
    assert 0 < killed_at < total
    assert table(tmp_path / "killed") == run_here(tmp_path / "whole", seed, settings)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes of Linux")
def test_workers_end_with_a_killed_parent(tmp_path, seed):
    run = start(tmp_path, seed)
    while run.poll() is None and count(tmp_path) == 0:
        time.sleep(0.01)
    workers = [
        int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ]
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers
    assert not any(alive(pid) for pid in workers)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_stops_and_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(plan, store, workers, report):
        run_local(plan, store, 1, once)

    def once(keys):
        raise KeyboardInterrupt

    monkeypatch.setattr("keyhole.lab.jobs.run_local", interrupted)
    result = invoke("averages", *settings(SMALL), "--out", tmp_path, code=130)
    words = " ".join(result.output.split())
    assert "stopped: 1 of" in words
    assert "The same command goes on from there." in words


def test_a_cluster_that_loses_a_worker_ends_with_the_same_table(tmp_path, seed):
    distributed = pytest.importorskip("distributed")
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "processes": True,
        "dashboard_address": ":0",
    }
    with distributed.LocalCluster(**options) as cluster, Store(tmp_path / "cells.sqlite") as store:
        with distributed.Client(cluster, set_as_default=False) as client:
            victims = list(client.run(os.getpid).values())[:1]
        plan = Plan.of(cells_of(seed, SMALL), store)
        assert len(plan.jobs) > 4

        def kill_one(keys):
            if victims:
                os.kill(victims.pop(), signal.SIGKILL)

        run_dask(plan, store, cluster.scheduler_address, kill_one)
        assert not victims
        export(store.get(plan.cells), tmp_path)
    assert table(tmp_path) == run_here(tmp_path / "here", seed, SMALL)


def test_no_scheduler_is_an_error_in_words(tmp_path):
    pytest.importorskip("distributed")
    with Store(tmp_path / "cells.sqlite") as store:
        plan = Plan.of(cells_of(0, SMALL), store)
        with pytest.raises(RunError, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:9'"):
            run_dask(plan, store, "tcp://127.0.0.1:9", lambda keys: None, patience=0.5)


def test_without_dask_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with Store(tmp_path / "cells.sqlite") as store:
        plan = Plan.of(cells_of(0, SMALL), store)
        with pytest.raises(RunError, match="extra `dask`"):
            run_dask(plan, store, "tcp://127.0.0.1:9", lambda keys: None)


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
def test_a_figure_is_drawn_from_results_alone(tmp_path, stand_in, name):
    overrides = [
        text for text in FIGURES[name] if name == "averages" or not text.startswith("powers")
    ]
    result = invoke(name, *settings(overrides), "--out", tmp_path, "--jobs", 1, "--json")
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["cells"] == summary["computed"] > 0
    [section] = stand_in[0].sections
    assert section.slug in summary["verdicts"]
    assert section.verdict.sentence
    assert "median deviation of prediction" in section.verdict.numbers
    assert all(block.rows for block in section.blocks)
    names = [block.name for block in section.blocks]
    assert len(names) == len(set(names))
    looks = {
        series.look
        for block in section.blocks
        if hasattr(block, "series")
        for series in block.series
    }
    assert {"points", "dashed"} <= looks
    # again: nothing to compute, and the same report
    again = json.loads(
        invoke(name, *settings(overrides), "--out", tmp_path, "--json").stdout.splitlines()[-1]
    )
    assert again["computed"] == 0
    assert stand_in[1].sections == stand_in[0].sections


def test_a_report_is_written(tmp_path):
    pytest.importorskip("keyhole.lab.report.html")
    overrides = [text for text in SMALL if not text.startswith("powers")]
    invoke("averages", *settings([*overrides, "powers=2"]), "--out", tmp_path, "--jobs", 1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Averages of token functions" in page
    assert {path.suffix for path in (tmp_path / "charts").iterdir()} == {".csv", ".png", ".svg"}


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
    assert "1 not tested" in report.lead
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
