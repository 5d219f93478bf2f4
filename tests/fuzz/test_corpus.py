"""Cases that once failed are fine, and so are some hundred fresh ones. `make fuzz` runs many more."""

import subprocess
import sys
from pathlib import Path

ATTACK = Path(__file__).with_name("attack.py")
FRESH = 300


def test_corpus_and_fresh_cases_are_read_or_refused_in_words(seed, tmp_path):
    # in a process of its own: shapes are checked while testing, and a user has no such checks
    arguments = ["--corpus", "--cases", str(FRESH), "--seed", str(seed), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ATTACK), *arguments], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for path in ATTACK.with_name("corpus").glob("*.json")]
    assert 0 < sum(sizes) <= 200_000
