"""SIE encode requests to calls: profile, options, instruction, outputs, dtype, by the contract's precedence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontend.protocols.sie.schemas import EncodeParams, Item
from frontend.quantize import OUTPUT_DTYPES
from ipc.catalog import ENCODE_OUTPUTS, Catalog, ModelEntry
from ipc.errors import InvalidInput
from ipc.messages import EncodeCall, TextInput
from ipc.settings import Limits

OVERFLOW_POLICIES = ("default", "truncate_text", "error")


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """What to run, on which entry, and how to render it."""

    model: str
    call: EncodeCall
    output_dtype: str
    dimensions: int | None
    refuse_truncation: bool


def check_texts(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` that names the item for a text that is too long or holds a NUL."""
    for index, text in enumerate(texts):
        if len(text) * 4 > limits.max_text_bytes:
            nbytes = len(text.encode())
            if nbytes > limits.max_text_bytes:
                place = where.format(index)
                raise InvalidInput(
                    f"{place}: {nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
                )
        if "\0" in text:
            raise InvalidInput(f"{where.format(index)}: NUL character at offset {text.index(chr(0))}")


def check_instruction(instruction: str, items: int, limits: Limits) -> None:
    """Raise `InvalidInput` for an instruction that is too long alone, or together with the items it stands before."""
    check_texts([instruction], "params.instruction", limits)
    if items * len(instruction) > limits.max_body_bytes:
        raise InvalidInput(
            f"params.instruction: {len(instruction)} characters before {items} items, "
            f"the limit is {limits.max_body_bytes} in all (limits.max_body_bytes)"
        )


def check_count(count: int, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no items or too many."""
    if count == 0:
        raise InvalidInput(f"{where}: may not be empty")
    if count > limits.max_items:
        raise InvalidInput(f"{where}: {count} given, the limit is {limits.max_items} (limits.max_items)")


def check_items(items: Sequence[Item], entry: ModelEntry, limits: Limits) -> list[str]:
    """The texts of all items. Raises `InvalidInput` for what this model cannot take."""
    texts = []
    for index, item in enumerate(items):
        if item.text is None:
            given = next(
                (
                    name
                    for name in ("images", "audio", "video", "document")
                    if getattr(item, name) is not None
                ),
                None,
            )
            if given and given.rstrip("s") not in entry.inputs:
                raise InvalidInput(
                    f"items[{index}].{given}: model '{entry.id}' takes {', '.join(entry.inputs)} only"
                )
            raise InvalidInput(f"items[{index}].text: missing")
        texts.append(item.text)
    check_texts(texts, "items[{}].text", limits)
    return texts


def _typed(options: dict[str, Any], name: str, kind: type, text: str) -> Any:
    value = options.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise InvalidInput(f"params.options.{name}: expected {text}, got {type(value).__name__}")
    return value


def choose_entry(entry: ModelEntry, options: dict[str, Any], catalog: Catalog) -> tuple[ModelEntry, bool]:
    """The entry of the chosen profile, and whether it was named. Raises `InvalidInput` for an unknown one."""
    profile = _typed(options, "profile", str, "str")
    if profile is None:
        return entry, ":" in entry.id
    known = sorted({"default", *entry.profiles})
    if profile not in known:
        raise InvalidInput(
            f"params.options.profile: unknown profile {profile[:64]!r}, available are {', '.join(known)}"
        )
    return (entry if profile == "default" else catalog[f"{entry.id}:{profile}"]), True


def _outputs(entry: ModelEntry, explicit: bool, params: EncodeParams, options: dict[str, Any]) -> list[str]:
    from_options = _typed(options, "output_types", list, "array of str")
    where = "params.options.output_types" if from_options else "params.output_types"
    profile = entry.profiles["default"].output_types if explicit and "default" in entry.profiles else ()
    chosen = list(from_options or profile or params.output_types or entry.default_outputs)
    for name in chosen:
        if name not in ENCODE_OUTPUTS:
            raise InvalidInput(f"{where}: {str(name)[:64]!r} is not one of {', '.join(ENCODE_OUTPUTS)}")
        if name not in entry.outputs:
            known = ", ".join(entry.encode_outputs)
            raise InvalidInput(f"{where}: model '{entry.id}' has no {name} output, only {known}")
    return list(dict.fromkeys(chosen))


def _dtype(params: EncodeParams, options: dict[str, Any]) -> str:
    where, dtype = "params.options.output_dtype", _typed(options, "output_dtype", str, "str")
    if params.output_dtype is not None:
        where, dtype = "params.output_dtype", params.output_dtype
    if dtype is None:
        return "float32"
    if dtype not in OUTPUT_DTYPES:
        raise InvalidInput(f"{where}: {dtype[:64]!r} is not one of {', '.join(OUTPUT_DTYPES)}")
    return str(dtype)


def check_dimensions(value: int | None, entry: ModelEntry, dims: int, where: str) -> int | None:
    """The requested width of dense vectors. Raises `InvalidInput` outside 1..dims or off the model's list."""
    if value is None:
        return None
    if not 1 <= value <= dims:
        raise InvalidInput(f"{where}: {value} is outside 1..{dims}")
    if entry.dimensions and value not in entry.dimensions:
        raise InvalidInput(f"{where}: {value} is not one of {', '.join(map(str, entry.dimensions))}")
    return value


def _refuse_unbuilt(options: dict[str, Any]) -> None:
    for name in ("lora", "lora_id"):
        if options.get(name) is not None:
            raise InvalidInput(f"params.options.{name}: this model has no LoRA adapters")
    if options.get("muvera") is not None:
        raise InvalidInput("params.options.muvera: not offered by this build")
    policy = _typed(options, "overflow_policy", str, "str")
    if policy is not None and policy not in OVERFLOW_POLICIES:
        raise InvalidInput(
            f"params.options.overflow_policy: {policy[:64]!r} is not one of {', '.join(OVERFLOW_POLICIES)}"
        )


def plan_encode(
    texts: list[str],
    params: EncodeParams,
    entry: ModelEntry,
    catalog: Catalog,
    dims: dict[str, int],
    limits: Limits,
) -> EncodePlan:
    """Resolve all parameters of an encode request; `dims` are the widths of the loaded model's outputs."""
    request = {name: value for name, value in (params.options or {}).items() if value is not None}
    entry, explicit = choose_entry(entry, request, catalog)
    options = {**entry.runtime, **request}
    _refuse_unbuilt(options)
    outputs = _outputs(entry, explicit, params, options)
    instruction = (
        params.instruction if params.instruction is not None else _typed(options, "instruction", str, "str")
    )
    if instruction is not None:
        check_instruction(instruction, len(texts), limits)
    dimensions = _typed(options, "dimensions", int, "int")
    call = EncodeCall(
        [TextInput(text) for text in texts], outputs, instruction, bool(options.get("is_query"))
    )
    return EncodePlan(
        model=entry.id,
        call=call,
        output_dtype=_dtype(params, options),
        dimensions=check_dimensions(dimensions, entry, dims.get("dense", 0), "params.options.dimensions"),
        refuse_truncation=options.get("overflow_policy") == "error",
    )
