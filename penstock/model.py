"""The class that a `model.py` of a model repository subclasses (docs/repository.md)."""

from workers.adapters.shared.model_class import Context, Model

__all__ = ["Context", "Model"]
