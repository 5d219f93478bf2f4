"""What `make wheel` runs in an environment that holds the wheel and nothing else: fit, save, load,
predict, both ways.

Nothing of the source tree is imported, and the packages of `keyhole-ml[lab]` are missing.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import keyhole as kh


def keyhole(*arguments: object, fails: bool = False) -> str:
    command = [str(Path(sys.executable).with_name("keyhole")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def main() -> None:
    assert "site-packages" in kh.__file__, f"the wheel is to be tried, not {kh.__file__}"
    for missing in ("matplotlib", "plotly", "torch", "dask"):
        assert importlib.util.find_spec(missing) is None, f"{missing} came along"
    rng = np.random.default_rng(0)
    sets = [rng.standard_normal((rng.integers(2, 6), 3)) for _ in range(60)]
    y = np.array([s[:, 0].mean() for s in sets])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        X = kh.SetBatch(sets)
        model = kh.AttentionRegressor(
            random_state=0, n_heads=512, heads=kh.GaussianHeads(), scaling="none", query="given"
        ).fit(X, y)
        kh.save(model, folder / "a.keyhole")
        assert np.array_equal(kh.load(folder / "a.keyhole").predict(X), model.predict(X))
        rows = [
            "set,a,b,c,y",
            *(f"{i},{','.join(map(str, token))},{y[i]}" for i, s in enumerate(sets) for token in s),
        ]
        (folder / "data.csv").write_text("\n".join(rows) + "\n")
        print(keyhole("fit", folder / "data.csv", folder / "b.keyhole"))
        keyhole("predict", folder / "b.keyhole", folder / "data.csv", folder / "out.parquet")
        assert (folder / "out.parquet").exists()
        keyhole("theory", "--target", "corr^2 * token", "--dim", "8")
        refusal = keyhole("reproduce", "averages", "--out", folder / "figures", fails=True)
        assert "keyhole-ml[lab]" in refusal, refusal
        assert "Traceback" not in refusal, refusal
    print(f"the wheel of keyhole {kh.__version__} fits, saves and predicts on its own")


if __name__ == "__main__":
    main()
