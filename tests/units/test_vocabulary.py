"""What commands say of settings: every value that an estimator takes has its words."""

import pytest
from typer.testing import CliRunner

import keyhole as kh
from keyhole import vocabulary
from keyhole.attention.activations import ACTIVATIONS
from keyhole.cli._app import app
from keyhole.cli.fit import head_distribution
from keyhole.data.tokens import POOLINGS, QUERIES, SCALINGS


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (vocabulary.ACTIVATIONS, ACTIVATIONS),
        (vocabulary.POOLINGS, POOLINGS),
        (vocabulary.SCALINGS, SCALINGS),
        (vocabulary.QUERIES, QUERIES),
    ],
)
def test_every_value_has_words_and_no_other(words, values):
    assert set(words) == set(values)


def test_every_head_distribution_of_the_command_line_has_words():
    for name in vocabulary.HEADS:
        assert hasattr(head_distribution(name), "sample")
    assert head_distribution("auto") is None


def test_help_and_fit_say_the_same_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = kh.targets.sphere_sets(40, n_keys=3, dim=2, seed=0)
    kh.data.write_parquet("t.parquet", [(sets, sets.query[:, 0])])
    options = ("--pooling", "sum", "--activation", "step", "--heads", "biased", "--alpha", "0.5")
    invoke = CliRunner().invoke
    fitted = invoke(app, ["fit", "t.parquet", "m", *options], env={"COLUMNS": "300"})
    assert fitted.exit_code == 0, fitted.output
    help_text = " ".join(invoke(app, ["fit", "--help"]).output.split())
    for words in (
        vocabulary.POOLINGS["sum"],
        vocabulary.ACTIVATIONS["step"],
        vocabulary.HEADS["biased"],
    ):
        assert words in fitted.output
        assert words in help_text
    assert "α 0.5, the larger the smoother\n" in fitted.output
