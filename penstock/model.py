"""The classes that a `model.py` of a model repository subclasses one of (docs/repository.md)."""

from workers.adapters.base import Pause
from workers.adapters.python_model import Context, DecoupledModel, Model

__all__ = ["Context", "DecoupledModel", "Model", "Pause"]
