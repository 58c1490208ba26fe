"""The description of a model out of the model's own files, and the facts that files of several families state.

1. A reader of a family (`penstock.own_models.readers`) fills one `Description`.
2. Widths, prompts and lengths are read here. Every file is known to be within bounds before a layout is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from penstock.own_models.files import CannotTell, ModelFiles, number_of, shown, text_of
from workers.adapters.shared import transformer_settings
from workers.adapters.shared.sentence_transformers_layout import PROMPTS_FILE, ModuleConfig
from workers.adapters.shared.transformer_settings import scaled_positions

Fields = dict[str, Any]
T = TypeVar("T")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
_OFFSET_BY_PADDING = ("roberta", "camembert", "mpnet")
"""Parts of the types of models whose table of positions begins with a row of padding."""
_MOST_PROMPTS = 1000
_LONGEST_REASON = 400


class Told(NamedTuple):
    """One line for the operator: what was chosen, its value, and where that was read."""

    what: str
    value: str
    where: str


@dataclass(slots=True)
class Description:
    """A model as its `files` describe the model.

    `fields` are those of a catalog entry, without `id` and `source`; `source` are further fields of a hub source.
    `stated` are fields that the caller gives. `told` has the lines for the operator.
    """

    files: ModelFiles
    stated: Mapping[str, Any]
    fields: Fields = field(default_factory=dict)
    source: Fields = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)

    def tell(self, what: str, value: str, where: str) -> None:
        """Add a line for the operator."""
        self.told.append(Told(what, value, where))

    def offer(self, inputs: list[str], **outputs: Fields) -> None:
        """The model takes these inputs and gives these outputs, each with its fields."""
        self.fields |= {"inputs": inputs, "outputs": outputs}


def guarded(read: Callable[[], T]) -> T:
    """The layout that `read` gives. Raises `CannotTell` for files that the reader cannot take."""
    try:
        return read()
    except CannotTell:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise CannotTell(
            f"the layout of the model cannot be read: {shown(error, _LONGEST_REASON)}"
        ) from error


def places_of(files: ModelFiles) -> list[str]:
    """Places of the modules, once every file that a layout is read from is known to be within bounds."""
    places = []
    for module in files.list("modules.json"):
        path = PurePosixPath(text_of(module, "path", "modules.json"))
        if len(path.parts) > 1 or ".." in path.parts or path.is_absolute():
            raise CannotTell(f"modules.json: path {shown(path)}: expected a directory of the model")
        places.append(str(path) if path.parts else "")
    small = [n for n in files.names if n.endswith((".json", ".metadata")) and n.rpartition("/")[0] in places]
    for name in {*small, PROMPTS_FILE, "config.json", "artifact.metadata"}:
        if (
            name.rpartition("/")[2] in ("config.json", PROMPTS_FILE, "artifact.metadata")
            or "sentence_" in name
        ):
            files.object(name)
    return places


def transformer_of(files: ModelFiles, folder: str) -> Fields:
    """The configuration of the transformer in `folder`, "" or "name/". Raises `CannotTell` without one."""
    config = files.object(f"{folder}config.json")
    if not config:
        raise CannotTell(
            f"{shown(folder)}config.json is missing, empty or no file; the file describes the transformer"
        )
    return config


def folder_of(places: Sequence[str]) -> str:
    """The directory of the first module, as "name/"; "" for the directory of the model."""
    return f"{places[0]}/" if places and places[0] else ""


def output_fields(width: int | None, **others: str) -> Fields:
    """Fields of an output: its width, if known, and others."""
    return {**({"dims": width} if width else {}), **others}


def width_of(config: Fields) -> int | None:
    """Width of the transformer, or of its part that reads texts."""
    inner = config.get("text_config")
    return number_of(config, *_WIDTHS) or number_of(inner if isinstance(inner, dict) else {}, *_WIDTHS)


def last_dense(modules: tuple[ModuleConfig, ...]) -> int | None:
    """Width of the vectors that the last Dense gives; None without a Dense."""
    widths = [number_of(dict(module.config), "out_features") for module in modules if module.kind == "Dense"]
    return widths[-1] if widths else None


def tell_width(model: Description, width: int | None) -> None:
    """Tell the width of the vectors, if known."""
    if width:
        model.tell("width", str(width), "the configuration of the layers")


def read_prompts(model: Description) -> None:
    """Take over the stored prompts. Raises `CannotTell` for prompts that are no texts, or too many."""
    stored = model.files.object(PROMPTS_FILE).get("prompts")
    if stored is not None and not isinstance(stored, dict):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected an object, got {shown(stored)}")
    prompts = {name: text for name, text in (stored or {}).items() if text is not None}
    if len(prompts) > _MOST_PROMPTS or not all(isinstance(text, str) for text in prompts.values()):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected at most {_MOST_PROMPTS} texts")
    listed = ", ".join(f"{name} {shown(text)!r}" for name, text in prompts.items() if text)
    model.tell("prompts", listed or "none", PROMPTS_FILE if stored else "none is stored")
    if any(prompts.values()):
        model.fields["runtime"] = {"prompts": prompts}


def read_length(model: Description, config: Fields, folder: str = "", sides: Sequence[Any] = ()) -> None:
    """Take over the longest text in tokens: as the layout or the tokenizer states, at most the number of positions.

    `sides` are lengths of queries and documents. The model reads the longest of them.
    """
    limit, where = _stated_length(model.files, folder)
    longest = max((side for side in sides if isinstance(side, int)), default=0)
    if longest > limit:
        limit, where = longest, "the lengths above"
    positions, scaled = _positions(config)
    if positions and not 0 < limit < positions:
        limit, where = min(limit or positions, scaled), f"{folder}config.json"
    if limit:
        model.fields["max_sequence_length"] = limit
        model.tell("length", f"{limit} tokens", where)
    else:
        tell_no_length(model)


def tell_no_length(model: Description) -> None:
    """Tell that the load finds the length."""
    model.tell("length", "found by the load", "no file states a length")


def _stated_length(files: ModelFiles, folder: str) -> tuple[int, str]:
    """The length that the layout states, else the tokenizer, and in which file; (0, "") if neither does."""
    layouts = sorted(
        n for n in files.names if n.startswith(f"{folder}sentence_") and n.endswith("_config.json")
    )
    if layouts and "modules.json" in files.names:
        settings = guarded(lambda: transformer_settings.read_length(files.object(layouts[0]), layouts[0]))
        if settings:
            return settings, layouts[0]
    tokenizer = f"{folder}tokenizer_config.json"
    length = number_of(files.object(tokenizer), "model_max_length")
    return (length, tokenizer) if length else (0, "")


def _positions(config: Fields) -> tuple[int | None, int]:
    """Positions of the model, None where none are stated, and those that a scaled rope reaches."""
    inner = config.get("text_config")
    places = {**config, **inner} if isinstance(inner, dict) else config
    positions = number_of(places, "max_position_embeddings", "n_positions")
    scaled = scaled_positions(places, positions or 0)
    padding = places.get("pad_token_id")
    offset = any(part in str(places.get("model_type")) for part in _OFFSET_BY_PADDING)
    if not positions or not offset or not isinstance(padding, int):
        return positions, scaled
    if padding >= positions - 1:
        raise CannotTell(
            f"config.json: pad_token_id {padding} leaves none of {positions} positions (max_position_embeddings)"
        )
    return positions - padding - 1, scaled - padding - 1
