"""The command line: exit codes, files, JSON with stable keys, and errors a reader can act on."""

import csv
import json

import pytest
from typer.testing import CliRunner

import keyhole
from keyhole.cli._app import app

runner = CliRunner()


def invoke(*arguments, code=0):
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    # a refusal is a message, not a traceback
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_version():
    assert invoke("--version").output.strip() == f"keyhole {keyhole.__version__}"


def test_help_explains_the_notation():
    text = " ".join(invoke("theory", "--help").output.split())
    for words in (
        "corr = <x_0, x_i>",
        "token = <β, x_i>",
        "query = <β, x_0>",
        "rotated(gamma)",
        "corr^3 * token",
    ):
        assert words in text


def report(*arguments):
    return json.loads(invoke("theory", "--json", *arguments).stdout)


EIGHT = ("--dim", 8, "--keys", 8, "--samples", "100,1000")


def test_json_has_stable_keys():
    answer = report(
        "--target",
        "corr^3 * token",
        "--dim",
        8,
        "--keys",
        8,
        "--n-heads",
        100,
        "--samples",
        "100,1000",
    )
    assert list(answer) == [
        "target",
        "settings",
        "coefficient_norms",
        "complexity",
        "spectrum",
        "learning_curve",
        "risk_bound",
        "needed",
        "unavailable",
    ]
    assert list(answer["target"]) == ["notation", "expanded", "squared_mean", "variance"]
    assert list(answer["complexity"]) == [
        "paper_complexity",
        "rkhs_norm_bound",
        "rkhs_norm",
        "biased_norm_bound",
        "mlp_norm",
    ]
    assert [row["n"] for row in answer["learning_curve"]["attention"]] == [100, 1000]
    assert list(answer["risk_bound"][0]) == [
        "kind",
        "n",
        "approximation",
        "estimation",
        "total",
        "constant",
        "statement",
    ]
    assert list(answer["needed"]) == [
        "error",
        "samples",
        "mlp_to_attention",
        "heads_bound",
        "heads_predicted",
    ]


def test_json_says_what_the_functions_say():
    from keyhole import theory
    from keyhole.theory.targets import TokenPower

    answer = report(
        "--target", "token^2", "--dim", 8, "--keys", 8, "--samples", "1e2,1000", "--error", "1e-4"
    )
    target = TokenPower(2, 8)
    assert answer["complexity"]["rkhs_norm"] == theory.rkhs_norm(target)
    assert answer["complexity"]["paper_complexity"] == theory.paper_complexity(target)
    assert answer["coefficient_norms"] == [
        {"query_degree": 0, "key_degree": 2, "squared_norm": 1.0}
    ]
    curve = theory.learning_curve(target, [100, 1000], 8, 1e-5, model="mlp")
    assert [row["error"] for row in answer["learning_curve"]["mlp"]] == curve.tolist()
    assert answer["needed"]["samples"] == {"attention": 430, "mlp": 5322}
    assert answer["needed"]["heads_bound"] == theory.heads_needed(target, 1e-4)
    level = answer["spectrum"]["attention"]["levels"][0]
    assert level["degrees"] == [0, 0]
    assert level["target_power"] == pytest.approx(1 / 64)
    assert answer["settings"]["n_heads"] == "inf"
    # the paper's bound is infinite without a number of heads: the reason is given, not a number
    assert {row["kind"] for row in answer["risk_bound"]} == {"kernel"}
    assert "finitely many heads" in answer["unavailable"]["risk_bound.paper"]


def test_a_bias_is_asked_of_the_same_functions():
    import keyhole as kh
    from keyhole import theory
    from keyhole.theory.targets import Correlation

    sizes = ("--dim", 8, "--keys", 8, "--samples", "100,1000")
    answer = report("--target", "corr^2 * token", *sizes, "--bias", 1.0)
    plain = report("--target", "corr^2 * token", *sizes)
    target, distribution = Correlation(2, 8), kh.GaussianHeads(mean=1.0)
    curve = theory.learning_curve(target, [100, 1000], 8, 1e-5, heads=distribution)
    shown = [
        row["error"] for row in answer["learning_curve"]["attention"]
    ]  # size by size, where `curve` is one call
    assert shown == pytest.approx(curve, rel=1e-12)
    assert answer["learning_curve"]["mlp"] == plain["learning_curve"]["mlp"]
    assert answer["needed"]["samples"]["attention"] < plain["needed"]["samples"]["attention"]
    levels = answer["spectrum"]["attention"]["levels"]
    spectrum = theory.attention_spectrum(8, 8, 4, heads=distribution)
    assert [level["eigenvalue"] for level in levels] == pytest.approx(
        spectrum.eigenvalues[:8], rel=1e-6
    )
    assert levels[1]["degrees"] == [1, 0]
    assert levels[1]["target_power"] > 0 == levels[0]["target_power"]
    refused = invoke("theory", "--bias", "nan", code=2)
    assert "mean" in refused.output


def test_tables_name_every_part():
    output = invoke(
        "theory", "--target", "corr * token", "--dim", 4, "--keys", 4, "--n-heads", 50
    ).output
    for words in (
        "coefficient norms",
        "paper's B(f*)",
        "named constants",
        "exact, sphere distribution",
        "biased heads",
        "spectrum of attention",
        "spectrum of mlp",
        "predicted test error",
        "excess risk is at most",
        "constant",
        "samples, attention",
        "heads, paper's bound",
    ):
        assert words in output


@pytest.mark.parametrize(
    "target", ["0", "1", "query^40", "token^3 - token", "rotated(0.5)^3 * token"]
)
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_degenerate_targets_answer_or_say_why(target, dim):
    answer = report(
        "--target",
        target,
        "--dim",
        dim,
        "--keys",
        1,
        "--n-heads",
        3,
        "--ridge",
        0,
        "--samples",
        "1,50",
    )
    assert all(len(reason) > 10 for reason in answer["unavailable"].values())


def test_theory_takes_an_activation_no_query_and_an_intercept():
    from keyhole import theory
    from keyhole.theory.targets import TokenPower

    target = TokenPower(2, 8)
    options = ("--activation", "exp", "--no-query", "--intercept", "--model", "attention")
    answer = report("--target", "token^2", "--dim", 8, "--keys", 8, "--samples", 100, *options)
    curve = theory.learning_curve(
        target, 100, 8, 1e-5, activation="exp", query=False, fit_intercept=True
    )
    assert answer["learning_curve"]["attention"][0]["error"] == float(curve)
    assert answer["settings"]["activation"] == "exp"
    assert "ReLU heads" in answer["unavailable"]["rkhs_norm"]
    refused = invoke("theory", "--activation", "sigmoid", code=2)
    assert "`activation` must be one of" in " ".join(refused.output.split())


def test_theory_says_which_activation_for_which_target():
    """Linear heads contain corr * token; only square heads have degree 2 in the query."""
    options = ("--dim", 8, "--keys", 8, "--samples", 1000, "--bias", 1)
    rows = report("--activations", "--target", "corr * token; query^2", *options)
    assert [(row["target"], row["c"]) for row in rows] == [
        ("corr * token", 0.0),
        ("corr * token", 1.0),
        ("query^2", 0.0),
        ("query^2", 1.0),
    ]
    assert [row["best"] for row in rows] == ["linear", "linear", "square", "square"]
    assert rows[2]["linear"] > 1.0
    printed = invoke("theory", "--activations", "--target", "corr * token; query^2", *options)
    assert "at n = 1,000" in printed.output


def test_a_target_that_cannot_be_read_is_pointed_at():
    """The lines of the message stay lines, so that the caret stands below the character."""
    text = invoke("theory", "--target", "corr/0", code=2).output
    assert "\n    corr/0\n         ^\n" in text


def test_theory_draws(tmp_path):
    invoke(
        "theory",
        "--target",
        "token",
        "--dim",
        4,
        "--samples",
        "10,100",
        "--model",
        "attention",
        "--out",
        tmp_path,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"theory.csv", "theory.svg"}
    with (tmp_path / "theory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"attention"}
    assert (rows[0]["n"], rows[-1]["n"]) == ("10", "100")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--target", "corr^3 * tokn"),
            ("character 10", "Did you mean 'token'?", "corr, token, query"),
        ),
        (("--n-heads", "many"), ("--n-heads", "'many'")),
        (("--n-heads", "0"), ("--n-heads", "'0'")),
        (("--samples", "10,,20"), ("--samples", "'10,,20'")),
        (("--samples", "0"), ("--samples", "at least 1")),
        (("--samples", "inf"), ("--samples",)),
        (("--model", "cnn"), ("attention, mlp, both", "'cnn'")),
        (("--error", "-1"), ("--error", "-1")),
        (("--dim", "0"), ("--dim",)),
        (("--ridge", "-1"), ("--ridge",)),
    ],
)
def test_slips_are_refused_with_their_name(arguments, words):
    output = invoke("theory", *arguments, code=2).stderr
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    "command",
    [
        ("reproduce",),
        ("lens", "digits"),
        ("theory", "--out", "x"),
        ("heads", "x.safetensors", "--out", "x"),
    ],
)
def test_without_the_packages_that_draw_the_extra_is_named(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "keyhole.lab.report.html.find_spec", lambda name: None if name == "plotly" else object()
    )
    assert "pip install 'keyhole-ml[lab]'" in invoke(*command, code=2).stderr
    assert not list(tmp_path.iterdir())


WRITERS = [
    ("lens", "digits"), ("heads", "nowhere"), ("reproduce", "averages"), ("theory",),
]  # fmt: skip


@pytest.mark.parametrize("command", WRITERS, ids=lambda c: c[0])
def test_out_is_refused_before_any_work(command, tmp_path, monkeypatch):
    """A file in its place, below a file, or a folder that cannot be written: a sentence at once."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        said = invoke(*command, "--out", out, code=2).stderr
        assert "--out must be a folder" in said
        assert "is a file" in said
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "can be written" in invoke(*command, "--out", tmp_path / "new", code=2).stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", WRITERS[:3], ids=lambda c: c[0])
def test_a_foreign_report_is_not_replaced_unless_asked(command, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    assert "add --overwrite" in invoke(*command, "--out", tmp_path, code=2).stderr
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_and_a_long_name_end_in_a_sentence(tmp_path, monkeypatch):
    long = "x" * 5000
    for command in (
        ("lens", f"{long}.csv"),
        ("heads", long),
        ("fit", f"{long}.csv", "m"),
        ("theory", "--out", long),
    ):
        assert "error: " in invoke(*command, code=2).stderr

    def full(*_, **__):
        raise OSError(28, "No space left on device", "theory.csv")

    monkeypatch.setattr("keyhole.lab.report.html.write_chart", full)
    said = invoke("theory", "--out", tmp_path, code=2).stderr
    assert "'theory.csv': No space left on device. Check the name, that the disk has room" in said


@pytest.mark.parametrize("ending", ["parquet", "csv", "npz", "arrow"])
@pytest.mark.parametrize("command", ["fit", "predict", "lens"])
def test_a_missing_file_is_named_with_the_advice_that_fits(command, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {
        "fit": ("fit", f"absent.{ending}", "model"),
        "predict": ("predict", "absent.keyhole", f"absent.{ending}", "out.csv"),
        "lens": ("lens", f"absent.{ending}"),
    }
    message = " ".join(invoke(*arguments[command], code=2).stderr.split())
    assert "absent." in message
    assert ".." not in message
    assert "disk has room" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            FileNotFoundError("'cells.csv' is not there: no such file. Check the name."),
            "error: 'cells.csv' is not there: no such file. Check the name.",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "cells.csv"),
            "'cells.csv': No such file or directory. Check the name and the folder.",
        ),
        (
            OSError(28, "No space left on device", "cells.csv"),
            "'cells.csv': No space left on device. Check the name, that the disk has room",
        ),
    ],
    ids=["a sentence of keyhole", "a missing file", "a full disk"],
)
def test_an_error_of_a_file_ends_in_the_advice_that_fits(error, message, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("keyhole.lab.report.html.write_chart", fail)
    said = invoke("theory", "--out", tmp_path, code=2).stderr
    assert message in said
    assert ".." not in said
    assert ("disk has room" in said) == (error.errno == 28)


def test_a_name_that_is_no_utf_8_is_named(tmp_path):
    for command in (
        ("lens", "\udcff.csv"),
        ("heads", "\udcff"),
        ("theory", "--out", f"{tmp_path}/\udcff"),
    ):
        assert "names must be text in UTF-8" in invoke(*command, code=2).stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dim=0", "0 must be from 1 to 4096"),
        ("d=99999", "99999 must be from 1 to 4096"),
        ("sizes=", "at least one value"),
        ("sizes=64,0", "0 must be from 1 to 1e+07"),
        ("seed=-1", "-1 must be from 0"),
        ("repetitions=0", "0 must be from 1"),
        ("noise=nan", "nan must be from 0"),
        ("outliers=2", "from 0 to 1"),
        ("targets=tokn", "unknown name 'tokn'"),
    ],
)
def test_settings_are_checked_before_any_work(override, words, tmp_path):
    assert (
        words in invoke("reproduce", "learner", "--set", override, "--out", tmp_path, code=2).stderr
    )
    assert not list(tmp_path.iterdir())


def test_the_answer_comes_first_in_three_sentences():
    """The numbers of the sentences are those of the functions."""
    from keyhole import theory
    from keyhole.theory.targets import TokenPower

    target, tenth = (
        TokenPower(2, 8),
        0.1 * report("--target", "token^2", *EIGHT)["target"]["variance"],
    )
    samples, mlp = (
        theory.samples_needed(target, 8, tenth, model=model) for model in ("attention", "mlp")
    )
    heads = theory.heads_predicted(target, 8, tenth)
    left = [theory.best_ridge_curve(target, n, 8).error / tenth * 10 for n in (100, 1000)]
    lines = invoke("theory", "--target", "token^2", *EIGHT).stdout.splitlines()
    assert lines[0] == (
        f"To come down to 10 % of Var f* in test error, one attention layer of infinitely many "
        f"heads needs {samples} samples and an MLP on the flattened keys needs "
        f"{round(mlp, -1):,} samples, {mlp / samples:.0f} times as many."
    )
    assert lines[1].startswith(
        f"Of Var f*, with the best penalty, attention leaves {left[0]:.0f} % at n = 100, "
        f"{left[1]:.2g} % at n = 1,000; the MLP leaves "
    )
    assert lines[2] == (
        f"About {heads} random heads are enough for 10 % of Var f* if there are samples in plenty; "
        "fewer cannot come as low."
    )
    assert lines[3] == ""


def test_a_target_without_variance_is_said_to_be_constant():
    assert invoke("theory", "--target", "1").stdout.startswith("1 is constant or too large")


def test_a_target_out_of_reach_is_refused_and_what_takes_long_is_left_out(monkeypatch):
    monkeypatch.setattr("keyhole.lab.theory_answers.QUESTION_SECONDS", 0.5)
    target = ("--target", "(corr + token + query + 1)^12", "--dim", 64)
    said = " ".join(invoke("theory", *target, code=2).stderr.split())
    assert "the harmonic parts of the target are out of reach: it takes more than 0.5 s" in said
    target = ("--target", "rotated(0.5)^6", "--dim", 8, "--samples", 100, "--bias", 1)
    answer = report(*target)
    assert "it takes more than 0.5 s" in answer["unavailable"]["learning_curve.attention.100"]
    assert answer["learning_curve"]["attention"][0]["error"] is None
    assert answer["learning_curve"]["mlp"][0]["error"] > 0
