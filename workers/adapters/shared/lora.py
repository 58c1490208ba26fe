"""LoRA adapters over the linear layers of a loaded model: any number are installed, one is active per batch.

The layers of the model keep their weights. A layer that some adapter changes gets a hook, which adds scale * B A x of
the active adapter to the layer's result. Without an active adapter the hook adds nothing.

1. `fit` finds the layers that an adapter names and brings its weights to the device, on a loading thread.
2. `install` and `remove` change the hooks, between batches on the device thread.
3. `using` makes an adapter active for a batch. `traced` also checks that all its layers ran.

`TextLoras` are those of a model that generates: rows of one packed step have the adapters of their requests. The
weights of all adapters lie in stacks (`workers.generation.lora_rows`), and a step says which rows have which adapter.
Hooks stand only while steps with adapters run, so that other steps cost what they cost without any adapter.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.quantized_linears import QuantizedLinear
from workers.generation.joined import Part
from workers.generation.lora_rows import Delta, LoraProducts, StepRows, WrongRows
from workers.loading.lora_files import FILES, LayerShape, LayerWeights, Lora, UnsupportedLora
from workers.loading.reading import unchanged

_WITHOUT_EFFECT = "pooler."
"""Part of the paths of layers whose results no family reads; such layers need not run."""


_serials = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class FittedLora:
    """An adapter ready to be installed: its weights by the path of each layer in the model.

    `digest` stands for the content of the weights, in all processes. `serial` is a number that no other adapter of this
    process has, loaded before or later.
    """

    deltas: dict[str, Delta]
    digest: str = ""
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for delta in self.deltas.values() for tensor in delta)


class LoraLayers:
    """The adapters of one model. All but `fit` belong to the device thread."""

    def __init__(self, model: Any) -> None:
        """Adapters name layers of `model` by path."""
        self._model = model
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self._installed: dict[str, FittedLora] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._active: dict[str, Delta] = {}
        self._seen: set[str] | None = None

    def fit(self, directory: Path) -> FittedLora:
        """Read an adapter in PEFT's layout.

        Raises `UnsupportedLora` where the adapter does not fit this model, and `FilesChanged`.
        """
        with unchanged(directory, only=FILES):
            lora = Lora(directory)
            layers = {path: self._layer(path) for path in lora.paths}
            for path, (_, layer) in layers.items():
                lora.refuse_misfit(path, LayerShape(layer.in_features, layer.out_features))
            weights = lora.read()
        deltas = {name: _fitted(weights[path], layer) for path, (name, layer) in layers.items()}
        return FittedLora(deltas, _digest(weights))

    def _layer(self, path: str) -> tuple[str, nn.Linear | LaidOutLinear | QuantizedLinear | Part]:
        """A layer and its path here; the adapter may have been trained on the model with or without a head."""
        for name in (path, path.removeprefix(self._prefix), f"{self._prefix}{path}"):
            try:
                layer = self._model.get_submodule(name)
            except AttributeError:
                continue
            if not isinstance(layer, nn.Linear | LaidOutLinear | QuantizedLinear | Part):
                raise UnsupportedLora(
                    f"{path}: is a {type(layer).__name__}, only linear layers are supported"
                )
            return name, layer
        raise UnsupportedLora(f"{path}: the model has no such layer")

    def install(self, name: str, lora: FittedLora) -> None:
        """Install an adapter under `name`, in the place of an earlier one."""
        self._installed[name] = lora
        self._hook()

    def remove(self, name: str, lora: FittedLora) -> None:
        """Remove an adapter, unless another one has its name by now."""
        if self._installed.get(name) is lora:
            del self._installed[name]
            self._hook()

    def _hook(self) -> None:
        """Keep hooks on exactly the layers that some adapter changes."""
        paths = {path for lora in self._installed.values() for path in lora.deltas}
        for path in self._hooks.keys() - paths:
            self._hooks.pop(path).remove()
        for path in paths - self._hooks.keys():
            layer = self._model.get_submodule(path)
            self._hooks[path] = layer.register_forward_hook(self._adding(path))

    def _adding(self, path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(_: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            delta = self._active.get(path)
            if delta is not None:
                # The result of a linear layer is a new tensor, so changing it in place is safe.
                result += F.linear(F.linear(given[0], delta.down), delta.up)
                if self._seen is not None:
                    self._seen.add(path)

        return add

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """While entered, the adapter `name` is active. Raises KeyError for an adapter that is not installed."""
        # NOTE: a batch with another adapter may be suspended while a new adapter is proven.
        before, self._active = self._active, self._installed[name].deltas
        try:
            yield
        finally:
            self._active = before

    @contextlib.contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """As `using`. Raises `UnsupportedLora` on exit if a layer of the adapter did not run."""
        self._seen = set()
        try:
            with self.using(name):
                yield
            idle = sorted(self._installed[name].deltas.keys() - self._seen)
        finally:
            self._seen = None
        missed = [path for path in idle if _WITHOUT_EFFECT not in path]
        if missed:
            raise UnsupportedLora(f"{missed[0]}: the model does not run this layer by itself")


def _digest(weights: Mapping[str, LayerWeights]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for path in sorted(weights):
        down, up, scale = weights[path]
        content.update(repr((path, scale, down.dtype, down.shape, up.dtype, up.shape)).encode())
        for side in (down, up):
            content.update(side.contiguous().view(torch.uint8).numpy().data)
    return content.hexdigest()


@torch.inference_mode()
def _fitted(weights: LayerWeights, layer: nn.Linear | LaidOutLinear | QuantizedLinear | Part) -> Delta:
    # The weight of a laid-out or a quantised layer lies on "meta"; laid-out layers run on the CPU.
    weight = layer.weight
    if isinstance(layer, QuantizedLinear):
        device = layer.device
    else:
        device = torch.device("cpu") if weight.device.type == "meta" else weight.device
    up = weights.up.float() * weights.scale
    return Delta(weights.down.to(device, weight.dtype), up.to(device, weight.dtype))


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
