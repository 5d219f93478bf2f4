"""Cases that once failed are fine, and so are some dozen fresh ones.

`make fuzz` runs many more.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ATTACK = Path(__file__).with_name("attack.py")


@pytest.mark.parametrize("n_fresh", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_corpus_and_fresh_cases_are_read_or_refused_in_words(n_fresh, seed, tmp_path):
    # in a process of its own: shapes are checked while testing, and a user has no such checks
    arguments = ["--corpus", "--cases", str(n_fresh), "--seed", str(seed), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ATTACK), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


FAULTS = """
import ctypes, json, os, sys, time
sys.path.insert(0, sys.argv[1])
import attack, formats

def words(folder, options): raise ValueError(f"a file must be another one: this is {folder.name}.")
def library(folder, options): formats.kh.notation.parse_target(None, 3)
def number(folder, options): int("x")

FAULTS = {
    "read": lambda folder, options: None,
    "signal": lambda folder, options: ctypes.string_at(0),
    "hang": lambda folder, options: time.sleep(60),
    "memory": lambda folder, options: bytearray(2**30),
    "foreign": lambda folder, options: {}["x"],
    "foreign 2": number,
    "foreign 3": library,
    "foreign 4": words,  # in words, and not in keyhole's
    "wrong": lambda folder, options: formats.check_sets(formats.kh.SetBatch._from_flat(
        formats.np.zeros((2, 1)), formats.np.array([0, 2, 2]), None)),
    "touched": lambda folder, options: (folder / "mine").write_text("x"),
    "touched 2": lambda folder, options: (folder.parent / "outside" / "precious").unlink(),
    "touched 3": lambda folder, options: os.system("true"),
    "refused": lambda folder, options: formats.kh.load(folder / "m.keyhole"),
}
for name, fault in FAULTS.items():
    formats.READERS[name] = fault
    attack.SECONDS = 0.5 if name == "hang" else 5.0
    verdict = attack.run_alone(0, formats.Case("x", name, {"m.keyhole": b"no model"}))
    if verdict.state != name.split()[0]:
        print(name, verdict)
"""


def test_the_attack_sees_what_it_looks_for():
    arguments = [sys.executable, "-c", FAULTS, str(ATTACK.parent)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


SABOTAGE = """
import sys, tempfile, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import formats, keyhole as kh, numpy as np, sequences
from cases import LateError
from samples import DifferenceError

Regressor = kh.AttentionRegressor
fit, partial_fit, predict = Regressor.fit, Regressor.partial_fit, Regressor.predict

def loses_a_sample(self, X, y, sample_weight=None):
    if len(y) != 5:
        return partial_fit(self, X, y, sample_weight=sample_weight)
    weights = None if sample_weight is None else sample_weight[:4]
    partial_fit(self, X[:4], y[:4], sample_weight=weights)
    self.n_samples_seen_ += 1
    return self

def asks_the_first_sample(self, X, y, sample_weight=None, *, groups=None):
    first = y[0] if y.ndim == 1 else y[0, 0]
    self.scaling = "sphere" if first > np.median(y) else "none"
    return fit(self, X, y, sample_weight=sample_weight, groups=groups)

def reads_parameters(self, X):
    return predict(self, X) + 0.01 * len(repr(self.get_params()))

def reads_its_batch(self, X):
    return predict(self, X) + 1e-3 * len(X)

BROKEN = {
    "stream": {"partial_fit": loses_a_sample},
    "choices": {"fit": asks_the_first_sample},
    "fitted model": {"predict": reads_parameters},
    "one by one": {"predict": reads_its_batch},
}
for kind, methods in BROKEN.items():
    for name, method in methods.items():
        setattr(Regressor, name, method)
    numbers = [i for i in range(1500) if formats.format_of(int(sys.argv[2]), i) == kind]
    for number in numbers:
        case, _ = formats.draw(int(sys.argv[2]), number)
        try:
            with tempfile.TemporaryDirectory() as folder:
                sequences.READERS[kind](Path(folder), dict(case.options))
        except DifferenceError:
            break
        except (ValueError, OverflowError, LateError):
            continue
    else:
        print("nothing found by", kind)
    Regressor.fit, Regressor.partial_fit, Regressor.predict = fit, partial_fit, predict
"""


def test_every_kind_of_sequence_finds_an_estimator_that_is_broken_for_it(seed):
    arguments = [sys.executable, "-c", SABOTAGE, str(ATTACK.parent), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for path in ATTACK.with_name("corpus").glob("*.json")]
    assert 0 < sum(sizes) <= 200_000
