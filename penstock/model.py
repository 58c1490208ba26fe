"""Base classes for `model.py` in a model repository (docs/repository.md)."""

from workers.adapters.base import Pause
from workers.adapters.python_model import Context, DecoupledModel, Model

__all__ = ["Context", "DecoupledModel", "Model", "Pause"]
