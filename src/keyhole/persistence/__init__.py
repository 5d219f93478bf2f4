"""Models as files: safetensors with a JSON description. Nothing in a file is ever executed."""

from keyhole.persistence.models import SavedModel, load, read_model, save
from keyhole.persistence.schema import Schema

__all__ = ["SavedModel", "Schema", "load", "read_model", "save"]
