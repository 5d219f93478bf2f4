"""Query and key weights of trained transformers, and how far their heads lean towards the identity."""

from keyhole.checkpoints.identity import LayerLean, ModelLean, lean_of_layer, lean_of_model
from keyhole.checkpoints.layers import Checkpoint, Layer, open_checkpoint
from keyhole.checkpoints.tensors import TensorFile

__all__ = [
    "Checkpoint",
    "Layer",
    "LayerLean",
    "ModelLean",
    "TensorFile",
    "lean_of_layer",
    "lean_of_model",
    "open_checkpoint",
]
