"""A fitted layer as an ONNX graph, of standard operators of one stated opset.

The steps are those at the head of `keyhole.export.constants`. `Graph` writes one node after the
other: a method per operator, named as the operator, that returns the name of its result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from keyhole._files import write_whole
from keyhole.data.tokens import ADDS_FEATURES
from keyhole.export.constants import LayerConstants, SelectionConstants
from keyhole.key_selection import TIE_RESOLUTION

OPSET = 17
"""Version of the standard operators (default domain)."""
IR_VERSION = 8
"""Version of the file format: that which came with the opset."""


def to_onnx(model: Any) -> onnx.ModelProto:
    """The layer of a fitted estimator as an ONNX model.

    Inputs are ``keys`` (n, N, d), ``mask`` (n, N) of bool, and where the estimator was fitted to
    them ``query`` (n, d_q) and ``extras`` (n, c); numbers are float64, or float32 if the estimator
    was fitted with ``dtype="float32"``. Outputs are ``prediction`` of a regressor; of a classifier
    ``label``, ``scores`` (its ``decision_function``) and, where it has any, ``probabilities`` in
    the order of ``classes_``. A model that selects keys (``key_selection_``) does so in the graph,
    and takes the query that keys are judged by even if its layer does not use it.
    """
    constants = LayerConstants.of(model, "ONNX export")
    graph = Graph(constants.dtype)
    inputs = _inputs(constants, graph.number)
    sets = PaddedSets(keys="keys", mask="mask")
    if constants.selection is not None:
        sets = _selected_keys(graph, constants.selection, sets)
    scores = _write_layer(graph, constants, sets)
    outputs = _write_outputs(graph, constants, scores)
    document = helper.make_model(
        helper.make_graph(graph.nodes, "keyhole", inputs, outputs, graph.initializers),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="keyhole",
        doc_string=f"{type(model).__name__}: one attention layer of {len(constants.W)} heads.",
    )
    onnx.checker.check_model(document, full_check=True)
    return document


def save_onnx(model: Any, path: str | Path, *, overwrite: bool = False) -> onnx.ModelProto:
    """Write the ONNX model of a fitted estimator, and return it.

    The file appears whole or not at all.
    """
    path = Path(path)
    if path.suffix.lower() != ".onnx":
        raise ValueError(
            f"an ONNX model is written under a name that ends in .onnx: got {path.name!r}. Use "
            f"{path.with_suffix('.onnx').name!r}."
        )
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"a file is not replaced unless asked: {path.name!r} exists. Choose another name, or "
            "pass overwrite=True."
        )
    document = to_onnx(model)
    write_whole(document.SerializeToString(), path)
    return document


def sizes_of_inputs(document: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """The inputs of an ONNX model by their names, each with the lengths of its axes."""
    sizes = {}
    for tensor in document.graph.input:
        axes = tensor.type.tensor_type.shape.dim
        sizes[tensor.name] = tuple(axis.dim_param or str(axis.dim_value) for axis in axes)
    return sizes


class Graph:
    """Nodes and constants of a graph under construction, in one precision."""

    def __init__(self, dtype: str) -> None:
        self.numpy_type = np.dtype(dtype)
        self.number = TensorProto.DOUBLE if dtype == "float64" else TensorProto.FLOAT
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def in_precision(self, dtype: str) -> Graph:
        """The same graph, of which the constants that are added from here have another type."""
        other = Graph(dtype)
        other.nodes = self.nodes
        other.initializers = self.initializers
        return other

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; its result is named after it, or as given."""
        name = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, name: str, array: Any, dtype: Any = None) -> str:
        """Add a constant, in the precision of the graph unless another type is given."""
        values = np.ascontiguousarray(array, dtype=dtype or self.numpy_type)
        values = values.reshape(np.shape(array))
        unique_name = f"{name}_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(values, unique_name))
        return unique_name

    def integers(self, *values: int) -> str:
        """A constant list of integers: axes, or a shape."""
        return self.constant("axes", list(values), np.int64)

    def unsqueeze(self, value: str, *axes: int) -> str:
        """The value with further axes of length one."""
        return self.node("Unsqueeze", value, self.integers(*axes))

    def sum(self, value: str, axis: int, *, keepdims: bool = False) -> str:
        """Sums over an axis."""
        return self.node("ReduceSum", value, self.integers(axis), keepdims=int(keepdims))

    def where(self, condition: str, value: str, otherwise: float) -> str:
        """The value where a condition holds, a number elsewhere."""
        return self.node("Where", condition, value, self.constant("otherwise", otherwise))

    def transpose(self, value: str, *order: int) -> str:
        """The value with its axes in another order."""
        return self.node("Transpose", value, perm=list(order))

    def reshape(self, value: str, *shape: int) -> str:
        """0 keeps an axis, −1 is what remains."""
        return self.node("Reshape", value, self.integers(*shape))

    def top_places(self, value: str, count: str) -> str:
        """Places of the largest entries along the last axis, the largest first."""
        name = f"places_{len(self.nodes)}"
        outputs = [f"{name}_values", name]
        self.nodes.append(helper.make_node("TopK", [value, count], outputs, axis=-1))
        return name

    def join(self, *values: str, axis: int) -> str:
        """Values one after the other along an axis."""
        return self.node("Concat", *values, axis=axis)


@dataclass(frozen=True)
class PaddedSets:
    """Names of keys (n, N, d), padded with anything, and of the mask (n, N) of those there are."""

    keys: str
    mask: str


def _inputs(constants: LayerConstants, number: int) -> list[Any]:
    """What the graph takes."""
    inputs = [
        helper.make_tensor_value_info("keys", number, ["samples", "keys", constants.dim]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["samples", "keys"]),
    ]
    if constants.query_dim:
        inputs.append(
            helper.make_tensor_value_info("query", number, ["samples", constants.query_dim])
        )
    if constants.n_extras:
        inputs.append(
            helper.make_tensor_value_info("extras", number, ["samples", constants.n_extras])
        )
    return inputs


def _selected_keys(graph: Graph, selection: SelectionConstants, sets: PaddedSets) -> PaddedSets:
    """The keys of every set that the layer sees, those that matter most first.

    At most ``n_keys`` of each: (n, min(N, n_keys), d). Sets that have fewer are padded still. What
    is done is written at `keyhole.export.constants.SelectionConstants`, and done in float64.
    """
    graph = graph.in_precision("float64")
    parts = _scoring_contributions(graph, selection, sets)

    # how far each key is from the mean of its set, in the output where it is farthest: (n, k)
    number_of_mask = graph.node("Cast", sets.mask, to=graph.number)
    counts = graph.unsqueeze(graph.sum(number_of_mask, 1, keepdims=True), 2)  # (n, 1, 1)
    means = graph.node("Div", graph.sum(parts, 1, keepdims=True), counts)
    distances = graph.node("Abs", graph.node("Sub", parts, means))
    relevance = graph.node("ReduceMax", distances, axes=[2], keepdims=0)

    # in whole steps, so that rounding decides nothing between equal keys; −1 where there is no key
    magnitudes = graph.node("Abs", parts)
    largest = graph.node("ReduceMax", magnitudes, axes=[1, 2], keepdims=0)
    unit = graph.unsqueeze(_one_for_zero(graph, largest), 1)  # (n, 1)
    shares = graph.node("Div", relevance, unit)
    steps_per_unit = graph.constant("steps_per_unit", 1.0 / TIE_RESOLUTION)
    steps = graph.node("Round", graph.node("Mul", shares, steps_per_unit))
    steps = graph.where(sets.mask, steps, -1.0)

    # as many keys as are kept, or as the longest set has; of equal ones TopK takes the first
    n_padded = graph.node("Shape", sets.mask, start=1, end=2)
    n_kept = graph.node("Min", n_padded, graph.integers(selection.n_keys))
    places = graph.top_places(steps, n_kept)
    rows = graph.unsqueeze(places, 2)
    return PaddedSets(
        keys=graph.node("GatherND", sets.keys, rows, batch_dims=1),
        mask=graph.node("GatherND", sets.mask, rows, batch_dims=1),
    )


def _scoring_contributions(graph: Graph, selection: SelectionConstants, sets: PaddedSets) -> str:
    """What each key adds to each output of the scoring layer, (n, k, t), and 0 where there is none.

    The factor M^{-1/2} / N is left out: it is the same for all keys of a set.
    """
    # tokens standardised and of length one, with a one appended
    mask_of_tokens = graph.unsqueeze(sets.mask, 2)
    keys = graph.node("Cast", sets.keys, to=graph.number)
    keys = graph.where(mask_of_tokens, keys, 0.0)
    keys = _scaled(graph, "standard", keys, selection.centre, selection.spread)
    keys = _scaled(graph, "sphere", keys, None, None)
    extended_keys = graph.join(keys, _ones_like(graph, mask_of_tokens), axis=2)  # (n, k, e)

    # directions x~_0ᵀ W_m of every head: of the query, or the same for all sets
    n_heads, query_width, width = selection.W.shape
    side_by_side = selection.W.transpose(1, 0, 2).reshape(query_width, n_heads * width)
    if selection.uses_query:
        query = graph.node("Cast", "query", to=graph.number)
        query = _scaled(graph, "standard", query, selection.query_centre, selection.query_spread)
        query = _scaled(graph, "sphere", query, None, None)
        W = graph.constant("scoring_W", side_by_side[:-1])
        last_row = graph.constant("scoring_W_last", side_by_side[-1])
        directions = graph.node("Add", graph.node("MatMul", query, W), last_row)
        directions = graph.reshape(directions, -1, n_heads, width)  # (n, m, e)
    else:
        # the constant query [0; √2] meets the last rows alone: (1, m, e)
        of_all_sets = math.sqrt(2.0) * side_by_side.reshape(1, n_heads, width)
        directions = graph.constant("scoring_directions", of_all_sets)

    # weights ReLU(x~_0ᵀ W_m x~_i), (n, k, m), times <v_mt, x~_i>, (n, k, m, t), over all heads
    directions_last = graph.transpose(directions, 0, 2, 1)
    weights = graph.node("Relu", graph.node("MatMul", extended_keys, directions_last))
    n_outputs = selection.v.shape[2]
    values = selection.v.transpose(1, 0, 2).reshape(width, n_heads * n_outputs)
    of_values = graph.node("MatMul", extended_keys, graph.constant("scoring_v", values))
    of_values = graph.reshape(of_values, 0, 0, n_heads, n_outputs)
    parts = graph.sum(graph.node("Mul", graph.unsqueeze(weights, 3), of_values), 2)
    return graph.where(mask_of_tokens, parts, 0.0)


def _write_layer(graph: Graph, constants: LayerConstants, sets: PaddedSets) -> str:
    """Nodes from the keys that are seen, and the other inputs, to f of every sample, (n, t)."""
    # 1. scaled tokens, each with a one appended; zeros where there is no key
    mask_of_tokens = graph.unsqueeze(sets.mask, 2)
    keys = graph.where(mask_of_tokens, sets.keys, 0.0)
    keys = _scaled(graph, constants.scaling, keys, constants.centre, constants.spread)
    keys = graph.where(mask_of_tokens, keys, 0.0)
    mask_as_numbers = graph.node("Cast", sets.mask, to=graph.number)
    counts = graph.sum(mask_as_numbers, 1, keepdims=True)  # (n, 1)
    extended_keys = graph.join(keys, _ones_like(graph, mask_of_tokens), axis=2)  # (n, k, e)
    keys_last = graph.transpose(extended_keys, 0, 2, 1)  # (n, e, k)

    # 2. and 3. queries x~_0, (n, j, f), extended by the hops
    queries = _queries(graph, constants, keys, extended_keys, counts)
    for hop in constants.hops:
        queries = _after_hop(graph, constants, hop, queries, keys, keys_last, sets.mask)

    # 4. scores of all heads, (n, j·m, k): x~_0ᵀ W_m x~_i, the matrices side by side
    n_heads, query_width, width = constants.W.shape
    side_by_side = constants.W.transpose(1, 0, 2).reshape(query_width, n_heads * width)
    directions = graph.node("MatMul", queries, graph.constant("W", side_by_side))
    directions = graph.reshape(directions, 0, -1, width)
    scores = graph.node("MatMul", directions, keys_last)
    key_mask = graph.unsqueeze(sets.mask, 1)
    if constants.activation == "softmax":
        scores = graph.where(key_mask, scores, -math.inf)
        weights = graph.node("Softmax", scores, axis=-1)
    else:
        weights = _sigma(graph, constants.activation, scores)
        weights = graph.where(key_mask, weights, 0.0)
        weights = graph.node("Div", weights, graph.unsqueeze(counts, 2))

    # 5. features (n, j, m·e), outputs (n, j, t), pooled over queries
    phi = graph.node("MatMul", weights, extended_keys)
    phi = graph.reshape(phi, 0, -1, n_heads * width)
    values = constants.scale * constants.v.reshape(n_heads * width, -1)
    outputs = graph.node("MatMul", phi, graph.constant("v", values))
    if constants.query == "each":
        # keys that are not there are no queries
        outputs = graph.where(mask_of_tokens, outputs, 0.0)
    outputs = graph.sum(outputs, 1)
    if constants.pooling == "sum":
        outputs = graph.node("Mul", outputs, counts)
    elif constants.query == "each":
        outputs = graph.node("Div", outputs, counts)
    outputs = graph.node("Add", outputs, graph.constant("b", constants.b))

    # sample-level features. Their spread is divided out of the coefficients: a division by one
    # number before a product is fused by onnxruntime, which rounds that number to float32
    if constants.extras_values is not None and constants.extras_spread is not None:
        centre = graph.constant("extras_centre", constants.extras_centre)
        coefficients = constants.extras_values / constants.extras_spread[:, None]
        centred = graph.node("Sub", _extras(graph, constants, sets, counts), centre)
        of_extras = graph.node("MatMul", centred, graph.constant("extras_values", coefficients))
        outputs = graph.node("Add", outputs, of_extras)
    return outputs


def _extras(graph: Graph, constants: LayerConstants, sets: PaddedSets, counts: str) -> str:
    """The sample-level features that are given, and those that the pooling makes of the keys."""
    parts = []
    if constants.n_extras:
        parts.append("extras")
    if constants.pooling in ADDS_FEATURES:
        parts.append(counts)
    if constants.pooling == "mean+statistics":
        is_key = graph.unsqueeze(sets.mask, 2)
        keys = graph.where(is_key, sets.keys, 0.0)
        mean = graph.node("Div", graph.sum(keys, 1), counts)
        deviations = graph.node("Sub", keys, graph.unsqueeze(mean, 1))
        deviations = graph.where(is_key, deviations, 0.0)
        squares = graph.sum(graph.node("Mul", deviations, deviations), 1)
        spread = graph.node("Sqrt", graph.node("Div", squares, counts))
        below = graph.where(is_key, sets.keys, math.inf)
        least = graph.node("ReduceMin", below, axes=[1], keepdims=0)
        above = graph.where(is_key, sets.keys, -math.inf)
        largest = graph.node("ReduceMax", above, axes=[1], keepdims=0)
        parts += [mean, spread, least, largest]
    if len(parts) == 1:
        return parts[0]
    return graph.join(*parts, axis=1)


def _queries(
    graph: Graph, constants: LayerConstants, keys: str, extended_keys: str, counts: str
) -> str:
    """x~_0 of every set before any hop, (n, j, D_q)."""
    if constants.query == "each":
        return extended_keys
    ones = graph.node("Div", counts, counts)  # (n, 1)
    if constants.query == "mean":
        means = graph.node("Div", graph.sum(keys, 1), counts)
        extended = graph.join(means, ones, axis=1)
    elif constants.query_dim:
        query = _scaled(
            graph,
            constants.scaling,
            "query",
            constants.query_centre,
            constants.query_spread,
        )
        extended = graph.join(query, ones, axis=1)
    else:
        # [0; √2], of which only the last coordinate is kept where there are no hops
        constant_query = np.array([[math.sqrt(2.0)]])
        if not constants.has_constant_query:
            constant_query = np.append(np.zeros(constants.dim), math.sqrt(2.0))[None]
        extended = graph.node("MatMul", ones, graph.constant("constant_query", constant_query))
    return graph.unsqueeze(extended, 1)


def _after_hop(
    graph: Graph,
    constants: LayerConstants,
    hop: np.ndarray,
    queries: str,
    keys: str,
    keys_last: str,
    mask: str,
) -> str:
    """[x_0; o_1; …; o_P; 1] with what the P patterns of a hop find, rounded to float32."""
    n_patterns, query_width, width = hop.shape
    side_by_side = hop.transpose(1, 0, 2).reshape(query_width, n_patterns * width)
    directions = graph.node("MatMul", queries, graph.constant("U", side_by_side))
    directions = graph.reshape(directions, 0, n_patterns, width)
    scores = graph.node("MatMul", directions, keys_last)
    scores = graph.where(graph.unsqueeze(mask, 1), scores, -math.inf)
    found = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), keys)
    found = graph.reshape(found, 0, 1, n_patterns * constants.dim)
    found = graph.node("Cast", found, to=TensorProto.FLOAT)
    found = graph.node("Cast", found, to=graph.number)

    # what was asked before, without its last coordinate; what was found; and a one
    asked = graph.node(
        "Slice",
        queries,
        graph.integers(0),
        graph.integers(query_width - 1),
        graph.integers(2),
    )
    last = graph.node(
        "Slice",
        queries,
        graph.integers(query_width - 1),
        graph.integers(query_width),
        graph.integers(2),
    )
    one = graph.node("Div", last, last)
    return graph.join(asked, found, one, axis=2)


def _scaled(graph: Graph, scaling: str, tokens: str, centre: Any, spread: Any) -> str:
    """Tokens, or queries, after scaling; a token of zeros stays on no sphere."""
    if scaling == "standard":
        centred = graph.node("Sub", tokens, graph.constant("centre", centre))
        return graph.node("Div", centred, graph.constant("spread", spread))
    if scaling == "sphere":
        # the largest coordinate is divided out first, so that squares cannot overflow
        largest = graph.node("ReduceMax", graph.node("Abs", tokens), axes=[-1], keepdims=1)
        units = graph.node("Div", tokens, _one_for_zero(graph, largest))
        squares = graph.sum(graph.node("Mul", units, units), -1, keepdims=True)
        lengths = graph.node("Sqrt", _one_for_zero(graph, squares))
        return graph.node("Div", units, lengths)
    return tokens


def _one_for_zero(graph: Graph, value: str) -> str:
    """Positive numbers as they are, 1 instead of 0."""
    is_positive = graph.node("Greater", value, graph.constant("zero", 0.0))
    return graph.where(is_positive, value, 1.0)


def _ones_like(graph: Graph, mask_of_tokens: str) -> str:
    """Ones of the shape (n, k, 1)."""
    number = graph.node("Cast", mask_of_tokens, to=graph.number)
    none = graph.node("Mul", number, graph.constant("zero", 0.0))
    return graph.node("Add", none, graph.constant("one", 1.0))


def _sigma(graph: Graph, activation: str, scores: str) -> str:
    """σ of every score."""
    if activation == "relu":
        return graph.node("Relu", scores)
    if activation == "square":
        return graph.node("Mul", scores, scores)
    if activation == "step":
        is_positive = graph.node("Greater", scores, graph.constant("zero", 0.0))
        return graph.node("Cast", is_positive, to=graph.number)
    if activation == "exp":
        return graph.node("Exp", scores)
    return scores


def _write_outputs(graph: Graph, constants: LayerConstants, outputs: str) -> list[Any]:
    """Name what the graph gives, and make labels and probabilities of scores."""
    n_outputs = len(constants.b)
    shape: list[Any] = ["samples"] if constants.single_output else ["samples", n_outputs]

    def named(name: str) -> Any:
        if constants.single_output:
            graph.node("Squeeze", outputs, graph.integers(1), output=name)
        else:
            graph.node("Identity", outputs, output=name)
        return helper.make_tensor_value_info(name, graph.number, shape)

    if constants.classes is None:
        return [named("prediction")]

    # one column of scores per class; those without weight are never predicted
    scores = outputs
    if n_outputs == 1:
        first = graph.node("Mul", outputs, graph.constant("first", constants.first_of_two))
        scores = graph.join(first, outputs, axis=1)
    has_weight = constants.class_has_weight
    if has_weight is not None and not has_weight.all():
        condition = graph.constant("has_weight", has_weight, np.bool_)
        scores = graph.where(condition, scores, -math.inf)

    # the label of the highest score, among the classes as they are
    winners = graph.node("ArgMax", scores, axis=1, keepdims=0)
    label_type, labels = _labels(graph, constants.classes)
    graph.node("Gather", labels, winners, output="label", axis=0)
    results = [helper.make_tensor_value_info("label", label_type, ["samples"]), named("scores")]
    if constants.temperature is not None:
        tempered = graph.node("Mul", scores, graph.constant("c", constants.temperature))
        graph.node("Softmax", tempered, output="probabilities", axis=1)
        shape_of_probabilities: list[Any] = ["samples", len(constants.classes)]
        results.append(
            helper.make_tensor_value_info("probabilities", graph.number, shape_of_probabilities)
        )
    return results


def _labels(graph: Graph, classes: np.ndarray) -> tuple[int, str]:
    """Labels as a constant: text, booleans, integers or numbers."""
    kind = classes.dtype.kind
    if kind == "b":
        return TensorProto.BOOL, graph.constant("labels", classes, np.bool_)
    if kind in "iu":
        return TensorProto.INT64, graph.constant("labels", classes, np.int64)
    if kind == "f":
        return TensorProto.DOUBLE, graph.constant("labels", classes, np.float64)
    texts: list[Any] = [str(label).encode() for label in classes]
    tensor = helper.make_tensor("labels", TensorProto.STRING, [len(texts)], texts)
    graph.initializers.append(tensor)
    return TensorProto.STRING, "labels"
