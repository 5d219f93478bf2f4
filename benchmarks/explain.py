"""Does `keyhole explain` name the columns that are the reason?

Tables of customers and their contacts, with a planted reason for leaving that is in two columns of
the contacts, a decoy for each of the two that is correlated with it, and columns of noise. A model
with default settings is fitted to some customers. Of new ones, those who left and whom the model
was surest of are explained. The columns that are the reason should be the two of largest effect.

    python benchmarks/explain.py [--reason complaints] [--seeds 20] [--customers 1000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

import keyhole as kh
from keyhole.estimators.evidence import (
    effects_of_columns,
    evidence_of_predictions,
    table_columns,
)

N_NEW = 300
N_EXPLAINED = 10
AGREEMENT = 0.7
"""Share of the rows in which a decoy of text says the same, and the correlation of one of numbers.
"""


@dataclass(frozen=True)
class Reason:
    """Why customers leave: the texts of one column, and the risk from what two of them say."""

    texts: tuple[str, ...]
    risk_of: Callable[[np.ndarray, np.ndarray], float]


def recent_complaints(kind: np.ndarray, number: np.ndarray) -> float:
    """How many complaints there were in the last 30 of 150 days."""
    days = number
    return 2.0 * float(((kind == "complaint") & (days < 30)).sum()) - 2.5


def spent_by_web(kind: np.ndarray, number: np.ndarray) -> float:
    """The sum of the amounts of one channel, which may be refunds."""
    amounts = number / 40
    return 1.2 * float(amounts[kind == "web"].sum()) - 0.3


REASONS = {
    "complaints": Reason(
        texts=("order", "question", "return", "complaint"),
        risk_of=recent_complaints,
    ),
    "web": Reason(
        texts=("web", "app", "store", "phone"),
        risk_of=spent_by_web,
    ),
}


def churn_tables(reason: Reason, n: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Customers, with whether they left, and their contacts.

    ``kind`` and ``value`` are the reason; ``label`` agrees with ``kind`` in most rows, ``code`` is
    correlated with ``value``; ``topic``, ``hour`` and ``tenure`` are noise.
    """
    rng = np.random.default_rng([43, seed])
    is_days = "complaint" in reason.texts
    customers = []
    contacts = []
    for i in range(n):
        count = int(rng.integers(4, 25))
        kind = rng.choice(reason.texts, size=count)
        number = rng.uniform(1, 150, size=count) if is_days else 40 * rng.normal(size=count)

        # the decoys
        agrees = rng.random(count) < AGREEMENT
        label = np.where(agrees, kind, rng.choice(reason.texts, size=count))
        centred = (number - 75) / 43 if is_days else number / 40
        code = AGREEMENT * centred + np.sqrt(1 - AGREEMENT**2) * rng.normal(size=count)

        risk = reason.risk_of(kind, number)
        left = bool(rng.random() < 1 / (1 + np.exp(-risk)))
        customers.append({"customer": f"c{i}", "tenure": rng.exponential(3), "left": left})
        for k in range(count):
            contacts.append(
                {
                    "customer": f"c{i}",
                    "topic": f"topic {rng.integers(8)}",
                    "code": round(50 + 20 * float(code[k]), 2),
                    "label": label[k],
                    "value": round(float(number[k]), 1),
                    "kind": kind[k],
                    "hour": int(rng.integers(24)),
                }
            )
    return pd.DataFrame(customers), pd.DataFrame(contacts)


def explained(reason: Reason, n: int, seed: int) -> list[list[str]]:
    """The columns by the sizes of their effects, for each customer that is explained."""
    customers, contacts = churn_tables(reason, n + N_NEW, seed)
    data = kh.read_table(
        customers, tokens=contacts, set_id="customer", target="left", extras=["tenure"]
    )
    model = kh.AttentionClassifier(random_state=0).fit(data[:n].sets, data[:n].target)

    # those who left, the surest first
    new = data[n:]
    surest = np.argsort(-model.decision_function(new.sets), kind="stable")
    chosen = [i for i in surest if new.target[i]][:N_EXPLAINED]
    sets = new.sets[chosen]
    columns = table_columns(data.schema, sets)
    evidence = evidence_of_predictions(model, sets)
    [effects] = effects_of_columns(model, sets, columns, evidence)
    return [[columns[j].name for j in np.argsort(-np.abs(row))] for row in effects]


def main() -> None:
    """Print a line for each seed, and how often the reason's columns were the first two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reason", choices=sorted(REASONS), default="complaints")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--customers", type=int, default=1000, help="to fit to")
    options = parser.parse_args()
    reason = REASONS[options.reason]

    n_first = 0
    n_all = 0
    for seed in range(options.seeds):
        orders = explained(reason, options.customers, seed)
        hits = [set(order[:2]) == {"kind", "value"} for order in orders]
        n_first += hits[0]
        n_all += sum(hits)
        words = ", ".join(orders[0][:3])
        print(f"seed {seed}: {sum(hits)} of {len(hits)}; the surest: {words}", flush=True)
    print(
        f"{options.reason}, {options.customers} customers: the reason's columns are the first two "
        f"in {n_first} of {options.seeds} (the surest customer of each seed), and in {n_all} of "
        f"{options.seeds * N_EXPLAINED} (the {N_EXPLAINED} surest)"
    )


if __name__ == "__main__":
    main()
