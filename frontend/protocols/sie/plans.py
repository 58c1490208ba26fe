"""SIE requests to calls: outputs, dtype and dimensions of encode, by the contract's precedence.

At the end lies the shared part of the routes in the forms of other APIs: embeddings (OpenAI) and rerank (Cohere, Jina).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.answer import OUTPUT_DTYPES
from frontend.engine.planning import Resolved, check_dimensions, typed
from frontend.protocols.sie import chunking
from frontend.protocols.sie.flow import Plan
from frontend.protocols.sie.muvera import Muvera, check_size, read_settings
from frontend.protocols.sie.schemas import EncodeParams
from ipc.catalog.entries import ENCODE_OUTPUTS, ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import EncodeCall, InputItem, ModelStatus

BEFORE = IN_PARAMS.options


@dataclass(frozen=True, slots=True)
class EncodePlan(Plan[EncodeCall]):
    """The call, and how to render the result.

    `outputs` are the outputs to show, which differ from the call's where `muvera` makes dense vectors of token vectors;
    `sparse_dims` is the size of the vocabulary, None if unknown.
    """

    outputs: list[str]
    output_dtype: str
    dimensions: int | None
    muvera: Muvera | None = None
    sparse_dims: int | None = None


def _outputs(resolved: Resolved, params: EncodeParams, muvera: Muvera | None) -> list[str]:
    entry = resolved.entry
    of_muvera = ("dense",) if muvera is not None else ()
    from_options = typed(resolved.options, "output_types", list, "array of str", BEFORE)
    where = f"{BEFORE}output_types" if from_options else "params.output_types"
    named = resolved.explicit and "default" in entry.profiles
    profile = entry.profiles["default"].output_types if named else ()
    chosen = list(from_options or profile or params.output_types or entry.default_outputs)
    for name in chosen:
        if name not in ENCODE_OUTPUTS:
            raise InvalidInput(f"{where}: {str(name)[:64]!r} is not one of {', '.join(ENCODE_OUTPUTS)}")
        if name not in entry.outputs and name not in of_muvera:
            known = ", ".join(entry.encode_outputs)
            raise InvalidInput(f"{where}: model '{entry.id}' has no {name} output, only {known}")
    return list(dict.fromkeys(chosen))


def _dtype(params: EncodeParams, options: dict[str, Any]) -> str:
    where, dtype = f"{BEFORE}output_dtype", typed(options, "output_dtype", str, "str", BEFORE)
    if params.output_dtype is not None:
        where, dtype = "params.output_dtype", params.output_dtype
    if dtype is None:
        return "float32"
    if dtype not in OUTPUT_DTYPES:
        raise InvalidInput(f"{where}: {dtype[:64]!r} is not one of {', '.join(OUTPUT_DTYPES)}")
    return str(dtype)


def plan_encode(
    items: list[InputItem],
    resolved: Resolved,
    params: EncodeParams,
    dims: dict[str, int],
    max_nbytes: int,
) -> EncodePlan:
    """The call and its rendering; `dims` are the widths of the loaded model's outputs.

    `max_nbytes` limits the vectors that are made in this process.
    """
    options, entry = resolved.options, resolved.entry
    where = f"{BEFORE}{chunking.OPTION}"
    rule = options.get(chunking.OPTION)
    divided = None if rule is None else chunking.read(rule, where)
    muvera = None if divided else _muvera(options.get("muvera"), entry, dims)
    outputs = _outputs(resolved, params, muvera)
    if "dense" not in outputs:
        muvera = None
    if muvera is not None:
        check_size(muvera, len(items), dims["multivector"], max_nbytes, f"{BEFORE}muvera")
    dimensions = typed(options, "dimensions", int, "int", BEFORE)
    width = dims.get("dense", 0) if muvera is None else muvera.width(dims["multivector"])
    computed = outputs if muvera is None else [name for name in outputs if name != "dense"]
    if muvera is not None and "multivector" not in computed:
        computed = [*computed, "multivector"]
    if divided is not None:
        _check_divided(outputs, options, where)
        items, outputs = chunking.with_spans(items, divided), ["chunks"]
    call = resolved.encode(items, computed, params.is_query, IN_PARAMS)
    if divided is not None:
        call = chunking.divided(call, divided.rule)
    return EncodePlan(
        model=entry.id,
        call=call,
        outputs=outputs,
        output_dtype=_dtype(params, options),
        dimensions=check_dimensions(dimensions, entry, width, f"{BEFORE}dimensions"),
        muvera=muvera,
        sparse_dims=entry.outputs["sparse"].dims or dims.get("sparse") if "sparse" in outputs else None,
    )


def _check_divided(outputs: list[str], options: dict[str, Any], where: str) -> None:
    """Raise `InvalidInput` for what late chunking does not go with."""
    if outputs != ["dense"]:
        raise InvalidInput(
            f"{where}: makes dense vectors only, the outputs asked for are {', '.join(outputs)}"
        )
    chunking.check_policy(options.get("overflow_policy"), f"{BEFORE}overflow_policy")
    if options.get("muvera"):
        raise InvalidInput(f"{BEFORE}muvera: does not go with {chunking.OPTION}")


def _muvera(value: Any, entry: ModelEntry, dims: dict[str, int]) -> Muvera | None:
    """Settings of MUVERA if the request asks for MUVERA. Raises `InvalidInput` when the model has no token vectors."""
    if value is None:
        return None
    where = f"{BEFORE}muvera"
    settings = read_settings(value, dims.get("multivector", 1), where)
    if settings is not None and not ("multivector" in entry.outputs and "multivector" in dims):
        raise InvalidInput(f"{where}: model '{entry.id}' has no multivector output to make dense vectors of")
    return settings


class TokenUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]
    truncated: Annotated[list[int] | UnsetType, Meta(description="Places of items that were cut.")] = UNSET


_ALIASES = {"max_tokens_per_doc": "max_tokens", "truncate_prompt_tokens": "max_tokens"}
"""Fields of requests that are options under another name."""
_LACKING = {"prompt_name": "has no prompts", "max_tokens": "cannot cut texts to a number of tokens"}
"""Why a model refuses an option that its family does not read."""


def check_used(given: dict[str, Any], entry: ModelEntry, status: ModelStatus) -> None:
    """Raise `InvalidInput` for an option of a request that the loaded model does not read."""
    for field, value in given.items():
        option = _ALIASES.get(field, field)
        if value is not None and option in _LACKING and option not in status.uses:
            raise InvalidInput(f"{field}: model '{entry.id}' {_LACKING[option]}")


def usage_of(tokens: int, truncated: list[int]) -> TokenUsage:
    """Tokens of a request, and places of cut inputs. Without cut inputs their field is left out."""
    return TokenUsage(tokens, tokens, truncated or UNSET)
