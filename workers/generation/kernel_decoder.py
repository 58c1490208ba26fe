"""The layers of a decoder on CUDA, computed by few kernels in place of transformers' modules.

Between its products a layer of Llama's form launches some thirty kernels. `KernelDecoder` launches four:

1. the residual sum with the norm of the sum, twice; of the last norm only the rows whose logits are asked for;
2. rotary positions of queries and keys, with the keys and values written to the cache;
3. the activation of the gate times the other half.

Queries, keys and values may be one product, as in Phi-3, or three. Norms behind a layer's parts (Gemma 2 and 3) belong
to the residual sum. The attention formula of each layer is what the layer has told in a measuring pass
(`PagedAttention.formulas`).

`kernel_decoder` compares each kernel with the modules of each layer. The proof at load then compares whole steps
(`workers.generation.proof`). Where Triton is missing, a comparison fails, or the model has another form, steps run
through the modules. So do steps with pictures, LoRA adapters and positions that depend on the length of a text.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.device.oom import obstacle_of
from workers.device.varlen import HALF
from workers.generation.fused import (
    Cells,
    HeadRows,
    Kernels,
    NormForm,
    best,
    forms_of_norm,
    is_tanh,
    rows_of_proof,
)
from workers.generation.heads import Heads
from workers.generation.joined import Part, Product, bare

log = logging.getLogger(__name__)

KNOWN = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma", "Gemma2", "Gemma3")
)
"""Models of transformers whose layers are norm, attention, norm and gated linear units, with residual sums."""
_WIDEST_HEAD = 512
_CELLS = (3, 0, 6, 1, 4)
"""Where the rows of a comparison lie in a cache of `_SLOTS` slots."""
_SLOTS = 7
_FAR = 1000
"""The position of the second row of a comparison, and the distance of each further one."""


class _Layer(NamedTuple):
    """One layer: its products, its norms, and facts of its attention.

    `projections` give queries, keys and values side by side, or each by itself; `gates` those of gate and up. `shape`
    are the numbers of query heads and of key heads, and the width of a head. `kind` chooses the rotary positions of a
    model that has several. `behind_attention` and `behind_unit` norm what is added to the residual row.
    """

    number: int
    kind: str | None
    shape: tuple[int, int, int]
    projections: Sequence[Product]
    output: Product
    gates: Sequence[Product]
    down: Product
    tanh: bool
    before_attention: NormForm
    before_unit: NormForm
    behind_attention: NormForm | None
    behind_unit: NormForm | None
    of_heads: tuple[NormForm, NormForm] | None


def kernel_decoder(model: Any, attention: Any) -> KernelDecoder | None:
    """The decoder of a model on CUDA in half precision, for a `PagedAttention`; None where the modules stay in use."""
    if model.device.type != "cuda" or model.dtype not in HALF or not KernelDecoder.knows(model):
        return None
    try:
        return KernelDecoder(model, attention, Kernels())
    except ImportError as error:
        log.info("layers run through their modules: %s", error)
    except Exception as error:
        why = obstacle_of(error)
        log.warning("%s runs through its modules, without kernels of its own: %s", type(model).__name__, why)
    return None


class KernelDecoder:
    """The layers of one model, whose weights stay those of the model."""

    def __init__(self, model: Any, attention: Any, kernels: Kernels) -> None:
        """`model` is one that `knows` knows. Its linear layers must not be replaced afterwards.

        Raises RuntimeError for a kernel that differs from a module, and ValueError for a layer of another form.
        """
        self._body, self._kernels, self._attention = model.model, kernels, weakref.proxy(attention)
        self._head, self._softcap = (
            _product(model.lm_head),
            getattr(model.config, "final_logit_softcapping", None),
        )
        with torch.inference_mode():
            self._layers = [_layer(layer, model, kernels) for layer in model.model.layers]
            self._last = _form(model.model.norm, model, kernels)
        self._kinds = sorted({layer.kind for layer in self._layers}, key=str)

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether the layers have the form of this module, by the model's classes."""
        kind = type(model)
        known = kind.__name__ in KNOWN and kind.__module__.startswith("transformers.models.")
        return known and not getattr(model.config, "use_bidirectional_attention", False)

    def logits(
        self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor], keep: Tensor | int
    ) -> Tensor:
        """Logits [rows, vocabulary] of the rows `keep` (0: all) of tokens and positions int64 [tokens].

        `attend` is `PagedAttention.attended` of the attention that this decoder was made for.
        """
        attention, kernels = self._attention, self._kernels
        hidden = self._body.embed_tokens(ids)
        turns = {kind: _turns(self._body, hidden, positions, kind) for kind in self._kinds}
        rows = kernels.norm(self._layers[0].before_attention, hidden)
        following = [layer.before_attention for layer in self._layers[1:]]
        for layer, before_next in zip(self._layers, [*following, None], strict=True):
            heads = _heads(layer, rows)
            keys, values = attention.cells(layer.number)
            cells = Cells(keys, values, attention.plan.slots)
            kernels.turn(heads, turns[layer.kind], cells, layer.of_heads)
            formula: Heads = attention.formulas[layer.number]
            attended = attend(layer.number, formula, *heads, written=True)
            more = layer.output(attended.reshape(len(attended), -1))
            rows = kernels.add_norm(layer.before_unit, hidden, more, layer.behind_attention)
            more = layer.down(_gated(layer, rows, kernels))
            if before_next is not None:
                rows = kernels.add_norm(before_next, hidden, more, layer.behind_unit)
        kept = None if isinstance(keep, int) else keep
        logits = self._head(kernels.add_norm(self._last, hidden, more, layer.behind_unit, kept))
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def _turns(body: Any, hidden: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, turned] of positions int64 [tokens], for layers of a kind."""
    named = {} if kind is None else {"layer_type": kind}
    cosines, sines = body.rotary_emb(hidden[None], positions[None], **named)
    return cosines[0], sines[0]


def _layer(layer: Any, model: Any, kernels: Kernels) -> _Layer:
    """The layer of modules. Raises as `KernelDecoder` does."""
    attention, unit, config = layer.self_attn, layer.mlp, model.config
    dim, heads, key_heads = attention.head_dim, config.num_attention_heads, config.num_key_value_heads
    if dim > _WIDEST_HEAD:
        raise ValueError(f"heads of {dim} numbers, {_WIDEST_HEAD} at most are computed by kernels")
    is_whole, is_joined = hasattr(attention, "qkv_proj"), hasattr(unit, "gate_up_proj")
    activation = unit.activation_fn if is_joined else unit.act_fn
    tanh = is_tanh(activation)
    if tanh is None:
        raise ValueError(f"no kernel computes {type(activation).__name__}")
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    of_heads = None
    if norms[0] is not None:
        of_queries, of_keys = (_form(norm, model, kernels) for norm in norms)
        if of_queries[2:] != of_keys[2:]:
            raise ValueError("the norms of queries and keys have two forms")
        of_heads = of_queries, of_keys
    sides = hasattr(layer, "pre_feedforward_layernorm")
    names = ("qkv_proj",) if is_whole else ("q_proj", "k_proj", "v_proj")
    made_of_kernels = _Layer(
        attention.layer_idx,
        # NOTE: the layers of Gemma 3 have positions by their kind, and the rotary module asks for the kind.
        getattr(attention, "layer_type", None) if hasattr(model.model.rotary_emb, "layer_types") else None,
        (heads, key_heads, dim),
        _products([getattr(attention, name) for name in names]),
        _product(attention.o_proj),
        _products([unit.gate_up_proj] if is_joined else [unit.gate_proj, unit.up_proj]),
        _product(unit.down_proj),
        tanh,
        _form(layer.input_layernorm, model, kernels),
        _form(layer.pre_feedforward_layernorm if sides else layer.post_attention_layernorm, model, kernels),
        _form(layer.post_attention_layernorm, model, kernels) if sides else None,
        _form(layer.post_feedforward_layernorm, model, kernels) if sides else None,
        of_heads,
    )
    _prove_sums(layer, made_of_kernels, model, kernels)
    _prove_turn(layer, made_of_kernels, model, kernels)
    rows = rows_of_proof(config.hidden_size, model)
    best([("gate", made_of_kernels.down(_gated(made_of_kernels, rows, kernels)), unit(rows))])
    return made_of_kernels


def _form(norm: Any, model: Any, kernels: Kernels) -> NormForm:
    """The form whose kernel agrees best with a norm. Raises RuntimeError where none agrees."""
    forms = forms_of_norm(norm, model.dtype)
    if not forms:
        raise ValueError(f"no kernel computes {type(norm).__name__}")
    rows = rows_of_proof(len(norm.weight), model)
    wanted = norm(rows)
    return best((form, kernels.norm(form, rows), wanted) for form in forms)


def _prove_sums(layer: Any, found: _Layer, model: Any, kernels: Kernels) -> None:
    """Compare the sums with their norms. Raises RuntimeError where these differ from what the modules give."""
    hidden = rows_of_proof(model.config.hidden_size, model)
    more = hidden.flip(0) * 0.5
    places = torch.tensor([3, 1], device=model.device)
    sides = found.behind_attention is not None
    behind = layer.post_attention_layernorm if sides else torch.nn.Identity()
    before = layer.pre_feedforward_layernorm if sides else layer.post_attention_layernorm
    total = hidden + behind(more)
    wanted = before(total)
    some = kernels.add_norm(found.before_unit, hidden, more, found.behind_attention, places)
    rows = kernels.add_norm(found.before_unit, hidden, more, found.behind_attention)
    for tried in ((some, wanted[places]), (rows, wanted), (hidden, total)):
        best([("sum", *tried)])


def _prove_turn(layer: Any, found: _Layer, model: Any, kernels: Kernels) -> None:
    """Compare turned heads, and what is written to a cache. Raises RuntimeError where these differ."""
    attention, (heads, key_heads, dim) = layer.self_attn, found.shape
    rows = rows_of_proof((heads + 2 * key_heads) * dim, model)
    count = len(rows)
    positions = torch.arange(count, device=model.device) * _FAR
    cosines, sines = _turns(model.model, rows, positions, found.kind)
    whole = rows.view(count, -1, dim)
    q, k, v = (
        states.transpose(0, 1)[None].clone() for states in whole.split([heads, key_heads, key_heads], 1)
    )
    if found.of_heads is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    q, k = turn(q, k, cosines[None], sines[None])
    wanted = torch.cat([states[0].transpose(0, 1) for states in (q, k, v)], 1)
    slots = torch.tensor(_CELLS, device=model.device)
    keys, values = rows.new_zeros(2, _SLOTS, key_heads, dim)
    parts = HeadRows(*whole.split([heads, key_heads, key_heads], 1))
    kernels.turn(parts, (cosines, sines), Cells(keys, values, slots), found.of_heads)
    found_cells = torch.cat([parts.q, keys[slots], values[slots]], 1)
    best([("turned", found_cells, wanted)])
    best([("in place", whole, wanted)])
    if any(bool(states[[2, 5]].any()) for states in (keys, values)):
        raise RuntimeError("the kernel writes to cells of no row")


def _product(layer: Any) -> Product:
    """A linear layer without the calls of modules where the layer is a plain one."""
    return bare(layer) if type(layer) is torch.nn.Linear else layer


def _products(layers: Sequence[Any]) -> list[Product]:
    """The products of layers that read the same rows: a single one where they are joined."""
    first = layers[0]
    return [_product(first.product.whole)] if isinstance(first, Part) else list(map(_product, layers))


def _heads(layer: _Layer, rows: Tensor) -> HeadRows:
    """Rows [tokens, width] to queries, keys and values, of memory that is new."""
    heads, key_heads, dim = layer.shape
    products: Iterable[Tensor] = [product(rows) for product in layer.projections]
    if len(layer.projections) == 1:
        [whole] = products
        return HeadRows(*whole.view(len(rows), -1, dim).split([heads, key_heads, key_heads], 1))
    return HeadRows(*(states.view(len(rows), -1, dim) for states in products))


def _gated(layer: _Layer, rows: Tensor, kernels: Kernels) -> Tensor:
    """The gated rows [tokens, inner width] of rows [tokens, width]."""
    products = [product(rows) for product in layer.gates]
    gates, ups = products if len(products) > 1 else products[0].chunk(2, dim=-1)
    return kernels.gated(gates, ups, layer.tanh)
