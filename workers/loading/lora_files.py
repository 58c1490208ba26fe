"""Finding and reading the files of a LoRA adapter.

1. The name in a request is a key of the entry's `loras`, or one or two plain path parts below a directory of
   `catalog.lora_dirs`. A name that leads out of that directory, also by a link, does not exist.
2. Adapters have PEFT's layout (arXiv 2106.09685): `adapter_config.json` and `adapter_model.safetensors`. A target layer
   with weight W gives W x + scale * B A x. The scale is lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`;
   `rank_pattern` and `alpha_pattern` give single layers another rank or alpha. Settings that change the result in
   another way are refused by name, so that no adapter is applied in part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError

from ipc.catalog.entries import DirectorySource, HubSource, LoraSource, ModelEntry, is_lora_name
from ipc.decoding import learnt
from workers.loading.reading import safe_open
from workers.loading.source import SourceError, snapshot

Files = tuple[tuple[int, int] | None, ...]
"""Size and time of each file, None for a missing file; empty for a repository."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
_MOST_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "loftq_config",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
"""Fields that must be absent, false or empty."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the base unchanged."""
Positive = Annotated[int, msgspec.Meta(gt=0)]
Number = float | int


def find(entry: ModelEntry, dirs: Iterable[str], name: str) -> LoraSource | None:
    """The source of the adapter called `name`, or None."""
    if name in entry.loras:
        return entry.loras[name]
    if not is_lora_name(name):
        return None
    paths = (_below(Path(root), name) for root in dirs)
    return next((DirectorySource(str(path)) for path in paths if path is not None), None)


def _below(root: Path, name: str) -> Path | None:
    """The directory `name` below `root` if directory and files lie below `root` and hold an adapter, else None."""
    try:
        root = root.resolve(strict=True)
        directory = (root / name).resolve(strict=True)
        files = [(directory / file).resolve() for file in FILES]
    except (OSError, RuntimeError):
        return None
    inside = all(path.is_relative_to(root) for path in (directory, *files))
    return directory if inside and directory != root and files[0].is_file() else None


def state_of(source: LoraSource) -> Files:
    """The present state of the files; another state later means that the adapter changed."""
    if isinstance(source, HubSource):
        return ()
    return tuple(_stat(Path(source.path) / file) for file in FILES)


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def fetch(source: LoraSource) -> Path:
    """Local directory of the adapter. A repository is downloaded into the hub cache if missing.

    Raises SourceError for a missing file, and DownloadFailed.
    """
    if isinstance(source, DirectorySource):
        directory = Path(source.path)
    else:
        directory = snapshot(source.repo, source.revision, allow_patterns=list(FILES))
    missing = [file for file in FILES if not (directory / file).is_file()]
    if missing:
        has_others = CONFIG not in missing and any(directory.glob("adapter_model.*"))
        more = "; weights in another format are not loaded" if has_others else ""
        raise SourceError(f"the LoRA adapter has no {missing[0]}{more}")
    return directory


class UnsupportedLora(ValueError):
    """The files are no LoRA adapter, or an adapter with unsupported settings; the message names the field."""


class _Config(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that decide how weights are applied."""

    peft_type: str
    r: Positive = 8
    lora_alpha: Number = 8
    target_modules: str | list[str] | None = None
    rank_pattern: dict[str, Positive] = {}
    alpha_pattern: dict[str, Number] = {}
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True


class LayerShape(NamedTuple):
    """Width of a layer's rows before and after it."""

    inputs: int
    outputs: int


class LayerWeights(NamedTuple):
    """`down` [r, inputs] and `up` [outputs, r] in the stored dtype, and the factor of their product."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class Lora:
    """The layers of one adapter, by path in the model of the training; `read` reads the weights."""

    def __init__(self, directory: Path) -> None:
        """Read the config and the names and shapes of the weights. Raises `UnsupportedLora`, FileNotFoundError."""
        self._path = directory / WEIGHTS
        self._config = _read_config(directory / CONFIG)
        try:
            with safe_open(self._path, "pt") as file:
                names = list(file.keys())
                self._shapes = {name: list(file.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise UnsupportedLora(f"{WEIGHTS} is no whole safetensors file: {error}") from error
        self._sides = _pairs(names)
        for path in self._sides:
            _refuse_target(self._config.target_modules, path)

    @property
    def paths(self) -> list[str]:
        """Paths of the layers, sorted."""
        return sorted(self._sides)

    def refuse_misfit(self, path: str, layer: LayerShape) -> None:
        """Raise `UnsupportedLora` unless the weights of a layer have its rank and fit a layer of this shape."""
        down, up = (self._shapes[name] for name in self._sides[path])
        rank = self._rank(path)
        if down != [rank, layer.inputs] or up != [layer.outputs, rank]:
            raise UnsupportedLora(
                f"{path}: weights of shape {down} and {up} do not fit rank {rank} and a layer of "
                f"{layer.inputs} inputs and {layer.outputs} outputs"
            )
        if rank > max(layer):
            raise UnsupportedLora(f"{path}: rank {rank} is above the layer's width of {max(layer)}")

    def read(self) -> dict[str, LayerWeights]:
        """All weights on the CPU. Raises `UnsupportedLora` for values that are no finite floats."""
        weights = {}
        with safe_open(self._path, "pt") as file:
            for path, sides in self._sides.items():
                down, up = (_floats(file.get_tensor(name), name) for name in sides)
                weights[path] = LayerWeights(down, up, self._scale(path))
        return weights

    def _rank(self, path: str) -> int:
        return int(_of_pattern(self._config.rank_pattern, path, self._config.r))

    def _scale(self, path: str) -> float:
        rank = self._rank(path)
        alpha = float(_of_pattern(self._config.alpha_pattern, path, self._config.lora_alpha))
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


def _read_config(path: Path) -> _Config:
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise UnsupportedLora(f"{CONFIG} is larger than {_MOST_CONFIG_BYTES} bytes")
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(
            {name: value for name, value in fields.items() if value is not None}, learnt(_Config)
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedLora(f"{CONFIG}: {error}") from error
    if config.peft_type != "LORA":
        raise UnsupportedLora(f"{CONFIG}: peft_type is {config.peft_type[:64]!r}, only LORA is supported")
    if config.bias != "none":
        raise UnsupportedLora(f"{CONFIG}: bias is {config.bias[:64]!r}, only none is supported")
    refused = [name for name in _REFUSED if fields.get(name)]
    if refused:
        raise UnsupportedLora(f"{CONFIG}: {', '.join(refused)} is not supported")
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise UnsupportedLora(f"{CONFIG}: init_lora_weights {config.init_lora_weights!r} is not supported")
    return config


def _pairs(names: list[str]) -> dict[str, tuple[str, str]]:
    """Names of both weights by layer path. Raises `UnsupportedLora` for any other tensor."""
    sides: dict[str, dict[str, str]] = {}
    for name in names:
        tensor = _TENSOR.fullmatch(name)
        if tensor is None:
            raise UnsupportedLora(
                f"{WEIGHTS}: {name.removeprefix(_PREFIX)[:200]!r} is no LoRA weight of a linear layer"
            )
        sides.setdefault(tensor["path"], {})[tensor["side"]] = name
    for path, both in sides.items():
        if len(both) != 2:
            raise UnsupportedLora(f"{path}: one of its two weights is missing")
    if not sides:
        raise UnsupportedLora(f"{WEIGHTS} has no LoRA weights")
    return {path: (both["A"], both["B"]) for path, both in sides.items()}


def _refuse_target(targets: str | list[str] | None, path: str) -> None:
    """Raise `UnsupportedLora` for a layer that `target_modules` does not name."""
    if targets is None or targets == "all-linear":
        return
    if isinstance(targets, str):
        named = _pattern(targets, "target_modules").fullmatch(path) is not None
    else:
        named = any(path == target or path.endswith(f".{target}") for target in targets)
    if not named:
        raise UnsupportedLora(f"{path}: has weights, but target_modules does not name it")


def _of_pattern(patterns: Mapping[str, Number], path: str, default: Number) -> Number:
    """The value of the first pattern that matches the whole path or its end, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if _pattern(rf"(.*\.)?({pattern})$", "rank_pattern, alpha_pattern").match(path):
            return value
    return default


def _pattern(text: str, field: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UnsupportedLora(
            f"{CONFIG}: {field}: {text[:200]!r} is no regular expression: {error}"
        ) from error


def _floats(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise UnsupportedLora(f"{name.removeprefix(_PREFIX)}: holds values that are no finite floats")
    return tensor
