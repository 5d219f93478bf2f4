"""A Dask DataFrame with one row per token: no set is cut where a partition ends."""

import gc

import numpy as np
import pytest
from paper import paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.distributed import fit_dask, predict_dask

distributed = pytest.importorskip("distributed")
frames = pytest.importorskip("dask.dataframe")
pandas = pytest.importorskip("pandas")
# what Dask and its event loops leave behind on their way out is not ours
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def threads():
    """A cluster of threads of this process."""
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
    gc.collect()


@pytest.fixture
def tokens():
    """40 sets of 2 to 4 tokens; the column of sets has a name that no default finds."""
    rng = np.random.default_rng(31)
    basket = np.repeat(np.arange(40), rng.integers(2, 5, 40))
    x = rng.normal(size=len(basket))
    return pandas.DataFrame({"basket": basket, "x": x, "target": basket % 7 / 7.0})


@pytest.fixture
def model():
    return paper_regressor(4, alpha=0.1, random_state=0)


@pytest.mark.parametrize(("column", "set_id"), [("set", None), ("basket", "basket")])
def test_sets_that_span_partitions_are_shuffled(column, set_id, threads, tokens, model):
    table = tokens.rename(columns={"basket": column})
    fit_dask(model, frames.from_pandas(table, npartitions=5), threads, set_id=set_id)
    assert model.n_samples_seen_ == 40
    whole = kh.read_table(table, set_id=column, target="target")
    expected = clone(model).fit(whole.sets, whole.target)
    np.testing.assert_allclose(model.predict(whole.sets), expected.predict(whole.sets), rtol=1e-8)


def test_tables_in_a_list_whose_sets_span_them_are_refused(threads, tokens, model):
    cut = tokens["basket"][49]
    assert tokens["basket"][50] == cut, "the set is cut"
    with pytest.raises(ValueError, match=rf"set {cut} of column 'basket' is in 2 of them \(1 such"):
        fit_dask(model, [tokens[:50], tokens[50:]], threads, set_id="basket")
    assert not hasattr(model, "layer_")


def test_predictions_of_sets_that_span_partitions_are_refused(threads, tokens, model):
    whole = kh.read_table(tokens, set_id="basket", target="target")
    model.fit(whole.sets, whole.target)
    data = frames.from_pandas(tokens, npartitions=5)
    with pytest.raises(ValueError, match=r"must be in one partition.*shuffle\(on='basket'\)"):
        list(predict_dask(model, data, threads, set_id="basket"))


def test_all_partitions_are_read_as_the_first(threads, model):
    """Two categories each, of which one is in both: alone, either would have the width 2."""
    first = pandas.DataFrame({"set": [0, 1], "colour": ["blue", "red"], "target": [0.0, 1.0]})
    second = pandas.DataFrame({"set": [2, 3], "colour": ["green", "red"], "target": [2.0, 1.0]})
    with pytest.raises(ValueError, match="green"):
        fit_dask(model, [first, second], threads)
    schema = kh.read_table(pandas.concat([first, second])).schema
    fit_dask(model, [first[:0], first, second], threads, schema=schema)
    assert (model.n_samples_seen_, model.n_features_in_) == (4, 3)


def test_tables_and_batches_are_not_mixed(threads, tokens, model):
    batch = (np.zeros((3, 2, 1)), np.zeros(3))
    with pytest.raises(ValueError, match="partition 1 is a table, and the first is none"):
        fit_dask(model, [batch, tokens], threads)
