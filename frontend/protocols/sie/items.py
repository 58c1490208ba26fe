"""Items of a request to inputs of workers, texts and images; and warnings of fields that the model does not read.

1. `check_items` refuses items that no model could take.
2. `inputs_of` refuses items that this model does not take.
3. `frontend.http.image_headers` looks at the headers of images (`images_in`), where that takes long in a thread.
4. `warnings_of` names fields and parts of items that change nothing. Requests of this contract are written for many
   models at once, so such fields are accepted; a client asks for the warnings with `warnings: true` or the header
   `X-Penstock-Warnings: 1`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from frontend.http.fields import check_count, check_texts
from frontend.protocols.sie.chunking import OPTION
from frontend.protocols.sie.schemas import (
    Body,
    EncodeParams,
    EncodeRequest,
    ExtractParams,
    ExtractRequest,
    Item,
    ScoreRequest,
)
from ipc.catalog.entries import ModelEntry
from ipc.catalog.option_names import TEXT_BESIDE_IMAGES
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.messages import InputItem, ModelStatus

MEDIA = ("images", "audio", "video", "document")


def check_items(items: Sequence[Item], limits: Limits) -> None:
    """Raise `InvalidInput` for no items, too many, and texts that no model could take."""
    check_count(len(items), "items", limits)
    check_texts([item.text or "" for item in items], "items[{}].text", limits)


def inputs_of(items: Sequence[Item], entry: ModelEntry, limits: Limits) -> list[InputItem]:
    """The input of each item. Raises `InvalidInput` for an item that this model cannot take."""
    return [input_of(item, f"items[{index}]", entry, limits) for index, item in enumerate(items)]


def input_of(item: Item, where: str, entry: ModelEntry, limits: Limits) -> InputItem:
    """The input of an item whose text is checked; `where` is the JSON path of the item.

    Media that this model does not take are left out. Raises `InvalidInput` for an item without any other input.
    """
    images = _images(item, where, limits) if "image" in entry.inputs else []
    if not images and (item.text is None or "text" not in entry.inputs):
        if foreign := [name for name in foreign_inputs(item, entry) if name != "text"]:
            taken = ", ".join(entry.inputs)
            raise InvalidInput(f"{where}.{foreign[0]}: model '{entry.id}' takes {taken} only")
        needed = " or ".join(f"{where}.{'images' if kind == 'image' else kind}" for kind in entry.inputs)
        raise InvalidInput(f"{needed}: missing")
    return InputItem(item.text, None, images, item.metadata)


def foreign_inputs(item: Item, entry: ModelEntry) -> list[str]:
    """Fields of the item with inputs that this model does not take."""
    given = [name for name in ("text", *MEDIA) if getattr(item, name) not in (None, [])]
    return [name for name in given if name.rstrip("s") not in entry.inputs]


def _images(item: Item, where: str, limits: Limits) -> list[bytes]:
    images = []
    for index, image in enumerate(item.images or ()):
        place = f"{where}.images[{index}]"
        if index >= limits.max_images:
            raise InvalidInput(
                f"{where}.images: {len(item.images or ())} given, the limit is {limits.max_images} "
                "(limits.max_images)"
            )
        if image.data is None:
            raise InvalidInput(f"{place}.data: missing")
        images.append(image.data)
    return images


def images_in(items: Sequence[Item], query: Item | None = None) -> list[tuple[str, bytes]]:
    """JSON path and bytes of each image of items that `input_of` took."""
    named = [(f"items[{index}]", item) for index, item in enumerate(items) if item.images]
    if query is not None:
        named.insert(0, ("query", query))
    return [
        (f"{where}.images[{index}].data", image.data or b"")
        for where, item in named
        for index, image in enumerate(item.images or ())
    ]


_SHARED = frozenset(("profile", "overflow_policy", "lora", "lora_id"))
_RESOLVED = {
    EncodeParams: _SHARED
    | {"instruction", "is_query", "output_types", "output_dtype", "dimensions", "muvera", OPTION},
    ScoreRequest: _SHARED | {"instruction"},
    ExtractParams: _SHARED,
}
"""Options that the server itself reads, by the type that holds them."""
_SHOWN = 64


def warnings_of(
    request: Body, entry: ModelEntry, status: ModelStatus, unknown: Sequence[str] = ()
) -> list[str]:
    """One sentence for each field that changes nothing; `status` is the status of the loaded model.

    `unknown` are the names beside the parameters' fields (`frontend.protocols.sie.schemas.unknown_fields`).
    """
    params: EncodeParams | ScoreRequest | ExtractParams
    if isinstance(request, ScoreRequest):
        before, params = "", request
    elif isinstance(request, EncodeRequest):
        before, params = "params.", request.params or EncodeParams()
    elif isinstance(request, ExtractRequest):
        before, params = "params.", request.params or ExtractParams()
    else:
        return []
    used = _RESOLVED[type(params)] | set(status.uses)
    unread = [
        name for name, value in (params.options or {}).items() if name not in used and value is not None
    ]
    warnings = [f"{before}{name[:_SHOWN]}: unknown, not read" for name in unknown]
    warnings += [f"{before}options.{name[:_SHOWN]}: not read by this model" for name in unread]
    if isinstance(params, ExtractParams):
        for name in ("labels", "output_schema", "instruction"):
            if getattr(params, name) and name not in used:
                warnings.append(f"params.{name}: not read by this model")
        warnings += _repeated(params.labels or [])
    return [*warnings, *_left_out(request, entry, status.uses)]


def _repeated(labels: list[str]) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if first.setdefault(label, index) != index:
            yield f"params.labels[{index}]: the same label as params.labels[{first[label]}], counted once"


def _left_out(
    request: EncodeRequest | ScoreRequest | ExtractRequest, entry: ModelEntry, uses: Collection[str]
) -> Iterator[str]:
    items = {f"items[{index}]": item for index, item in enumerate(request.items)}
    if isinstance(request, ScoreRequest):
        items = {"query": request.query, **items}
    places: dict[tuple[str, str], list[str]] = {}
    for where, item in items.items():
        for part in _dropped(item, entry, uses):
            places.setdefault(part, []).append(where)
    for (name, why), paths in places.items():
        more = f" and {len(paths) - 1} other items" if len(paths) > 1 else ""
        yield f"{paths[0]}.{name}{more}: left out, {why}"


def _dropped(item: Item, entry: ModelEntry, uses: Collection[str]) -> Iterator[tuple[str, str]]:
    """(part, why) of each part of an item that this model does not read."""
    for name in foreign_inputs(item, entry):
        yield name, f"this model takes {', '.join(entry.inputs)}"
    if "image" not in entry.inputs or not item.images:
        return
    if item.text and "text" in entry.inputs and TEXT_BESIDE_IMAGES not in uses:
        yield "text", "this model reads the image or the text"
    if len(item.images) > 1:
        yield "images[1:]", "this model reads the first image"
