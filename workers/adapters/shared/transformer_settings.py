"""What a Transformer module of sentence-transformers stores beside its weights, and which of these settings hold here.

The file is `sentence_bert_config.json`, or one of older names. Keys and their order are those of sentence-transformers
6.2 (`base/modules/transformer.py`):

max_seq_length      the longest text; `processor_kwargs.model_max_length` goes before
query_length,       the longest query and the longest document of a request that states its side
document_length
processing_kwargs   arguments of each call of the tokenizer; of these `max_length` goes before all other lengths
do_lower_case       lower-cases before the tokenizer
*_kwargs            arguments of transformers' loaders, under older names `*_args`

A setting that would change an answer and is not offered here is refused by name: another task, another output of the
transformer, chat templates, a tokenizer that lies elsewhere.

How far a scaled rope reaches, by the configuration of a transformer.

transformers 5 stores `rope_parameters`, one map or one for each kind of layer; older files store `rope_scaling`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_NOT_STORED = frozenset(
    {
        *("trust_remote_code", "use_kernels", "allow_all_kernels", "kernel_config"),
        *("weights_only", "subfolder", "gguf_file", "cache_dir"),
    }
)
"""Arguments of transformers' loaders that a stored file may not set: code of others, and files elsewhere."""
_NO_LIMIT = 10**9
"""transformers marks "no limit stored" with a larger number."""
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
"""What the transformer gives for each task, and the name under which the next module reads that."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "truncation": (True, "longest_first"),
    "padding": (True, False, "longest"),
}
"""Arguments of a call of the tokenizer that change nothing with these values."""
_OF_NO_ANSWER = frozenset(
    {"padding_side", "pad_to_multiple_of", "return_tensors", "return_attention_mask", "truncation_side"}
    | {"verbose", "return_token_type_ids"}
)
"""Arguments that change no answer of a text alone. transformers reads no `truncation_side` of a call."""
_PLAIN = ("default", None)


class UnsupportedLayoutError(ValueError):
    """The directory holds a module, a setting or a combination of modules that this family cannot run."""


@dataclass(frozen=True, slots=True)
class TransformerSettings:
    """The settings of a transformer in `transformer`. Lengths are in tokens; `*_arguments` go to the loaders."""

    transformer: Path
    max_sequence_length: int | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: Mapping[str, Any] | None = None
    lower_case: bool = False
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    config_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_arguments: Mapping[str, Any] = field(default_factory=dict)

    def side_limits(self, limit: int) -> dict[bool | None, int]:
        """The longest query and document, by `is_query`, of a model whose texts have at most `limit` tokens.

        Raises UnsupportedLayoutError for a side that is longer.
        """
        lengths = {True: self.query_length, False: self.document_length}
        longest = max(length or 0 for length in lengths.values())
        if longest > limit:
            raise UnsupportedLayoutError(
                f"query_length or document_length: {longest} tokens are more than the {limit} of this model; state "
                f"max_sequence_length: {longest} in its entry if the model has the positions"
            )
        return {side: length for side, length in lengths.items() if length}


def read_json(path: Path) -> dict[str, Any]:
    """The object stored at `path`; empty without the file."""
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def read_settings(directory: Path, task: str) -> TransformerSettings:
    """The settings beside the weights in `directory`. Raises UnsupportedLayoutError for those that cannot hold."""
    path = next((directory / name for name in TRANSFORMER_CONFIGS if (directory / name).is_file()), None)
    if path is None:
        return TransformerSettings(directory)
    config, name = read_json(path), path.name
    _refuse_other_outputs(config, task, name)
    per_call = _call_length(config.get("processing_kwargs") or {}, name)
    sides = {side: whole(config, side, name) for side in ("query_length", "document_length")}
    return TransformerSettings(
        directory,
        max_sequence_length=read_length(config, name),
        **({} if per_call else sides),
        query_expansion=config.get("query_expansion"),
        lower_case=bool(config.get("do_lower_case", False)),
        model_arguments=_arguments(config, "model_kwargs", "model_args"),
        config_arguments=_arguments(config, "config_kwargs", "config_args"),
        tokenizer_arguments=_tokenizer_arguments(config),
    )


def read_length(config: Mapping[str, Any], name: str) -> int | None:
    """The longest text that the file `name` with this `config` states, whatever the side; None without."""
    length = (
        _call_length(config.get("processing_kwargs") or {}, name)
        or whole(_tokenizer_arguments(config), "model_max_length", name)
        or whole(config, "max_seq_length", name)
    )
    return length if length is not None and length < _NO_LIMIT else None


def whole(stored: Mapping[str, Any], key: str, name: str) -> int | None:
    """A whole number above 0, None where the file `name` states none. Raises UnsupportedLayoutError for others."""
    value = stored.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise UnsupportedLayoutError(f"{name}: {key}: expected a whole number above 0, got {value!r:.64}")


def _tokenizer_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return _arguments(config, "processor_kwargs", "tokenizer_args")


def _arguments(config: Mapping[str, Any], new: str, old: str) -> dict[str, Any]:
    """Arguments of a loader, but those that lead to code or to unchecked files."""
    stored = dict(config.get(new) or config.get(old) or {})
    return {name: value for name, value in stored.items() if name not in _NOT_STORED}


def _refuse_other_outputs(config: Mapping[str, Any], task: str, name: str) -> None:
    """Raise UnsupportedLayoutError for another task, other outputs than those of the task, and another tokenizer."""
    stored = config.get("transformer_task", task)
    if stored != task:
        raise UnsupportedLayoutError(f"unsupported transformer task {stored!r}")
    if config.get("tokenizer_name_or_path"):
        raise UnsupportedLayoutError(
            f"{name}: tokenizer_name_or_path: a tokenizer elsewhere is not read; store the tokenizer beside the model"
        )
    output, reads = _OUTPUTS[task]
    modalities = config.get("modality_config")
    if modalities is None:
        return
    text = modalities.get("text") if isinstance(modalities, dict) else None
    if text != {"method": "forward", "method_output_name": output} or "message" in modalities:
        raise UnsupportedLayoutError(
            f"{name}: modality_config: expected text alone, by forward and {output}; got {modalities!r:.200}"
        )
    if config.get("module_output_name", reads) != reads:
        raise UnsupportedLayoutError(f"{name}: module_output_name: expected {reads}")


def _call_length(stored: Mapping[str, Any], name: str) -> int | None:
    """`max_length` of each call of the tokenizer. Raises UnsupportedLayoutError for arguments that change answers."""
    arguments: dict[str, Any] = {}
    for part in ("common", "text"):
        arguments.update(stored.get(part) or {})
    for argument, value in arguments.items():
        if (
            argument == "max_length"
            or argument in _OF_NO_ANSWER
            or value in _WITHOUT_EFFECT.get(argument, ())
        ):
            continue
        raise UnsupportedLayoutError(
            f"{name}: processing_kwargs: {argument} {value!r:.64} is not offered; of the arguments that change answers "
            "only max_length is"
        )
    return whole(arguments, "max_length", f"{name}: processing_kwargs")


def scaled_positions(config: Mapping[str, Any], positions: int) -> int:
    """Positions of a transformer with `positions` plain ones: the factor times the original positions, if that is more.

    The original positions are those before scaling; `positions` where the configuration states none.
    """
    reached = [positions]
    for rope in _ropes(config):
        factor = rope.get("factor")
        if rope.get("rope_type", rope.get("type")) in _PLAIN or not isinstance(factor, int | float):
            continue
        original = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        reached.append(int(factor * (original if isinstance(original, int) else positions)))
    return max(reached)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rope of a configuration."""
    for name in ("rope_parameters", "rope_scaling"):
        stored = config.get(name)
        if isinstance(stored, Mapping):
            yield stored
            yield from (part for part in stored.values() if isinstance(part, Mapping))
