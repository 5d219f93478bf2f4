"""The loss of the whole procedure: choices repeated on folds that had no part in them."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.choose import choose
from keyhole.folds import Folds
from keyhole.training import TrainingSet


def test_settings_are_chosen_anew_without_every_fold(rng):
    """By hand: choose and fit on the other folds, and take the squared errors of this one."""
    x = kh.SetBatch(rng.normal(size=(30, 4, 2)))
    y = np.sin(x.tokens.reshape(30, 4, 2)[:, :, 0]).mean(axis=1)
    model = kh.AttentionRegressor(16, random_state=0).fit(x, y)
    result = model.procedure_loss(n_folds=3)

    data = TrainingSet(x, y[:, None])
    errors = np.empty(30)
    for rest, held_out in Folds.of(data, 3).splits():
        fitted = choose(model.layer_spec(None), data[rest]).fit(data[rest])
        errors[held_out] = np.square(y[held_out] - fitted.predict(x[held_out])[:, 0])
    assert result.loss == pytest.approx(errors.mean())
    assert result.standard_error == pytest.approx(errors.std() / np.sqrt(30))
    assert (result.criterion, result.n_folds) == ("squared_error", 3)


def test_the_log_loss_of_noise_is_no_better_than_that_of_a_constant_guess(rng):
    """Leave-one-out of the best of many candidates may be; the procedure is judged on new samples.

    Five standard errors of slack.
    """
    x = rng.normal(size=(40, 3, 2))
    labels = np.arange(40) % 2
    model = kh.AttentionClassifier(random_state=0).fit(x, labels)
    result = model.procedure_loss(n_folds=4)
    assert result.criterion == "log_loss"
    assert result.loss > np.log(2) - 5 * result.standard_error


def test_models_without_their_samples_say_so(rng, tmp_path):
    x = rng.normal(size=(30, 3, 2))
    model = kh.AttentionRegressor(8, random_state=0).fit(x, x[:, 0, 0])
    kh.save(model, tmp_path / "lean", keep="predict")
    with pytest.raises(ValueError, match="procedure_loss repeats the fit"):
        kh.load(tmp_path / "lean").procedure_loss()
    large = rng.normal(size=(30, 5, 2))
    selected = kh.AttentionRegressor(8, keys=2, random_state=0).fit(large, large[:, 0, 0])
    with pytest.raises(ValueError, match="the 2 keys of each set"):
        selected.procedure_loss()
