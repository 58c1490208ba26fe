"""LoRA adapters of a model that generates: rows of one packed step have the adapters of their requests.

As `LoraLayers`, but the weights of all adapters lie in stacks (`workers.generation.lora_rows`), and a step says which
rows have which adapter. Hooks stand only while steps with adapters run, so that other steps cost what they cost without
any adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.lora import FittedLora, LoraLayers
from workers.adapters.shared.quantized_linears import QuantizedLinear
from workers.generation.joined import Part
from workers.generation.lora_rows import LoraProducts, StepRows, WrongRows
from workers.loading.lora_files import UnsupportedLora


class TextLoras(LoraLayers):
    """The adapters of one model that generates. All but `fit` belong to the device thread."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.active = False
        self._products, self._rows = LoraProducts(), StepRows(0, (), ())
        self._standing: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        """Whether there is any adapter."""
        return bool(self._installed) or bool(self._standing)

    def get(self, name: str) -> FittedLora:
        """The adapter of that name. Raises KeyError."""
        return self._installed[name]

    @contextlib.contextmanager
    def over(self, rows: StepRows | None) -> Iterator[None]:
        """While entered, the model runs with the adapters of these rows; None: without any."""
        if rows is None:
            self._take_hooks_off()
            yield
            return
        if not self._standing:
            self._standing = [
                self._model.get_submodule(path).register_forward_hook(self._adding(path))
                for path in self._products.paths
            ]
        self.active, self._rows = True, rows
        try:
            yield
        finally:
            self.active = False

    @contextlib.contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """As `LoraLayers.traced`, of a request that names the adapter.

        Raises `UnsupportedLora` also for a layer that the model runs on other rows than tokens.
        """
        try:
            with super().traced(name):
                yield
        except WrongRows as error:
            raise UnsupportedLora(str(error)) from error

    def _layer(self, path: str) -> tuple[str, nn.Linear | LaidOutLinear | QuantizedLinear | Part]:
        name, layer = super()._layer(path)
        if layer is self._model.get_output_embeddings():
            raise UnsupportedLora(
                f"{path}: is the head over the vocabulary, whose adapters are not supported"
            )
        if type(layer) not in (nn.Linear, LaidOutLinear, Part) and not isinstance(layer, QuantizedLinear):
            raise UnsupportedLora(
                f"{path}: is a {type(layer).__name__}, only plain linear layers are supported"
            )
        return name, layer

    def _hook(self) -> None:
        """Lay the weights of the installed adapters out; the next step with adapters puts hooks on their layers."""
        self._take_hooks_off()
        self._products.arrange(self._installed.values())

    def _take_hooks_off(self) -> None:
        for hook in self._standing:
            hook.remove()
        self._standing = []

    def _adding(self, path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        products = self._products

        def add(_: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            if self.active:
                products.add(path, self._rows, given[0], result)
                if self._seen is not None:
                    self._seen.add(path)

        return add
