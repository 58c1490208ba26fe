"""A causal language model out of a GGUF file: configuration, tokenizer, and weights, turned into numbers one by one.

1. The configuration comes from the fields of the file by transformers' table of names. Here stands what the table
   leaves out: the width of a head, scaled rotary factors, and scales that llama.cpp knows by the number of layers.
2. transformers builds the model without memory and asks for each weight once (`gguf_blocks.read_tensor`).
3. Tensors have llama.cpp's names and order. The table of the package `gguf` gives the name that a parameter has in the
   file; rows of Llama's queries and keys are put back into transformers' order, and Gemma's norms lose the one that
   llama.cpp adds.

`read_tokenizer` makes transformers' tokenizer with the vocabulary, merges, template and end tokens stored:

1. transformers makes the tokenizer from vocabulary, merges and types of tokens.
2. `tokenizer.ggml.pre` names how a text is cut into words before the merges. transformers knows some of the names and
   takes GPT-2's way for all others, with other tokens as the result; so the other known ways stand here, and a name
   that nobody knows is refused.
3. An answer ends with the stored end tokens and with control tokens whose spelling says so, as in llama.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedTokenizerFast,
    modeling_utils,
)
from transformers.initialization import no_init_weights
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from ipc import extras
from workers.adapters.shared.building import BUILDING, WeightCount
from workers.adapters.shared.gguf_blocks import AS_STORED, Ahead, checked, read_blocks, read_runs, read_tensor
from workers.adapters.shared.quantized_linears import INT4, INT8, quantize
from workers.adapters.shared.quantizing import Quantizer
from workers.libraries import replaced
from workers.loading.gguf_file import GgufModel, GgufRefused, StoredTensor

log = logging.getLogger(__name__)

_HEAD, _WORDS = "output.weight", "token_embd.weight"
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration."""
_TABLES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures that transformers' table spells in another way."""
_TYPES = {"gemma3": "gemma3_text"}
"""Types of models that differ from their name in the table."""
_ORIGINAL_TOKENS = 8192
"""Length that Llama 3.1 and its successors were trained with before their rotary factors were scaled."""
_ROOT_OF_WIDTH = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and numbers of layers whose attention is scaled by the width of all heads over their number."""
_FURTHER = {
    "gemma": {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
}
"""Fields that transformers' table leaves out."""
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
"""Parameters that hold all experts of a layer, with the tensors that make them up."""
_ROTARY = "RotaryEmbedding"
"""How classes of rotary embeddings end in transformers."""
_FLOATS = ("F32", "F16", "BF16")

Fix = Callable[[torch.Tensor], torch.Tensor]
_FIELD = "tokenizer.ggml."
_AS_GPT2 = ("gpt-2", "olmo", "mpt", "phi-2", "jais", "jina-v2-de", "jina-v2-es", "gigachat", "mellum")
"""Names of GPT-2's way to cut a text."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of GPT-2's way after each digit was made a word of its own."""
_UNNAMED = ("default", "")
_ENDS = ("eos", "eot", "eom")
_SPELLED_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
    )
)
"""Control tokens that end an answer in every model that has them."""
_CONTROL = 3
"""The type of control tokens in `tokenizer.ggml.token_type`."""
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def config_of(model: GgufModel) -> Any:
    """The configuration of transformers. Raises `GgufRefused` for rotary factors that no configuration states."""
    architecture, fields = model.architecture, model.fields
    name = _TABLES.get(architecture, architecture)
    table: Any = GGUF_CONFIG_MAPPING[name]
    names = {**table, **_FURTHER.get(architecture.rstrip("0123456789"), {}), **_FURTHER.get(architecture, {})}
    stated: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}))
    stated |= {
        ours: found for theirs, ours in names.items() if ours and (found := model.get(theirs)) is not None
    }
    stated |= _widths(model)
    stated |= {
        "vocab_size": model.tensors[_WORDS].shape[0],
        "tie_word_embeddings": _HEAD not in model.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    scaling = _scaling(model, stated.get("rope_theta", 10000.0))
    stated |= {"rope_scaling": scaling} if scaling else {}
    if architecture == "phi3" and scaling:
        stated["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return AutoConfig.for_model(_TYPES.get(architecture, name), **stated)


def _widths(model: GgufModel) -> dict[str, Any]:
    """The width of a head, and what follows from the width. Raises `GgufRefused` for heads that turn in part."""
    even = model.get("embedding_length") // model.get("attention.head_count")
    stated = model.get("attention.key_length")
    turned = model.get("rope.dimension_count", stated or even)
    # NOTE: old files of Llama say how wide a head is by the numbers that turn only.
    width = stated or (turned if model.architecture == "llama" else even)
    widths: dict[str, Any] = {"head_dim": width} if width != even or stated else {}
    if model.architecture.startswith("gemma"):
        rooted = (model.architecture, model.get("block_count")) in _ROOT_OF_WIDTH
        widths["query_pre_attn_scalar"] = even if rooted else width
    if turned == width:
        return widths
    if model.architecture != "phi3":
        raise GgufRefused(
            f"{model.name}: rope.dimension_count {turned}: a head of {model.architecture} turns all its {width} numbers"
        )
    return widths | {"partial_rotary_factor": turned / width}


def _scaling(model: GgufModel, theta: float) -> dict[str, Any]:
    """The scaling of rotary factors; empty without. Raises `GgufRefused`."""
    kind, factor = model.get("rope.scaling.type", "none"), model.get("rope.scaling.factor", 1.0)
    original = model.get("rope.scaling.original_context_length", model.get("context_length"))
    long, short = (_values(model, name) for name in _ROPE[1:])
    if long and short:
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        attention = model.get("rope.scaling.attn_factor")
        scaling |= {"attention_factor": attention} if attention else {}
        return scaling | {"original_max_position_embeddings": original}
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor != 1.0:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind == "longrope":
        raise GgufRefused(
            f"{model.name}: rope.scaling.type longrope, and the file has no rope_factors_long.weight"
        )
    factors = _values(model, _ROPE[0])
    return _llama3(model, factors, theta) if factors and max(factors) != 1.0 else {}


def _llama3(model: GgufModel, factors: Sequence[float], theta: float) -> dict[str, Any]:
    """Llama 3's scaling, whose result llama.cpp stores in place of its settings. Raises `GgufRefused` for another."""
    factor, low, high = round(max(factors), 3), 1.0, 4.0
    width = 2 * len(factors)
    waves = [2 * math.pi * theta ** (2 * at / width) for at in range(len(factors))]
    expected = []
    for wave in waves:
        smooth = min(1.0, max(0.0, (_ORIGINAL_TOKENS / wave - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if any(abs(found - ours) > 1e-3 * ours for found, ours in zip(factors, expected, strict=True)):
        raise GgufRefused(f"{model.name}: the rotary factors of {_ROPE[0]} are not those of Llama 3")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return scaling | {"original_max_position_embeddings": _ORIGINAL_TOKENS}


def _values(model: GgufModel, name: str) -> list[float]:
    """The numbers of a small tensor; none where the file has no such tensor."""
    stored = model.tensors.get(name)
    return [] if stored is None else read_tensor(stored, torch.float32).flatten().tolist()


def build(
    model: GgufModel,
    config: Any,
    dtype: torch.dtype,
    progress: Callable[[str, float], None],
    quantizer: Quantizer | None = None,
    ahead: Ahead | None = None,
) -> Any:
    """The model in eval mode on CPU; progress of the phase "weights" is the part of the numbers that are made.

    With a quantizer linear layers stay quantised, and are already on the device of the quantizer. Without one `ahead`
    has the tensors that were made before.

    Raises `GgufRefused` for tensors that have no place in the model, for missing ones and for other shapes.
    """
    factory: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with BUILDING, _made_without_sympy(factory):
        with torch.device("meta"):
            empty = factory(config)
        shapes = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
        weights = dict(_weights(model, config, shapes, dtype))
        used = {id(part) for weight in weights.values() for part in weight.parts}
        spare = [
            name for name, stored in model.tensors.items() if id(stored) not in used and name not in _ROPE
        ]
        if spare:
            more = f" and {len(spare) - 1} more" if len(spare) > 1 else ""
            raise GgufRefused(
                f"{model.name}: {model.architecture} has no place for the tensor {spare[0]}{more}"
            )
        count = WeightCount(model.values, progress)
        for weight in weights.values():
            weight.made = count.make
            if ahead is not None and quantizer is None:
                weight.ahead = ahead.take
        if quantizer is not None:
            held = _Held(model.name, quantizer)
            for name in quantizer.names(empty) & weights.keys():
                weights[name].hold = partial(held, name)
            shared = quantizer.table_of(empty, weights)
            if shared:
                weights[shared].hold = held.table
        # PERF: the names are those of the model, and the table of all renamings takes half a second to make.
        renamings = replaced([modeling_utils], "get_model_conversion_mapping", lambda *_, **__: [])
        with count.raising(), renamings:
            loaded: Any = factory.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
        if quantizer is not None:
            held.tell()
            quantizer.finish(loaded)
    return loaded


@contextlib.contextmanager
def _made_without_sympy(factory: Any) -> Iterator[None]:
    """In this block a model of the class `factory` that is made without memory is made without torch's compiler.

    PERF: torch makes random numbers and the factors of rotary embeddings without memory in Python, with sympy, whose
    import takes a third of a second. All weights come from the file; rotary embeddings are small, and have memory.
    """
    kinds = [kind for name, kind in vars(sys.modules[factory.__module__]).items() if name.endswith(_ROTARY)]
    with contextlib.ExitStack() as places:
        places.enter_context(replaced([factory], "__init__", _within(no_init_weights, factory.__init__)))
        for kind in kinds:
            places.enter_context(
                replaced([kind], "__init__", _within(partial(torch.device, "cpu"), kind.__init__))
            )
        yield


def _within(place: Callable[[], Any], make: Callable[..., None]) -> Callable[..., None]:
    """`make`, run inside of the context that `place` gives."""

    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> None:
        with place():
            make(*arguments, **named)

    return made


class _Held:
    """Quantises the weights of a file, one after another.

    Blocks of `AS_STORED` stay as they are where their kind is asked for. All other blocks become int8, since each
    rounding to 4 bits costs more than the first.
    """

    def __init__(self, file: str, quantizer: Quantizer) -> None:
        self._file, self._quantizer, self._turn = file, quantizer, threading.Lock()
        self._changed: Counter[tuple[str, str]] = Counter()
        self._kept: Counter[str] = Counter()

    def __call__(self, name: str, weight: _Weight) -> torch.Tensor:
        """A stand-in for a weight, which the quantizer has."""
        quantizer, kinds = self._quantizer, [part.kind for part in weight.parts]
        with self._turn:
            kind = quantizer.kind_of(name)
            if len(kinds) == 1 and kinds[0] in AS_STORED.get(kind, ()):
                self._kept[kinds[0]] += 1
                return quantizer.hold(name, read_blocks(weight.parts[0], kind, weight.fix))
            if kind == INT4 and any(each not in _FLOATS for each in kinds):
                kind = INT8
            for each in kinds:
                self._changed[each, kind] += 1
            return quantizer.hold(name, quantize(weight.numbers(torch.float32), kind))

    def table(self, weight: _Weight) -> torch.Tensor:
        """A stand-in for the table that is the head too, which the quantizer has."""
        outer, inner = weight.shape
        with self._turn:
            return self._quantizer.hold_table((outer, inner), weight.runs())

    def tell(self) -> None:
        """Say in the log what blocks have become."""
        for (stored, kind), count in sorted(self._changed.items()):
            log.info("%s: %d weights of %s have become %s", self._file, count, stored, kind)
        for stored, count in sorted(self._kept.items()):
            log.info("%s: %d weights of %s are read as they are", self._file, count, stored)


@dataclass(slots=True)
class _Weight:
    """One parameter, made when indexed: the tensors of which it consists, joined along `axis`, and then fixed."""

    parts: Sequence[StoredTensor]
    dtype: torch.dtype
    shape: tuple[int, ...]
    fix: Fix | None = None
    axis: int = 1
    made: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda numbers: numbers()
    hold: Callable[[_Weight], torch.Tensor] | None = None
    ahead: Callable[[StoredTensor], torch.Tensor] | None = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        hold = self.hold
        return self.made(lambda: self.numbers(self.dtype) if hold is None else hold(self))

    def runs(self) -> Iterator[torch.Tensor]:
        """The parameter [outer, inner] as runs of its rows, float32."""
        if self.fix is None and len(self.parts) == 1 and self.parts[0].shape == self.shape:
            for run in read_runs(self.parts[0]):
                yield checked(run, self.parts[0])
        else:
            yield self.numbers(torch.float32)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The parameter as numbers. Raises `GgufRefused` for numbers that are not finite."""
        # NOTE: Gemma's norms are stored as float32 beside one; the one goes before the number is rounded.
        exact = torch.float32 if self.fix is not None else dtype
        early = self.ahead if exact == torch.float32 else None
        read = early or (lambda part: read_tensor(part, exact))
        parts = [checked(read(part), part) for part in self.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)
        return (whole if self.fix is None else self.fix(whole)).reshape(self.shape).to(dtype)


def _weights(
    model: GgufModel, config: Any, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, _Weight]]:
    """The parameters by transformers' names. Raises `GgufRefused` for what the file lacks."""
    package = extras.require("gguf", "gguf")
    kind = next(key for key, name in package.MODEL_ARCH_NAMES.items() if name == model.architecture)
    table = package.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, end = name.rpartition(".")
        expert = next((parts for ending, parts in _EXPERTS.items() if name.endswith(ending)), None)
        if expert is not None:
            layer = name.split(".layers.")[1].partition(".")[0]
            stored = [f"blk.{layer}.{part}.weight" for part in expert]
        else:
            stored = [f"{table.get_name(base) or base}.{end}"]
        lacking = next((each for each in stored if each not in model.tensors), None)
        if lacking is not None:
            raise GgufRefused(f"{model.name}: the tensor {lacking} is missing, {model.architecture} has one")
        parts = [model.tensors[each] for each in stored]
        if math.prod(shape) != sum(math.prod(part.shape) for part in parts):
            shapes_text = " and ".join(str(list(part.shape)) for part in parts)
            raise GgufRefused(
                f"{model.name}: the tensor {stored[0]} has the shape {shapes_text}, the fields describe {list(shape)}"
            )
        yield name, _Weight(parts, dtype, shape, _fix(model, stored[0]))


def _fix(model: GgufModel, name: str) -> Fix | None:
    """What undoes llama.cpp's change of a tensor; None for a tensor that is stored as transformers has it."""
    if model.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return lambda weight: weight - 1
    if model.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = model.get("attention.head_count")
        count = heads if ".attn_q." in name else model.get("attention.head_count_kv", heads)
        return lambda weight: _paired_to_halves(weight, count)
    return None


def _paired_to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (a0 b0 a1 b1 ...), as llama.cpp turns them, to halves (a0 a1 ... b0 b1 ...)."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def read_tokenizer(model: GgufModel) -> Any:
    """The tokenizer of a file. Raises `GgufRefused` for missing fields, and for an unknown way to cut texts."""
    fields = model.fields
    stated = {
        ours: fields[f"tokenizer.{name}"]
        for name, ours in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{name}" in fields
    }
    byte_level = stated["tokenizer_type"] == "gpt2"
    if byte_level and "merges" not in stated:
        raise GgufRefused(f"{model.name}: there is no {_FIELD}merges")
    if not byte_level and not ("merges" in stated or "scores" in stated):
        raise GgufRefused(f"{model.name}: there is neither {_FIELD}merges nor {_FIELD}scores")
    backend, _ = convert_gguf_tokenizer(model.architecture, stated)
    if byte_level:
        _cut_as_named(model, backend, str(stated.get("pre_tokenizer_type", "")))
    elif stated.get("add_prefix_space") is False and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never", split=False)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(
        tokenizer_object=_Given(backend),
        # NOTE: a SentencePiece vocabulary begins a text with its first token unless the file says otherwise.
        add_bos_token=fields.get(f"{_FIELD}add_bos_token", not byte_level),
        add_eos_token=fields.get(f"{_FIELD}add_eos_token", False),
        clean_up_tokenization_spaces=False,
        model_max_length=model.get("context_length"),
        **{name: _token(model, f"{field}_token_id") for name, field in _NAMED.items()},
    )
    tokenizer.chat_template = _template(fields)
    return tokenizer


class _Given:
    """A backend that nobody else has: the copy that transformers makes is the backend itself.

    PERF: a copy is written as JSON and read again, which takes as long as making the backend.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return self._backend


def _cut_as_named(model: GgufModel, backend: Any, name: str) -> None:
    """Let `backend` cut texts in the way called `name`. Raises `GgufRefused` for a name that is not known."""
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if name not in (*_AS_GPT2, *_SINGLE_DIGITS, *_UNNAMED):
        raise GgufRefused(
            f"{model.name}: {_FIELD}pre {name[:50]!r}: nobody knows here how texts are cut into words"
        )
    if name in _UNNAMED:
        log.warning("%s does not say how texts are cut into words; GPT-2's way is taken", model.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name in _SINGLE_DIGITS else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])


def _token(model: GgufModel, field: str) -> str | None:
    """The token whose id stands in a field, None without the field. Raises `GgufRefused` for an id that is no token."""
    tokens, place = model.fields[f"{_FIELD}tokens"], model.fields.get(f"{_FIELD}{field}")
    if place is None:
        return None
    if not (isinstance(place, int) and 0 <= place < len(tokens)):
        raise GgufRefused(f"{model.name}: {_FIELD}{field} {place!r}: there are {len(tokens)} tokens")
    return str(tokens[place])


def _template(fields: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all of them by name where the file has several."""
    main = fields.get("tokenizer.chat_template")
    names = fields.get("tokenizer.chat_templates") or ()
    others = {name: found for name in names if (found := fields.get(f"tokenizer.chat_template.{name}"))}
    return {"default": main, **others} if main and others else main


def end_ids(model: GgufModel) -> list[int]:
    """Tokens that end an answer."""
    stored = (model.fields.get(f"{_FIELD}{name}_token_id") for name in _ENDS)
    tokens, kinds = model.fields[f"{_FIELD}tokens"], model.fields.get(f"{_FIELD}token_type") or ()
    pairs = enumerate(zip(tokens, kinds, strict=False))
    spelled = {at for at, (token, kind) in pairs if kind == _CONTROL and token in _SPELLED_ENDS}
    return sorted(spelled | {found for found in stored if isinstance(found, int)})
