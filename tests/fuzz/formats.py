"""What is attacked: for each format a valid file, ways to damage it, and the reader that has to
cope.

A format is three functions. ``base`` draws a valid thing, ``mutate`` damages it once, ``finish``
makes files of it and, where a digest or a checksum would stop every change at the door, makes that
good again. A reader opens the files as a user would, and asserts that what was read hangs together.
Sequences of calls are drawn in the same way (`sequences`).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import shutil
import sqlite3
import struct
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import mutate
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import sequences
import typer
from cases import Case, Format, after_reading

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.datasets import load_babi, load_bags, load_molecules, load_uea
from keyhole.data.reader import ParquetSets, read_table
from keyhole.data.sets import SetGroups
from keyhole.lab.cells import Store, export
from keyhole.lab.reproduce import check_names, choose_figures
from keyhole.models import read_model
from keyhole.packing import VERSION
from keyhole.theory.notation import parse_target

DIM = 2
MODERATE = 1e100
"""Numbers of a model beyond this may overflow in predictions, and say so by infinities."""


# ---------------------------------------------------------------- models


def sets_like(dim: int, query: bool, n: int = 5) -> kh.SetBatch:
    rng = np.random.default_rng(n)
    keys = [rng.normal(size=(1 + i % 3, dim)) for i in range(n)]
    return kh.SetBatch(keys, rng.normal(size=(n, dim)) if query else None)


@cache
def models() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Small models of every kind, as document and arrays."""
    sets, plain = sets_like(DIM, True, 8), sets_like(DIM, False, 8)
    groups = SetGroups(sets, np.array([2, 1, 3, 2]))
    wide = kh.SetBatch(
        [one.tokens for one in sets], np.ones((8, 3)) * np.arange(8.0)[:, None], np.eye(8)[:, :2]
    )
    y, two = sets.query[:, 0], np.stack([sets.query[:, 0], sets.query[:, 1]], axis=1)
    words, signs = np.array(["no", "yes", "häh", "no"] * 2), y > 0
    heads = {"n_heads": 3, "random_state": 1}
    kernel = {"n_heads": math.inf}
    distribution = kh.GaussianHeads(mean=np.arange(9.0).reshape(3, 3) / 8)
    fitted = [
        kh.AttentionRegressor(**heads).fit(sets, y),
        kh.AttentionRegressor(**heads, heads=distribution, scaling="standard").fit(sets, two),
        kh.AttentionRegressor(**heads, heads=kh.QueryKeyHeads(rank=2), dtype="float32").fit(
            plain, y
        ),
        kh.AttentionRegressor(**kernel, heads=kh.IdentityHeads(n_heads=4)).fit(sets, y),
        kh.AttentionRegressor(**kernel, heads=distribution, query="mean", scaling="sphere").fit(
            plain, two
        ),
        kh.AttentionRegressor(**kernel, pooling="sum").fit(groups, y[:4]),
        kh.AttentionRegressor(**heads, query="each").fit(plain, y),
        kh.AttentionClassifier(**heads, heads=kh.LearnedHeads(n_means=2, max_iter=2, hops=1)).fit(
            sets, words
        ),
        kh.AttentionClassifier(**kernel).fit(sets, signs),
        kh.AttentionRegressor(**heads).partial_fit(sets, two),
        kh.AttentionClassifier(**heads).partial_fit(plain, words, classes=np.unique(words)),
        kh.AttentionFeatures(**heads).fit(sets),
        kh.NormBallRegressor(**heads).fit(sets, y),
        kh.NormBallClassifier(**heads).fit(plain, words),
        # queries of another dimension, and columns of the samples themselves
        kh.AttentionRegressor(
            **heads, scaling="standard", heads=kh.GaussianHeads(1.0, pairs=[(2, 1)])
        ).fit(wide, y),
        kh.AttentionRegressor(**kernel, heads=kh.IdentityHeads(n_heads=4)).fit(wide, two),
        kh.AttentionClassifier(**heads).partial_fit(wide, words, classes=np.unique(words)),
        kh.NormBallRegressor(**heads).fit(wide, y),
        # what was chosen, and by which losses
        kh.AttentionClassifier(random_state=1, extras_scale=2.0).fit(wide, words),
        kh.NormBallClassifier(**heads, scaling="standard", query="mean").fit(plain, signs),
        kh.AttentionFeatures(**heads, scaling="standard", query="each").fit(plain),
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i, model in enumerate(fitted):
            kh.save(model, Path(folder, str(i)))
            found.append(taken_apart(Path(folder, str(i)).read_bytes()))
    return [*found, taken_apart(ready_model(coded=True))]


def taken_apart(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document and the arrays of a model file; arrays as [dtype, shape, bytes]."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    document = json.loads(header.pop("__metadata__")["document"])
    arrays = {
        name: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]]
        for name, entry in header.items()
    }
    return document, arrays


def safetensors(arrays: dict[str, Any], metadata: dict[str, str] | None) -> dict[str, Any]:
    """A header and data that fit each other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in arrays.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return {"header": header, "data": data}


def container(parts: dict[str, Any]) -> bytes:
    text = mutate.text_of(parts["header"]).encode("utf-8", "surrogatepass")
    return parts.get("length", len(text)).to_bytes(8, "little") + text + parts["data"]


def digest(text: str, header: dict[str, Any], data: bytes) -> str:
    """The digest of a model file, as `kh.save` writes it; of whatever is there if the header
    lies.
    """
    found = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(n for n in header if n != "__metadata__"):
        entry = header[name] if isinstance(header[name], dict) else {}
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        with contextlib.suppress(TypeError, ValueError, IndexError, KeyError):
            content = data[offsets[0] : offsets[1]]
            line = f"\n{name!r} {entry.get('dtype')} {tuple(shape)} {len(content)}\n"
            found.update(line.encode("utf-8", "surrogatepass"))
            found.update(content)
    return found.hexdigest()


def model_base(rng: Random) -> dict[str, Any]:
    document, arrays = rng.choice(models())
    return {"document": document, "arrays": arrays, "lies": [], "raw": 0}


def model_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    kind = rng.random()
    if kind < 0.1:
        state["document"] = newer_changed(rng, state["document"])
    elif kind < 0.6:
        state["document"] = mutate.twist(rng, state["document"])
    elif kind < 0.85:
        state["arrays"] = array_changed(rng, state["arrays"])
    elif kind < 0.95:
        state["lies"] = [*state["lies"], rng.getrandbits(30)]
    else:
        state["raw"] += 1
    return state


NEWER = (
    "n_heads_",
    "n_extras_in_",
    "n_query_features_in_",
    "tokens_",
    "selection_",
    "candidates_",
    "jackknife_errors_",
    "criterion",
    "extras_scale",
    "scaling",
    "query",
    "extras_values",
    "extras_centre",
    "extras_spread",
    "query_centre",
    "query_dim",
    "codings",
    "pairs",
)
"""Fields that files of before did not have: left out they are read or refused, like any wrong value
in their place.
"""


def newer_changed(rng: Random, document: Any) -> Any:
    """One of the newer fields, wherever it is, left out or of another value."""
    name, value = (
        rng.choice(NEWER),
        rng.choice((*mutate.NUMBERS, None, "auto", "loo", {"array": "0", "turned": False})),
    )
    leave_out = rng.random() < 0.5

    def changed(part: Any) -> Any:
        if isinstance(part, list):
            return [changed(one) for one in part]
        if not isinstance(part, dict):
            return part
        kept = {key: changed(one) for key, one in part.items() if key != name or not leave_out}
        return kept | {name: value} if name in kept else kept

    return changed(document)


def array_changed(rng: Random, arrays: dict[str, Any]) -> dict[str, Any]:
    """One array of another type, shape or content, its size still as it says."""
    if not arrays:
        return arrays
    arrays = {k: list(v) for k, v in arrays.items()}
    name = rng.choice(list(arrays))
    dtype, shape, content = arrays[name]
    match rng.randrange(6):
        case 0:
            arrays[name][2] = content = mutate.damage(rng, content)[: len(content)].ljust(
                len(content), b"\0"
            )
        case 1:
            size = len(content)
            arrays[name][1] = rng.choice(
                ([size // 8], [1, size // 8], [size // 8, 1], [0, *shape], [*shape, 1], [1] * 9, [])
            )
        case 2:
            arrays[name][0] = rng.choice(("F64", "F32", "F16", "I64", "U8", "BOOL", "BF16", "U64"))
        case 3:
            arrays[name] = list(rng.choice(list(arrays.values())))
        case 4:
            arrays[mutate.word(rng)] = arrays.pop(name)
        case _:
            at = 8 * rng.randrange(max(1, len(content) // 8))
            number = struct.pack("<d", float(rng.choice(mutate.NUMBERS)))
            arrays[name][2] = (content[:at] + number + content[at + 8 :])[: len(content)]
    dtype, shape, content = arrays.get(name, ("U8", [0], b""))
    width = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)
    if name in arrays and rng.random() < 0.8:  # as many bytes as the shape says
        size = math.prod(shape) * width
        arrays[name][2] = content[:size].ljust(size, b"\0")
    return arrays


def model_finish(rng: Random, state: dict[str, Any]) -> Case:
    text = mutate.text_of(state["document"])
    parts = safetensors(state["arrays"], None)
    metadata = {"format": "keyhole-model", "version": str(VERSION), "document": text}
    for seed in state["lies"]:
        parts["header"] = mutate.twist(Random(seed), parts["header"])
    if isinstance(parts["header"], dict):
        metadata["sha256"] = digest(text, parts["header"], parts["data"])
        parts["header"] = {**parts["header"], "__metadata__": metadata}
    content = container(parts)
    for _ in range(state["raw"]):
        content = mutate.damage(rng, content)
    return Case("model", "load", {"m.keyhole": content})


def read_load(folder: Path, options: dict[str, Any]) -> None:
    path = folder / "m.keyhole"
    loaded = kh.load(path)
    schema = read_model(path).schema
    if schema.codings:
        with contextlib.suppress(ValueError, TypeError):  # a schema of other columns says so
            check_dataset(schema.read(shop()))
    widths = (loaded.n_features_in_, loaded.n_query_features_in_, loaded.n_extras_in_)
    if widths[0] < 1 or max(widths) > 64 or not moderate(path.read_bytes()):
        return
    sets = sets_like(widths[0], loaded.has_query_)
    own = np.ones((len(sets), widths[2])) if widths[2] else None
    if loaded.has_query_:
        sets = sets.with_query(np.ones((len(sets), widths[1])))
    methods = [
        m
        for m in ("predict", "predict_proba", "decision_function", "transform")
        if hasattr(loaded, m)
    ]
    if "transform" in methods and loaded.drawn_heads_.n_heads > 10_000:
        return
    with after_reading():
        for method in methods:
            try:
                made = np.asarray(getattr(loaded, method)(sets.with_extras(own)))
            except ValueError:  # fitted to samples of several sets?
                groups = SetGroups(sets, np.array([2, 1, 2]), None if own is None else own[:3])
                made = np.asarray(getattr(loaded, method)(groups))
            assert len(made) in (len(sets), 3), f"{len(made)} predictions of {len(sets)} sets"
            assert made.dtype.kind != "f" or np.isfinite(made).all(), (
                f"{method} gives {made.ravel()[:5]}"
            )


def moderate(content: bytes) -> bool:
    """Whether all numbers in a model file are of a size with which one can calculate."""
    document, arrays = taken_apart(content)

    def numbers(value: Any) -> Any:
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from numbers(item)
        elif isinstance(value, (int, float)):
            yield value
        elif isinstance(value, str) and value[:12].strip("-").isdecimal():
            yield math.inf

    wide = [a[2] for a in arrays.values() if a[0] == "F64"]
    narrow = [a[2] for a in arrays.values() if a[0] in ("F32", "F16")]
    flat = [np.frombuffer(c[: len(c) // 8 * 8], "<f8") for c in wide]
    flat += [1e70 * np.frombuffer(c[: len(c) // 4 * 4], "<f4").astype(float) for c in narrow]
    return all(np.abs(a[np.isfinite(a)]).max(initial=0) < MODERATE for a in flat) and all(
        abs(x) < MODERATE for x in numbers(document) if x == x
    )


# ---------------------------------------------------------------- tables: Parquet, Arrow

NAMES = ("keys", "query", "y", "target", "label", "set", "id", "role", "weight", "x", "z", "split")
ODD_NAMES = (
    "",
    "a,b",
    "é",
    "Keys",
    "keys",
    "keys.list.element",
    "x" * 2000,
    "\x1b[2J",
    "[red]",
    "a\nb",
)


def plain_columns(rng: Random, n: int) -> dict[str, Any]:
    """Columns that read as sets, one row per set or one row per token."""

    def number() -> float:
        return round(rng.uniform(-2, 2), 3)

    if rng.random() < 0.3:
        columns = {
            "set": pa.array([str(i // 2) for i in range(n)]),
            "x": pa.array([number() for _ in range(n)]),
            "z": pa.array([rng.randrange(9) for _ in range(n)]),
        }
        if rng.random() < 0.6:
            columns["target"] = pa.array([i // 2 for i in range(n)])
        if rng.random() < 0.3:
            columns["role"] = pa.array([("query", "key")[i % 2] for i in range(n)])
        if rng.random() < 0.4:
            columns["label"] = pa.array(
                [rng.choice(("red", "blue", "", None, "[red]")) for _ in range(n)]
            )
            columns["split"] = pa.array([rng.randrange(20000) for _ in range(n)], pa.int32()).cast(
                pa.date32()
            )
        return columns
    inner: Any = rng.choice(
        (pa.list_(pa.float64()), pa.list_(pa.float32(), DIM), pa.large_list(pa.float64()))
    )
    outer = rng.choice((pa.list_, pa.large_list, pa.list_))(inner)
    keys = [[[number() for _ in range(DIM)] for _ in range(rng.randint(1, 3))] for _ in range(n)]
    columns = {"keys": pa.array(keys, outer)}
    if rng.random() < 0.3:
        columns = {
            c: pa.array([[token[j] for token in s] for s in keys]) for j, c in enumerate(("a", "b"))
        }
    if rng.random() < 0.5:
        columns["query"] = pa.array(
            [[number() for _ in range(DIM)] for _ in range(n)], pa.list_(pa.float64(), DIM)
        )
    if rng.random() < 0.7:
        columns["y"] = (
            pa.array([number() for _ in range(n)])
            if rng.random() < 0.6
            else pa.array(["a", "b"] * n)[:n]
        )
    if rng.random() < 0.3:
        columns["weight"] = pa.array([1.0] * n)
    return columns


def wild_type(rng: Random, depth: int = 0) -> pa.DataType:
    plain = (
        pa.float64(),
        pa.float32(),
        pa.float16(),
        pa.int8(),
        pa.uint64(),
        pa.int64(),
        pa.bool_(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.null(),
        pa.date32(),
        pa.timestamp("ns"),
        pa.duration("s"),
        pa.time64("us"),
        pa.decimal128(10, 3),
        pa.decimal256(60, 5),
        pa.dictionary(pa.int8(), pa.string()),
        pa.binary(4),
        pa.string_view(),
        pa.month_day_nano_interval(),
        pa.dictionary(pa.int32(), pa.float64()),
    )
    kind = rng.random()
    if depth > 2 or kind < 0.4:
        return rng.choice(plain)
    inner = wild_type(rng, depth + 1)
    makers: tuple[Callable[[Any], Any], ...] = (
        pa.list_,
        pa.large_list,
        lambda t: pa.list_(t, rng.choice((0, 1, 2, 3))),
        lambda t: pa.struct([("a", t)]),
        pa.list_view,
        pa.list_,
        lambda t: pa.run_end_encoded(pa.int32(), t),
    )
    return rng.choice(makers)(inner)


def wild_values(rng: Random, kind: pa.DataType, n: int) -> pa.Array:
    """Values of a type, with gaps; where Arrow cannot make them so, nulls."""

    def value(t: pa.DataType) -> Any:
        if rng.random() < 0.1 or pa.types.is_null(t):
            return None
        if pa.types.is_fixed_size_list(t):
            return [value(t.value_type) for _ in range(t.list_size)]
        if pa.types.is_map(t):
            return [("k", value(t.item_type))]
        if (
            hasattr(t, "value_type")
            and not pa.types.is_dictionary(t)
            and not pa.types.is_run_end_encoded(t)
        ):
            return [value(t.value_type) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        if pa.types.is_struct(t):
            return {f.name: value(f.type) for f in t}
        return rng.choice((0, 1, 2, 3, "a", "b", b"abcd", True, 1.5, math.nan, math.inf, -1))

    makers = [lambda: pa.array([value(kind) for _ in range(n)], kind)] * 3 + [
        lambda: pa.nulls(n, kind)
    ]
    for make in makers:
        with contextlib.suppress(
            pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError
        ):
            made = make()
            made.validate(full=True)
            return made
    return pa.nulls(n)


def table_base(rng: Random) -> dict[str, Any]:
    n = rng.choice((2, 3, 4, 6))
    return {"columns": list(plain_columns(rng, n).items()), "raw": 0, "n": n, "options": {}}


def table_options(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("keys", "query", "target", "set_id", "extras", "groups", "time", "split"):
        if rng.random() < (0.3 if name in ("keys", "query", "target", "set_id") else 0.1):
            options[name] = rng.choice(
                (rng.choice(NAMES), rng.choice(ODD_NAMES), "a,b", "x,z", mutate.word(rng))
            )
    if rng.random() < 0.4:
        options["missing"] = rng.choice(("drop", "impute"))
    return options


def table_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    kind, columns = rng.random(), list(state["columns"])
    if kind < 0.5:
        state["raw"] += 1
    elif kind < 0.55:
        state["options"] = table_options(rng)
    elif kind < 0.7:
        name = rng.choice((rng.choice(NAMES), rng.choice(ODD_NAMES)))
        columns.insert(
            rng.randint(0, len(columns)), (name, wild_values(rng, wild_type(rng), state["n"]))
        )
    elif kind < 0.85 and columns:
        at = rng.randrange(len(columns))
        columns[at] = (columns[at][0], wild_values(rng, wild_type(rng), state["n"]))
    elif kind < 0.92 and columns:
        at = rng.randrange(len(columns))
        columns[at] = (rng.choice((rng.choice(NAMES), rng.choice(ODD_NAMES))), columns[at][1])
    elif columns:
        at = rng.randrange(len(columns))
        name, values = columns[at]
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, AttributeError):
            made = pa.array(
                [rng.choice((v, None, v, [], [v])) for v in values.to_pylist()], values.type
            )
            made.validate(full=True)
            columns[at] = (name, made)
    state["columns"] = columns
    return state


def arrow_table(state: dict[str, Any]) -> pa.Table:
    names = [name for name, _ in state["columns"]]
    return pa.Table.from_arrays([values for _, values in state["columns"]], names=names)


def with_damage(rng: Random, content: bytes, count: int) -> bytes:
    for _ in range(count):
        content = mutate.damage(rng, content)
    return content


def parquet_finish(rng: Random, state: dict[str, Any]) -> Case:
    options = {
        "compression": rng.choice(("none", "none", "snappy", "gzip", "zstd")),
        "use_dictionary": rng.random() < 0.5,
        "data_page_version": rng.choice(("1.0", "2.0")),
        "row_group_size": rng.choice((1, 2, 100)),
    }
    # Arrow's own writer of Parquet aborts at lists of length 0; in Arrow files they are tried
    columns = [(name, values) for name, values in state["columns"] if "[0]" not in str(values.type)]
    sink = io.BytesIO()
    try:
        pq.write_table(arrow_table({"columns": columns}), sink, **options)
    except (pa.ArrowException, ValueError, TypeError):
        kept = [
            (n, c) for n, c in columns if n in ("keys", "query", "y", "set", "x", "z", "target")
        ][:1]
        sink = io.BytesIO()
        with contextlib.suppress(pa.ArrowException, ValueError, TypeError):
            pq.write_table(arrow_table({"columns": kept}), sink)
    return table_case(
        rng, state, "parquet", ".parquet", with_damage(rng, sink.getvalue(), state["raw"])
    )


def arrow_content(rng: Random, state: dict[str, Any], stream: bool) -> bytes:
    table = arrow_table(state)
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, "lz4", "zstd")))
    for candidate in (table, table.select([])):
        sink = io.BytesIO()
        with contextlib.suppress(pa.ArrowException, ValueError, TypeError, NotImplementedError):
            writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
            with writer(sink, candidate.schema, options=options) as out:
                out.write_table(candidate, max_chunksize=rng.choice((1, 2, 100)))
            return sink.getvalue()
    return b""


def arrow_finish(rng: Random, state: dict[str, Any]) -> Case:
    content = with_damage(rng, arrow_content(rng, state, stream=False), state["raw"])
    return table_case(rng, state, "arrow file", rng.choice((".arrow", ".feather")), content)


def stream_finish(rng: Random, state: dict[str, Any]) -> Case:
    content = with_damage(rng, arrow_content(rng, state, stream=True), state["raw"])
    return Case(
        "arrow stream", "table", {"in.arrow": content}, {**state["options"], "path": "in.arrow"}
    )


def table_case(rng: Random, state: dict[str, Any], name: str, suffix: str, content: bytes) -> Case:
    files, options = {f"in{suffix}": content}, {**state["options"], "path": f"in{suffix}"}
    kind = rng.random()
    if kind < 0.5:
        return Case(name, "table", files, options)
    if kind < 0.93:
        options = {k: v for k, v in options.items() if k in ("keys", "query", "target", "path")}
        if rng.random() < 0.2:
            options["dim"] = rng.choice((1, 2, 3))
        if rng.random() < 0.2:
            options["batch_size"] = rng.choice((1, 2))
        if rng.random() < 0.1:
            options["weight"] = "weight"
        return Case(name, "source", files, options)
    more = [f"--id={rng.choice(NAMES)}"] if rng.random() < 0.2 else []
    files["m.keyhole"] = ready_model()
    return Case(name, "predict", files, {"path": f"in{suffix}", "more": more})


def shop() -> pa.Table:
    """Text, dates and numbers, one row per token."""
    days = pa.array([19000 + i for i in range(12)], pa.int32()).cast(pa.date32())
    columns = {
        "set": [i // 2 for i in range(12)],
        "x": [i / 7 for i in range(12)],
        "z": list("aabbccabcabc"),
    }
    return pa.table({**columns, "when": days, "target": [float(i // 2) for i in range(12)]})


@cache
def ready_model(coded: bool = False) -> bytes:
    """A model for the column ``keys``, with queries; or for columns that are no plain numbers."""
    with tempfile.TemporaryDirectory() as folder:
        if coded:
            data = kh.read_table(shop(), keys="x,z,when", target="target", missing="impute")
            model = kh.AttentionRegressor(3, random_state=0).fit(data.sets, data.target)
            kh.save(model, Path(folder, "m"), schema=data.schema)
            return Path(folder, "m").read_bytes()
        sets = sets_like(DIM, True, 8)
        kh.save(
            kh.AttentionRegressor(3, random_state=0).fit(sets, sets.query[:, 0]), Path(folder, "m")
        )
        return Path(folder, "m").read_bytes()


def check_dataset(data: Any) -> None:
    """What was read hangs together."""
    with after_reading():
        sets = data.sets.sets if isinstance(data.sets, SetGroups) else data.sets
        if isinstance(data.sets, SetGroups):
            assert data.sets.counts.sum() == len(sets), "groups do not share out the sets"
            assert data.sets.counts.min() >= 1, "an empty group"
        check_sets(sets)
        assert len(data) == len(data.sets) >= 1, "no samples"
        assert not data.names or len(data.names) == sets.dim, (
            f"{len(data.names)} names of {sets.dim} coordinates"
        )
        if data.target is not None:
            assert data.target.shape[:1] == (len(data),), (
                f"targets {data.target.shape} of {len(data)} samples"
            )
            assert data.target.dtype.kind in "fiubU", f"targets of {data.target.dtype}"
            assert data.target.dtype.kind != "f" or np.isfinite(data.target).all(), (
                "targets not finite"
            )
        assert data.split is None or data.split.shape == (len(data),), "a split of another length"
        repr(data), repr(sets)


def check_sets(sets: kh.SetBatch) -> None:
    offsets, tokens = sets.offsets, sets.tokens
    assert (offsets[0], offsets[-1]) == (0, len(tokens)), (
        f"offsets {offsets[:3]} … for {len(tokens)} tokens"
    )
    assert (np.diff(offsets) >= 1).all(), "a set without keys"
    assert tokens.ndim == 2, f"tokens of shape {tokens.shape}"
    assert tokens.shape[1] >= 1, f"tokens of shape {tokens.shape}"
    assert np.isfinite(tokens).all(), "tokens not finite"
    for name in ("query", "extras"):
        found = getattr(sets, name)
        assert found is None or (
            found.ndim == 2 and len(found) == len(sets) and np.isfinite(found).all()
        ), name


def read_a_table(folder: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    check_dataset(read_table(folder / options.pop("path"), **options))


def read_source(folder: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    source = ParquetSets(folder / options.pop("path"), **options)
    rows, seen = source.n_rows, 0
    for batch in source:
        seen += len(batch.sets)
        with after_reading():
            check_sets(batch.sets)
            assert batch.y is None or len(batch.y) == len(batch.sets), "targets of another length"
    if isinstance(source.target, str):
        source.labels()
    with after_reading():
        assert rows == seen, f"{rows} rows announced, {seen} read"


# ---------------------------------------------------------------- CSV and other text


def csv_base(rng: Random) -> dict[str, Any]:
    rows = [
        "set,x,z,target",
        *(f"{i // 2},{rng.uniform(-2, 2):.3f},{i},{'ab'[i // 2 % 2]}" for i in range(6)),
    ]
    if rng.random() < 0.3:
        rows = [
            "set,x,z,when,target",
            *(f"{i // 2},{i},{'abc'[i % 3]},2020-01-0{1 + i},{i // 2}" for i in range(6)),
        ]
    return {"text": "\n".join(rows) + "\n", "raw": 0, "options": {}}


def text_mutate(marks: str) -> Callable[[Random, dict[str, Any]], dict[str, Any]]:
    def change(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
        state = dict(state)
        kind = rng.random()
        if kind < 0.12:
            state["raw"] += 1
        elif kind < 0.2 and "options" in state:
            state["options"] = table_options(rng)
        else:
            state["text"] = mutate.retype(rng, state["text"], marks)
        return state

    return change


def csv_finish(rng: Random, state: dict[str, Any]) -> Case:
    content = with_damage(rng, mutate.encoded(rng, state["text"]), state["raw"])
    kind = rng.random()
    if kind < 0.25:
        more = {
            "bag": rng.choice((0, "set", "x", 9)),
            "label": rng.choice((-1, "target")),
            "skip": [],
        }
        return Case("csv", "bags", {"in.csv": content}, more)
    if kind < 0.32:
        files = {"in.csv": content, "m.keyhole": ready_model(coded=rng.random() < 0.5)}
        return Case("csv", "predict", files, {"path": "in.csv", "more": []})
    path = "in.tsv" if rng.random() < 0.05 else "in.csv"
    return Case("csv", "table", {path: content}, {**state["options"], "path": path})


def read_bags(folder: Path, options: dict[str, Any]) -> None:
    check_dataset(load_bags(folder / "in.csv", **options))


def ts_base(rng: Random) -> dict[str, Any]:
    head = "@problemName tiny\n@timeStamps false\n@missing true\n@univariate false\n"
    kind = rng.choice(("@classLabel true a b", "@targetLabel true", "@classLabel false"))
    end = {"@classLabel true a b": ":a", "@targetLabel true": ":1.5"}.get(kind, "")
    rows = [
        ",".join(f"{rng.uniform(-1, 1):.2f}" for _ in range(3)) + ":1,?,3" + end for _ in range(4)
    ]
    return {"text": head + kind + "\n@data\n" + "\n".join(rows) + "\n", "raw": 0}


def ts_finish(rng: Random, state: dict[str, Any]) -> Case:
    content = with_damage(rng, mutate.encoded(rng, state["text"]), state["raw"])
    return Case("ts", "series", {"in.ts": content}, {"time": rng.random() < 0.7})


def read_series(folder: Path, options: dict[str, Any]) -> None:
    check_dataset(load_uea(folder / "in.ts", **options))


def read_molecules(folder: Path, options: dict[str, Any]) -> None:
    check_dataset(load_molecules(folder / options["path"], n_radial=options["n_radial"]))


# ---------------------------------------------------------------- npz


def npz_base(rng: Random) -> dict[str, Any]:
    tokens = np.arange(12.0).reshape(3, 2, 2) / 7
    if rng.random() < 0.4:
        arrays = {"keys": tokens, "y": np.arange(3.0)}
    elif rng.random() < 0.5:
        arrays = {
            "X": tokens.reshape(6, 2),
            "ptr": np.array([0, 2, 3, 6]),
            "y": np.array(["a", "b", "a"]),
        }
    else:
        arrays = {
            "X": np.array([[8, 0.0, 0, 0], [1, 0.9, 0.1, 0], [6, 0, 1, 0]]),
            "ptr": np.array([0, 2, 3]),
        }
        arrays["y"] = np.array([1.0, 2.0])
    if rng.random() < 0.3:
        arrays["query"] = np.ones((len(arrays["y"]), arrays.get("X", tokens).shape[-1]))
    if rng.random() < 0.3:
        arrays["split"] = np.arange(len(arrays["y"])) % 2
    members = {
        name: [a.dtype.str, "False", str(a.shape), a.tobytes(), 1] for name, a in arrays.items()
    }
    return {"members": members, "raw": 0, "lies": [], "bomb": 0, "options": {}}


DESCRIPTIONS = (
    "'<f8'",
    "'>f4'",
    "'|O'",
    "'<i8'",
    "'|b1'",
    "'<c16'",
    "'<M8[ns]'",
    "'|V10'",
    "'<U9'",
    "'|S0'",
    "'<U0'",
    "'<U500000'",
    "[('a', '<f8'), ('b', '<i4')]",
    "[('a', '|O')]",
    "('<f8', (2,))",
    "'f8,f8'",
    "None",
    "'<g16'",
    "'<f2'",
    "b'<f8'",
)
SHAPES = (
    "()",
    "(0,)",
    "(-1,)",
    "(3,)",
    "(6, 2)",
    "(2, 6)",
    "(99999999999, 2)",
    "(3, 2, 2)",
    "(1,)*9",
    "[6, 2]",
    "(True, 12)",
    "(1.0,)",
    "(6L, 2L)",
    "(0, 99999999999999999999)",
    "(12,",
    "(" * 200 + ")" * 200,
)


def npz_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    members = {name: list(member) for name, member in state["members"].items()}
    name, kind = rng.choice(list(members) or [""]), rng.randrange(11)
    if name == "" or kind == 0:
        state["raw"] += 1
    elif rng.random() < 0.05:
        state["options"] = table_options(rng)
    elif kind == 1:
        members[name][0] = rng.choice(DESCRIPTIONS)
    elif kind == 2:
        members[name][2] = rng.choice(SHAPES)
    elif kind == 3:
        members[name][1] = rng.choice(("True", "None", "'x'", "1"))
    elif kind == 4:
        members[name][3] = mutate.damage(rng, members[name][3])
    elif kind == 5:
        members[name][4] = rng.choice((0, 2, 3, 9))
    elif kind == 6:
        members[rng.choice((*NAMES, mutate.word(rng)))] = members.pop(name)
    elif kind == 7:
        members[rng.choice((*NAMES, "X", "ptr"))] = list(rng.choice(list(members.values())))
    elif kind == 8 and rng.random() < 0.1:
        state["bomb"] = rng.choice((300, 700, 1500))
    elif kind == 9:
        count = len(members[name][3]) // 8
        if count:
            values = np.frombuffer(members[name][3][: 8 * count], "<f8").copy()
            values[rng.randrange(count)] = float(rng.choice(mutate.NUMBERS))
            members[name][3] = values.tobytes()
    else:
        state["lies"] = [*state["lies"], rng.getrandbits(30)]
    state["members"] = members
    return state


def npy(member: list[Any]) -> bytes:
    description, turned, shape, content, version = member
    described = description if description[:1] in "'[(Nb" else repr(description)
    header = f"{{'descr': {described}, 'fortran_order': {turned}, 'shape': {shape}, }}".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + b"\n" + content


def npz_finish(rng: Random, state: dict[str, Any]) -> Case:
    files = [(f"{name}.npy", npy(member)) for name, member in state["members"].items()]
    if state["bomb"]:
        rows = state["bomb"] * 2**20 // 16
        files[0] = (files[0][0], npy(["<f8", "False", f"({rows}, 2)", b"", 1]))
    content = zipped(rng, files, state["lies"], state["bomb"])
    content = with_damage(rng, content, state["raw"])
    if rng.random() < 0.3:
        return Case("npz", "molecules", {"in.npz": content}, {"path": "in.npz", "n_radial": 3})
    return Case("npz", "table", {"in.npz": content}, {**state["options"], "path": "in.npz"})


def zipped(rng: Random, files: list[tuple[str, bytes]], lies: list[int], bomb: int = 0) -> bytes:
    """A zip archive; each lie changes what one header says, ``bomb`` MiB of zeros follow the first
    member's bytes.
    """
    body, central = b"", b""
    for i, (name, data) in enumerate(files):
        packed, method, size, crc = data, 0, len(data), mutate.zlib.crc32(data)
        if bomb and i == 0:
            packer = mutate.zlib.compressobj(9, mutate.zlib.DEFLATED, -15)
            packed = (
                packer.compress(data)
                + packer.flush(mutate.zlib.Z_FULL_FLUSH)
                + mutate.zeros(bomb * 2**20)
            )
            method, size = 8, size + bomb * 2**20
        elif rng.random() < 0.4:
            packer = mutate.zlib.compressobj(6, mutate.zlib.DEFLATED, -15)
            packed, method = packer.compress(data) + packer.flush(), 8
        fields = {"version": 20, "flags": 0x800, "method": method, "date": 0x21 << 16, "crc": crc}
        fields |= {"packed": len(packed), "size": size, "at": len(body)}
        for seed in lies:
            liar = Random(seed)
            if liar.randrange(len(files)) == i:
                which = liar.choice(list(fields))
                odd = (0, 1, 8, 12, 14, 99, fields[which] + 1, fields[which] * 2, 2**31, 2**32 - 1)
                fields[which] = liar.choice(odd) & 0xFFFFFFFF
        raw = name.encode("utf-8", "surrogatepass")[:60_000]
        low = {k: v & 0xFFFF for k, v in fields.items()}
        common = struct.pack(
            "<HHHIIII",
            low["version"],
            low["flags"],
            low["method"],
            fields["date"],
            fields["crc"],
            fields["packed"],
            fields["size"],
        )
        at = fields["at"]
        body += b"PK\3\4" + common + struct.pack("<HH", len(raw), 0) + raw + packed
        central += (
            b"PK\1\2\x14\0" + common + struct.pack("<HHHHHII", len(raw), 0, 0, 0, 0, 0, at) + raw
        )
    end = struct.pack("<HHHHIIH", 0, 0, len(files), len(files), len(central), len(body), 0)
    return body + central + b"PK\5\6" + end


# ---------------------------------------------------------------- bAbI archives

STORY = (
    "1 Mary moved to the bathroom.\n2 John went to the hall.\n3 Where is Mary? \tbathroom\t1\n"
    "1 Sandra left.\n2 Where is Sandra?\toutside\t1\n"
)


def babi_base(rng: Random) -> dict[str, Any]:
    files = {"tasks/en/qa1_single_train.txt": STORY, "tasks/en/qa1_single_test.txt": STORY}
    if rng.random() < 0.3:
        files["tasks/en-10k/qa1_single_train.txt"] = STORY
    kind = rng.choice(("tar", "tar", "gz", "bz2", "xz", "zip", "zip", "file"))
    return {"files": files, "raw": 0, "lies": [], "kind": kind, "bomb": 0, "odd": []}


def babi_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state, kind = dict(state), rng.random()
    files = dict(state["files"])
    name = rng.choice(list(files))
    if kind < 0.45:
        files[name] = mutate.retype(rng, files[name], " \t.")
    elif kind < 0.55:
        where = rng.choice(
            (
                "../outside/qa1_x_train.txt",
                "/tmp/qa1_x_train.txt",
                f"{mutate.word(rng)}/qa1_x_train.txt",
                "tasks/en/qa1_" + "x" * rng.choice((1, 120, 300)) + "_test.txt",
                mutate.word(rng),
            )
        )
        files[where] = files.pop(name)
    elif kind < 0.65:
        state["odd"] = [
            *state["odd"],
            (rng.choice("123456ADSxgLK"), rng.choice(list(files)), mutate.word(rng)),
        ]
    elif kind < 0.83:
        state["lies"] = [*state["lies"], rng.getrandbits(30)]
    elif kind < 0.84:
        state["bomb"] = rng.choice((150, 190, 600))
    else:
        state["raw"] += 1
    state["files"] = files
    return state


def babi_finish(rng: Random, state: dict[str, Any]) -> Case:
    files = [(name, mutate.encoded(rng, text)) for name, text in state["files"].items()]
    options = {"task": 1, "newest": rng.choice((0, 1, 40)), "path": "babi." + state["kind"]}
    if state["kind"] == "file":
        options["path"] = "qa1_single_train.txt"
        return Case(
            "babi", "babi", {options["path"]: with_damage(rng, files[0][1], state["raw"])}, options
        )
    if state["kind"] == "zip":
        copies = 12 if state["bomb"] == 150 else 1
        files = [(f"{i}/{n}" if i else n, c) for i in range(copies) for n, c in files]
        content = zipped(rng, files, state["lies"], state["bomb"])
    else:
        content = tarred(files, state)
        raw, state = state["raw"], {**state, "raw": 0}
        if rng.random() < 0.5:
            content, raw = with_damage(rng, content, raw), 0
        match state["kind"]:
            case "gz":
                content = gzip.compress(content, mtime=0)
                if state["bomb"]:  # a member that is zeros for ever
                    size = state["bomb"] * 2**20
                    content += (
                        b"\x1f\x8b\x08"
                        + bytes(7)
                        + mutate.zeros(size)
                        + struct.pack("<II", 0, size)
                    )
            case "bz2":
                import bz2

                content = bz2.compress(content)
            case "xz":
                import lzma

                content = lzma.compress(content, preset=0)
        return Case("babi", "babi", {options["path"]: with_damage(rng, content, raw)}, options)
    return Case("babi", "babi", {options["path"]: with_damage(rng, content, state["raw"])}, options)


def tarred(files: list[tuple[str, bytes]], state: dict[str, Any]) -> bytes:
    """A tar archive with odd members, whose headers lie and whose checksums are right."""
    blocks: list[bytes] = []
    for name, data in files:
        info = tarfile.TarInfo(name.replace("\0", "")[:5000])
        info.size = len(data)
        with contextlib.suppress(UnicodeError, ValueError):
            kind = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)[len(name) % 3]
            if len(name) > 100:
                kind = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)[len(name) % 2]
            blocks += [info.tobuf(kind, "utf-8", "surrogateescape"), data + bytes(-len(data) % 512)]
    for kind, name, target in state["odd"]:
        info = tarfile.TarInfo(name.replace("\0", "")[:90])
        info.type, info.linkname = (
            kind.encode(),
            target.replace("\0", "").replace("\ud800", "")[:90],
        )
        with contextlib.suppress(UnicodeError, ValueError):
            blocks.append(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
    raw = bytearray(b"".join(blocks) + bytes(1024))
    for seed in state["lies"]:
        liar = Random(seed)
        heads = [
            at for at in range(0, len(raw) - 1024, 512) if raw[at + 257 : at + 262] == b"ustar"
        ]
        if heads:
            at = liar.choice(heads)
            field_at, size = liar.choice(
                (
                    (0, 100),
                    (100, 8),
                    (108, 8),
                    (124, 12),
                    (136, 12),
                    (156, 1),
                    (157, 100),
                    (257, 8),
                    (329, 8),
                    (345, 155),
                    (386, 12),
                    (482, 1),
                    (483, 12),
                )
            )
            new = liar.choice(
                (
                    b"77777777777",
                    b"-1",
                    b"\x80" + b"\xff" * 11,
                    b"\xff" * 12,
                    b"0",
                    b"zzz",
                    liar.randbytes(4),
                )
            )
            raw[at + field_at : at + field_at + size] = new[:size].ljust(size, b"\0")
            raw[at + 148 : at + 156] = b" " * 8
            raw[at + 148 : at + 155] = b"%06o\0" % sum(raw[at : at + 512])
    return bytes(raw)


def read_babi(folder: Path, options: dict[str, Any]) -> None:
    check_dataset(load_babi(folder / options["path"], options["task"], newest=options["newest"]))


# ---------------------------------------------------------------- checkpoints

FAMILIES = (
    {
        "encoder.layer.{}.attention.self.query.weight": (4, 4),
        "encoder.layer.{}.attention.self.key.weight": (4, 4),
        "encoder.layer.{}.output.LayerNorm.weight": (4,),
    },
    {
        "model.layers.{}.self_attn.q_proj.weight": (4, 4),
        "model.layers.{}.self_attn.k_proj.weight": (2, 4),
        "model.layers.{}.input_layernorm.weight": (4,),
    },
    {"h.{}.attn.c_attn.weight": (4, 12), "h.{}.ln_1.weight": (4,)},
    {"layers.{}.attention.query_key_value.weight": (12, 4)},
    {"layers.{}.self_attn.qkv_proj.weight": (12, 4)},
    {
        "encoder.block.{}.layer.0.SelfAttention.q.weight": (4, 4),
        "encoder.block.{}.layer.0.SelfAttention.k.weight": (4, 4),
    },
)


def checkpoint_base(rng: Random) -> dict[str, Any]:
    arrays, values = {}, np.random.default_rng(rng.randrange(4))
    dtype, code = rng.choice((("F32", "<f4"), ("F64", "<f8"), ("F16", "<f2"), ("BF16", "<u2")))
    for layer in range(2):
        for name, shape in rng.choice(FAMILIES).items():
            content = values.normal(size=shape).astype(np.float16 if code == "<u2" else code)
            arrays[name.format(layer)] = [dtype, list(shape), content.tobytes()]
    config = {
        "model_type": rng.choice(("bert", "gpt2", "gemma", "openai-gpt")),
        "num_attention_heads": 2,
    }
    if rng.random() < 0.2:
        config = {"text_config": config}
    index = (
        {"weight_map": dict.fromkeys(arrays, "model.safetensors")} if rng.random() < 0.2 else None
    )
    return {"arrays": arrays, "lies": [], "raw": 0, "config": config, "index": index}


def checkpoint_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state, kind = dict(state), rng.random()
    if kind < 0.35:
        state["lies"] = [*state["lies"], rng.getrandbits(30)]
    elif kind < 0.65:
        state["arrays"] = array_changed(rng, state["arrays"])
    elif kind < 0.8:
        state["config"] = mutate.twist(rng, state["config"])
    elif kind < 0.88 and state["index"]:
        state["index"] = mutate.twist(rng, state["index"])
    else:
        state["raw"] += 1
    return state


def checkpoint_finish(rng: Random, state: dict[str, Any]) -> Case:
    parts = safetensors(state["arrays"], None)
    for seed in state["lies"]:
        parts["header"] = mutate.twist(Random(seed), parts["header"])
    if rng.random() < 0.02:
        parts["length"] = rng.choice((0, 1, 2**31, 2**63, 99_999_999))
    files = {"model.safetensors": with_damage(rng, container(parts), state["raw"])}
    files["config.json"] = mutate.text_of(state["config"]).encode("utf-8", "surrogatepass")
    if state["index"] is not None:
        files["model.safetensors.index.json"] = mutate.text_of(state["index"]).encode(
            "utf-8", "surrogatepass"
        )
    more = ["--json"] if rng.random() < 0.9 else []
    more += ["--n-heads", rng.choice(("1", "2", "0", "999999999"))] if rng.random() < 0.2 else []
    more += ["--no-fold-norm"] if rng.random() < 0.2 else []
    return Case("checkpoint", "heads", files, {"more": more})


def read_heads(folder: Path, options: dict[str, Any]) -> None:
    said = command("heads", str(folder), *options["more"])
    if "--json" in options["more"]:
        with after_reading():
            found = json.loads(said)
            assert found["layers"], "no layers"
            assert len(found["heads"]) == len(found["layers"]) * found["heads_per_layer"]


# ---------------------------------------------------------------- predict: job.json and parts


def read_predict(folder: Path, options: dict[str, Any]) -> None:
    places = [str(folder / name) for name in ("m.keyhole", options["path"], "out.parquet")]
    command("predict", *places, *options["more"])
    with after_reading():
        table = pq.read_table(folder / "out.parquet")
        values = np.asarray(table["prediction"])
        assert len(values) >= 1, "no predictions"
        assert np.isfinite(values).all(), f"predictions {values[:5]}"
        assert len(values) == options.get("rows", len(values)), (
            f"{len(values)} predictions of {options['rows']} sets"
        )


# ---------------------------------------------------------------- the store

TINY = ("d=2", "N=2", "M=3", "largest=64", "repetitions=1", "n_test=8", "powers=1")


@cache
def cells() -> tuple[Any, ...]:
    (figure,) = choose_figures(["averages"], "quick", 0, TINY)
    return tuple(figure.cells())


@cache
def stored() -> bytes:
    """The store of a small run, with a rollback journal: that form can be opened in memory."""
    folder = Path(tempfile.mkdtemp())
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read_reproduce(folder, {})
        with contextlib.closing(
            sqlite3.connect(folder / "cells.sqlite", isolation_level=None)
        ) as db:
            db.execute("UPDATE timings SET seconds = 0.5, worker = ''")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("VACUUM")
        return (folder / "cells.sqlite").read_bytes()
    finally:
        shutil.rmtree(folder)


RESULTS = (
    '{"error": NaN}',
    '{"error": "x"}',
    '{"error": null}',
    "[]",
    "null",
    "",
    "{",
    '{"error": 1e999}',
    '{"err": 1}',
    "7",
    '{"error": [1]}',
    '{"error": true}',
    '{"error": -5}',
    "[" * 3000,
    '{"\\ud800": 1}',
    '{"error": ' + "9" * 5000 + "}",
    '{"key": 0.5}',
    '{"dim": "x", "error": 0.5}',
    '{"error": 0.5, "more": {"a": 1}}',
)
STATEMENTS = (
    "DROP TABLE results",
    "DROP TABLE timings",
    "ALTER TABLE results RENAME TO other",
    "ALTER TABLE results RENAME COLUMN result TO outcome",
    "ALTER TABLE timings RENAME COLUMN seconds TO minutes",
    "DROP TABLE results; CREATE VIEW results AS SELECT 'k' AS key, 'c' AS config, '{}' AS result",
    "DROP TABLE results; CREATE VIEW results AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT "
    "x + 1 FROM c) SELECT x AS key, x AS config, x AS result FROM c",
    "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END",
    "CREATE TRIGGER t BEFORE INSERT ON results BEGIN SELECT RAISE(FAIL, 'no'); END",
    (
        "CREATE TRIGGER t AFTER INSERT ON timings BEGIN INSERT INTO results SELECT randomblob(16), "
        "zeroblob(400000000), '{}'; END"
    ),
    "DROP TABLE results; CREATE TABLE results (key TEXT)",
    "DROP TABLE results; CREATE TABLE results (result, config, key)",
    (
        "DROP TABLE results; CREATE TABLE results (key TEXT PRIMARY KEY, config TEXT, result TEXT) "
        "WITHOUT ROWID"
    ),
    "DROP TABLE results; CREATE TABLE results (key, config, result AS (zeroblob(600000000)))",
    "PRAGMA user_version = 99",
    "PRAGMA application_id = 1",
    "DELETE FROM results",
    "UPDATE timings SET seconds = 'x'",
    "UPDATE results SET result = zeroblob(10)",
    "UPDATE results SET key = NULL",
    "CREATE INDEX i ON results (abs(key))",
    "UPDATE results SET result = zeroblob(100000)",
    "UPDATE results SET key = key || 'x'",
)


def store_base(rng: Random) -> dict[str, Any]:
    return {"db": stored(), "raw": 0, "beside": None}


def store_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state, kind = dict(state), rng.random()
    if kind < 0.4:
        state["raw"] += 1
    elif kind < 0.47:
        state["beside"] = (rng.choice(("-wal", "-journal", "-shm")), rng.getrandbits(30))
    else:
        try:
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
                db.deserialize(state["db"])
                if kind < 0.75:
                    count, offset = rng.choice((1, 3, 99)), rng.randrange(9)
                    chosen = f"SELECT rowid FROM results LIMIT {count} OFFSET {offset}"
                    db.execute(
                        f"UPDATE results SET result = ? WHERE rowid IN ({chosen})",
                        (rng.choice(RESULTS),),
                    )
                else:
                    db.executescript(rng.choice(STATEMENTS))
                state["db"] = db.serialize()
        except (sqlite3.Error, MemoryError):
            state["raw"] += 1
    return state


def store_finish(rng: Random, state: dict[str, Any]) -> Case:
    files = {"cells.sqlite": with_damage(rng, state["db"], state["raw"])}
    if state["beside"] is not None:
        kind, seed = state["beside"]
        files["cells.sqlite" + kind] = with_damage(
            Random(seed), files["cells.sqlite"][: 3 * 4096], 3
        )
    kind = rng.random()
    return Case(
        "store", "reproduce" if kind < 0.003 else "section" if kind < 0.03 else "store", files
    )


def read_store(folder: Path, options: dict[str, Any]) -> None:
    with Store(folder / "cells.sqlite") as store:
        found = store.get(cells())
        store.keys()
        for cell in cells():
            store.put(cell, {"error": 0.5, "penalty": 1.0}, seconds=0.1)
        again = store.get(cells())
    with after_reading():
        for values in (*found.values(), *again.values()):
            assert isinstance(values, dict), f"a result is {values!r:.60}"
            assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in values.values()), (
                f"{values!r:.80}"
            )
        assert set(again) == set(cells()), "a cell that was put is not there"
        export(found, folder / "tables")


def read_section(folder: Path, options: dict[str, Any]) -> None:
    (figure,) = choose_figures(["averages"], "quick", 0, TINY)
    with Store(folder / "cells.sqlite") as store:
        found = store.get(cells())
    if set(found) == set(cells()):
        figure.module.section(figure.config, found)


def read_reproduce(folder: Path, options: dict[str, Any]) -> None:
    settings = [part for setting in TINY for part in ("--set", setting)]
    command("reproduce", "averages", "--out", str(folder), *settings, "--jobs", "1", "--json")


# ---------------------------------------------------------------- --set and --target

SETTINGS = (
    "d=8",
    "N=4",
    "M=100",
    "n=256",
    "dim=4",
    "sizes=64,128",
    "powers=1,2",
    "repetitions=2",
    "level=0.3",
    "n_test=100",
    "more_repetitions=1",
    "seed=3",
    "gammas=0,0.5,1",
    "n_keys=3",
    "largest=512",
    "heads=4,8",
)
FIGURES = ("averages", "correlation", "rotation", "heads", "complexity", "dimension", "learner")


def setting_base(rng: Random) -> dict[str, Any]:
    names = rng.sample(FIGURES, rng.choice((1, 1, 2, 7)))
    return {"names": names, "set": [rng.choice(SETTINGS) for _ in range(rng.choice((1, 1, 2)))]}


def setting_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    chosen = list(state["set"])
    at = rng.randrange(len(chosen))
    name, _, value = chosen[at].partition("=")
    kind = rng.random()
    if kind < 0.4:
        number = str(
            rng.choice(
                (0, 1, 2, 3, 5, 17, 64, 1000, 10**5, 10**7, 10**11, 10**13, 0.5, -1, "1e3", "2.0")
            )
        )
        chosen[at] = f"{name}={rng.choice((number, number + ',' + number, value + ',' + number))}"
    elif kind < 0.6:
        chosen[at] = f"{rng.choice(setting_names())}={value}"
    elif kind < 0.9:
        chosen[at] = mutate.retype(rng, chosen[at], "=,")
    elif kind < 0.95:
        state["names"] = [*state["names"], mutate.word(rng)]
    else:
        chosen.append(mutate.word(rng))
    state["set"] = chosen
    return state


@cache
def setting_names() -> list[str]:
    found = choose_figures(check_names([]), "quick", 0)
    return sorted({name for figure in found for name in vars(figure.config)})


def setting_finish(rng: Random, state: dict[str, Any]) -> Case:
    return Case(
        "--set", "settings", {}, {**state, "preset": rng.choice(("quick", "quick", "full"))}
    )


def read_settings(folder: Path, options: dict[str, Any]) -> None:
    """What `keyhole reproduce` does before it computes."""
    names = check_names(options["names"])
    for figure in choose_figures(names, options["preset"], 0, options["set"]):
        for cell in figure.cells():
            assert min(cell.dim, cell.n_keys) >= 1, f"a cell of {cell}"


ATOMS = ("corr", "token", "query", "rotated(0.5)", "rotated(1, 3)", "2", "0.5", "(corr + token)")


def target_base(rng: Random) -> dict[str, Any]:
    def product() -> str:
        atoms = [
            rng.choice(ATOMS) + rng.choice(("", "", "^2", "^3"))
            for _ in range(rng.choice((1, 2, 3)))
        ]
        return " * ".join(atoms)

    return {
        "text": rng.choice((" + ", " - ")).join(product() for _ in range(rng.choice((1, 1, 2)))),
        "raw": 0,
    }


def target_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    if rng.random() < 0.5:
        pieces = (
            "(",
            ")",
            "^",
            "^64",
            "^12",
            "*",
            "+",
            "-",
            "/",
            "/0",
            "/3",
            "1e308",
            ",",
            *ATOMS,
            "rotated(1e300)",
        )
        at = rng.randrange(len(state["text"]) + 1)
        state["text"] = state["text"][:at] + rng.choice(pieces) + state["text"][at:]
    elif rng.random() < 0.1:
        state["text"] = rng.choice(
            ("(", "-", "((corr+token+query+1)^12)*", "rotated(0.1)+")
        ) * rng.choice((5, 60, 400))
    else:
        state["text"] = mutate.retype(rng, state["text"], " *+-^()")
    return state


def target_finish(rng: Random, state: dict[str, Any]) -> Case:
    dim = rng.choice((1, 2, 3, 8, 64))
    if rng.random() < 0.004:
        more = {
            "dim": min(dim, 8),
            "samples": rng.choice(("10", "1e9", "10,x", "0", mutate.word(rng))),
        }
        return Case("--target", "theory", {}, {"text": state["text"], **more})
    return Case("--target", "target", {}, {"text": state["text"], "dim": dim})


def read_target(folder: Path, options: dict[str, Any]) -> None:
    found = parse_target(options["text"], options["dim"])
    with after_reading():
        assert (
            len(found.text) > 1000
            or parse_target(found.text, options["dim"]).target == found.target
        ), found.text


def read_theory(folder: Path, options: dict[str, Any]) -> None:
    command(
        "theory",
        f"--target={options['text']}",
        f"--dim={options['dim']}",
        f"--samples={options['samples']}",
    )


# ---------------------------------------------------------------- all of them


@cache
def cli() -> Any:
    return typer.main.get_command(app)


def command(*arguments: str) -> str:
    """Run a command as the shell would; what it printed. SystemExit if it refuses."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            cli().main(list(arguments), prog_name="keyhole")
        except SystemExit as end:
            if end.code:
                raise
    return out.getvalue()


def put(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, all of one fixed time: what a command remembers of its input is its size and
    time.
    """
    import os

    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1_000_000_000, 1_000_000_000))


FORMATS: dict[str, Format] = {
    "model": Format(6, model_base, model_mutate, model_finish),
    "parquet": Format(4, table_base, table_mutate, parquet_finish),
    "arrow file": Format(4, table_base, table_mutate, arrow_finish),
    "arrow stream": Format(3, table_base, table_mutate, stream_finish),
    "csv": Format(3, csv_base, text_mutate(","), csv_finish),
    "npz": Format(4, npz_base, npz_mutate, npz_finish),
    "ts": Format(2, ts_base, text_mutate(",: "), ts_finish),
    "babi": Format(4, babi_base, babi_mutate, babi_finish),
    "checkpoint": Format(3, checkpoint_base, checkpoint_mutate, checkpoint_finish),
    "store": Format(2, store_base, store_mutate, store_finish),
    "--set": Format(2, setting_base, setting_mutate, setting_finish),
    "--target": Format(3, target_base, target_mutate, target_finish, most=8),
    **sequences.SEQUENCES,
}
READERS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "load": read_load,
    "table": read_a_table,
    "source": read_source,
    "predict": read_predict,
    "bags": read_bags,
    "series": read_series,
    "molecules": read_molecules,
    "babi": read_babi,
    "heads": read_heads,
    "store": read_store,
    "section": read_section,
    "reproduce": read_reproduce,
    "settings": read_settings,
    "target": read_target,
    "theory": read_theory,
    **sequences.READERS,
}
WRITES = {
    "predict": ("out.parquet",),
    "store": ("cells.sqlite", "tables"),
    "section": ("cells.sqlite",),
    "reproduce": ("",),
    **sequences.WRITES,
}
"""What a reader may write, by the beginning of its name; the others write nothing."""


def format_of(seed: int, number: int) -> str:
    """The format of a case."""
    return Random(f"{seed}/{number}").choices(list(FORMATS), [f.share for f in FORMATS.values()])[0]


def draw(seed: int, number: int, kept: tuple[int, ...] | None = None) -> tuple[Case, int]:
    """Case ``number`` of a seed, and how many mutations it has; with ``kept``, only those of
    them.
    """
    rng = Random(f"{seed}/{number}")
    name = rng.choices(list(FORMATS), [f.share for f in FORMATS.values()])[0]
    chosen = FORMATS[name]
    state = chosen.base(rng)
    count = min(chosen.most, chosen.fewest + int(rng.expovariate(0.9)))
    for k in range(count) if kept is None else kept:
        state = chosen.mutate(Random(f"{seed}/{number}/{k}"), state)
    return chosen.finish(Random(f"{seed}/{number}/end"), state), count


def warm() -> None:
    """Import, compile and make all that cases share, and see that undamaged files of every format
    are read.
    """
    warnings.simplefilter("ignore")
    models(), stored(), cells(), setting_names(), cli()
    sequences.warm()
    for name, kind in FORMATS.items():
        if name in sequences.SEQUENCES:
            continue
        refused = []
        for k in range(24):
            rng = Random(f"{name}/{k}")
            case = kind.finish(rng, kind.base(rng))
            if case.reader in ("reproduce", "theory"):
                continue
            with tempfile.TemporaryDirectory() as folder:
                put(Path(folder), case.files)
                try:
                    with contextlib.redirect_stderr(io.StringIO()) as said:
                        READERS[case.reader](Path(folder), dict(case.options))
                except (Exception, SystemExit) as error:
                    refused.append(f"{case.reader} {case.options}: {error} {said.getvalue()}")
        # some of what is drawn does not go together, a model with a query and a table without one
        assert len(refused) <= 16, f"undamaged files of format {name} are refused: {refused[:3]}"
