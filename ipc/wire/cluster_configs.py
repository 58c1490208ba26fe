"""Configurations of models that gateways give to the boxes of a cluster, as values of a bucket.

1. A value is the document of one model in SIE's layout (`ipc.catalog.sie_layout`), as plain values. Its key is a digest
   of the model's id. Documents only ever grow: profiles are added, and nothing that is there changes.
2. `Content` is what a model computes, without the way in which its document says so. Two documents with one content
   are the same configuration. `digest_of` stands for the content of many models at once: gateways and boxes compare
   these digests.
3. A configuration service tells a change by a `ConfigMessage`, in JSON.
4. The model comes from a hub or from its adapter. A directory, a package or code beside a file is of one host alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from ipc import yaml_text
from ipc.catalog.entries import ADAPTER_FILE, AdapterSource, Catalog, HubSource, ModelEntry
from ipc.catalog.reading import check_plain, configured_entry
from ipc.catalog.sie_layout import DEFAULT, KEY
from ipc.errors import ConfigRefused, ContentConflict, InvalidInput, ProtocolError

VERSION = 1
MOST_NBYTES = 1 << 20
"""Largest body of a configuration."""
MOST_MESSAGE_NBYTES = 2 * MOST_NBYTES
"""Largest message about a configuration: JSON writes some characters of a document as two."""
MOST_PROFILES = 256
MOST_EPOCH = 2**53
MOST_PRODUCER = 256
"""Characters of the name of a configuration service."""
MOST_REFUSAL = 256
"""Characters of a reason why a box refuses a configuration."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_PROFILE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_SHOWN = 64
Content = Mapping[str, Mapping[str, Any]]
"""What a model computes: by profile, and under the name of no profile what all of them share."""
ALL_PROFILES = ""


class Configuration(msgspec.Struct, frozen=True):
    """The document of one model in SIE's layout."""

    v: int
    document: dict[str, Any]

    @property
    def model(self) -> str:
        """Id of the model."""
        return str(self.document[KEY])

    @property
    def profiles(self) -> dict[str, Any]:
        """Documents of the profiles by name."""
        profiles: dict[str, Any] = self.document["profiles"]
        return profiles


class BoxConfigs(msgspec.Struct, array_like=True, frozen=True):
    """What a box has of the configurations that are for its bundle.

    `digest` is that of the models which the box serves as they are configured, "" before the box has read any.
    `refused`: the other models, and why.
    """

    epoch: int
    digest: str
    refused: dict[str, str] = {}


class FirstAnswer(msgspec.Struct, frozen=True):
    """What a change was answered first. `body` is the digest of what was asked; status 0: there is no answer yet."""

    v: int
    body: str
    status: int = 0
    answer: Annotated[bytes, msgspec.Meta(max_length=MOST_NBYTES)] = b""


class ConfigMessage(msgspec.Struct, frozen=True):
    """A change that a configuration service tells, in the form of SIE's. Fields that are not here are passed over.

    `model_config` is the document in YAML, whole or with nothing but id and new profiles. `epoch` counts the changes of
    the service `producer_id` (`router_id` in older forms). `bundle_id` is that of the subject, "" for all bundles.
    """

    model_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_PRODUCER)]
    model_config: Annotated[str, msgspec.Meta(min_length=1)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MOST_EPOCH)] = 0
    producer_id: Annotated[str, msgspec.Meta(max_length=MOST_PRODUCER)] = ""
    router_id: Annotated[str, msgspec.Meta(max_length=MOST_PRODUCER)] = ""
    bundle_id: Annotated[str, msgspec.Meta(max_length=MOST_PRODUCER)] = ""
    v: int = VERSION

    @property
    def producer(self) -> str:
        """Name of the service, which may be empty."""
        return self.producer_id or self.router_id


_configuration, _first = msgspec.msgpack.Decoder(Configuration), msgspec.msgpack.Decoder(FirstAnswer)
_message = msgspec.json.Decoder(ConfigMessage)
_encoder = msgspec.msgpack.Encoder()
_UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)


def key_of(text: str) -> str:
    """The key of a model, or of an Idempotency-Key, which may be a secret, in its bucket."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def check_id(model: str) -> None:
    """Raise `InvalidInput` for what cannot be the id of a model in a configuration and a path."""
    if not _ID.fullmatch(model) or ".." in model or "//" in model or model.endswith(("/", "/status")):
        raise InvalidInput(
            f"{KEY}: {model[:_SHOWN]!a} is no id: 1 to 200 of A-Z, a-z, 0-9 and ._/-, without `..` and without "
            "`/status` at the end",
            error="invalid_model_id",
        )


def read_document(body: bytes) -> dict[str, Any]:
    """The document in a body, whose model has an id.

    Raises `InvalidInput` for what is no map in YAML, and `ConfigRefused` for one without an id or with values that
    are no JSON.
    """
    try:
        document = yaml_text.decode(body, aliases=False)
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidInput(f"body: no YAML: {error}", error="parse_error") from error
    if not isinstance(document, dict):
        raise InvalidInput("body: expected a map in YAML", error="parse_error")
    model = document.get(KEY)
    if not isinstance(model, str):
        raise ConfigRefused(f"{KEY}: expected the id of a model as text", error="validation_error")
    check_id(model)
    try:
        check_plain(document, "body")
    except ValueError as error:
        raise ConfigRefused(str(error), error="validation_error") from error
    profiles = document.get("profiles")
    if not isinstance(profiles, dict) or not profiles or len(profiles) > MOST_PROFILES:
        raise ConfigRefused(
            f"profiles: expected a map of 1 to {MOST_PROFILES} profiles", error="validation_error"
        )
    strange = next((name for name in profiles if not _PROFILE.fullmatch(name)), None)
    if strange is not None:
        raise ConfigRefused(
            f"profiles: {strange[:_SHOWN]!a} is no name of 1 to 64 of A-Z, a-z, 0-9 and ._-",
            error="validation_error",
        )
    return document


def read_message(data: bytes) -> ConfigMessage:
    """A message about a configuration; its document is still text. Raises `ProtocolError`."""
    if len(data) > MOST_MESSAGE_NBYTES:
        raise ProtocolError(
            f"a message about a configuration has {len(data)} bytes, and {MOST_MESSAGE_NBYTES} may be"
        )
    try:
        message = _message.decode(data)
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable message about a configuration: {error}") from error
    if message.v != VERSION:
        raise ProtocolError(f"a message about a configuration of version {message.v}, expected {VERSION}")
    return message


def document_of(message: ConfigMessage, bundle: str) -> dict[str, Any]:
    """The document in a message to `bundle`, "" for all bundles.

    Raises as `read_document` does, and `ConfigRefused` for a document of another model and a message to another bundle.
    """
    if bundle and message.bundle_id not in ("", bundle):
        raise ConfigRefused(f"bundle_id: {message.bundle_id[:_SHOWN]!a}, but the subject is of {bundle!a}")
    body = message.model_config.encode(errors="replace")
    if len(body) > MOST_NBYTES:
        raise ConfigRefused(f"model_config: {len(body)} bytes, a configuration may have {MOST_NBYTES}")
    document = read_document(body)
    if document[KEY] != message.model_id:
        raise ConfigRefused(
            f"model_id: {message.model_id[:_SHOWN]!a}, but the document is of {document[KEY][:_SHOWN]!a}"
        )
    return document


def entry_of(configuration: Configuration) -> ModelEntry:
    """The model of a configuration. Raises `ConfigRefused`, which names the field."""
    try:
        entry = configured_entry(configuration.document)
        _check_sources(entry)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ConfigRefused(text, error="validation_error") from error
    return entry


def _check_sources(entry: ModelEntry) -> None:
    for name, source in {"": entry.source, **entry.loras}.items():
        field = f"lora_paths.{name[:_SHOWN]}" if name else "weights_path"
        if isinstance(source, AdapterSource):
            continue
        if not isinstance(source, HubSource):
            raise ValueError(f"{field}: a directory is of one host; name a model of a hub (hf_id)")
        if not _REPO.fullmatch(source.repo) or ".." in source.repo:
            raise ValueError(
                f"{'hf_id' if not name else field}: {source.repo[:_SHOWN]!a} is no model of a hub"
            )
    for adapter in entry.adapters:
        if ADAPTER_FILE in adapter:
            raise ValueError(f"adapter_path: {adapter[:_SHOWN]!a}: code of a file is of one host")


def content_of(entry: ModelEntry) -> Content:
    """What a model computes."""
    source = msgspec.to_builtins(entry.source)
    if isinstance(entry.source, AdapterSource):
        source.pop("path")
    shared = {
        "source": source,
        "inputs": sorted(entry.inputs),
        "outputs": msgspec.to_builtins(entry.outputs),
        "max_sequence_length": entry.max_sequence_length,
    }
    content: dict[str, Mapping[str, Any]] = {ALL_PROFILES: shared}
    for variant in Catalog((entry,)).entries:
        default = variant.profiles.get(DEFAULT)
        content[variant.id.partition(":")[2] or DEFAULT] = {
            "adapter": variant.adapter,
            "max_batch_tokens": variant.max_batch_tokens,
            "precision": variant.precision,
            "loadtime": variant.loadtime,
            "runtime": variant.runtime,
            "outputs": list(variant.default_outputs),
            "similarity": {} if default is None else default.similarity,
        }
    return content


def digest_of(contents: Mapping[str, Content]) -> str:
    """Digest of the content of models, by id; "" for none."""
    if not contents:
        return ""
    return hashlib.sha256(msgspec.json.encode(contents, order="deterministic")).hexdigest()


def merged(before: Configuration | None, document: dict[str, Any]) -> Configuration:
    """The configuration `before` with the profiles that `document` adds.

    Raises `ContentConflict` where the document says something else of what is there, and as `entry_of` does.
    """
    if before is None:
        return Configuration(VERSION, document)
    known = before.document
    for field, value in document.items():
        if field != "profiles" and known.get(field) != value:
            raise ContentConflict(
                f"{field[:_SHOWN]}: the model has {str(known.get(field))[:_SHOWN]!a}, which stays as it is; give "
                "another id to another model",
                error="content_conflict",
            )
    profiles = {**document["profiles"], **before.profiles}
    after = Configuration(VERSION, {**known, "profiles": {**before.profiles, **profiles}})
    # Another text of a known profile may say the same.
    said = Configuration(VERSION, {**known, "profiles": {**before.profiles, **document["profiles"]}})
    refuse_other(content_of(entry_of(after)), content_of(entry_of(said)), document["profiles"])
    return after


def refuse_other(known: Content, said: Content, profiles: Iterable[str]) -> None:
    """Raise `ContentConflict` where some of `profiles` that are `known` are something else as they are `said`."""
    other = [name for name in profiles if name in known and _text(known[name]) != _text(said.get(name))]
    if other:
        raise ContentConflict(
            f"profiles: {', '.join(map(ascii, other))[:_SHOWN]}: there with other content, which stays as it is; "
            "give the profile another name",
            error="content_conflict",
            conflicting_profiles=other,
        )


def _text(part: Mapping[str, Any] | None) -> bytes:
    return msgspec.json.encode(part, order="deterministic")


def encode(value: Configuration | FirstAnswer) -> bytes:
    """The bytes of a value."""
    return _encoder.encode(value)


def read_configuration(data: bytes) -> Configuration:
    """A value of the bucket of configurations. Raises `ProtocolError`."""
    try:
        found = _configuration.decode(data)
        if found.v == VERSION and isinstance(found.document.get("profiles"), dict):
            check_id(found.model)
            return found
    except (*_UNDECODABLE, LookupError, InvalidInput) as error:
        raise ProtocolError(f"undecodable configuration: {error}") from error
    raise ProtocolError(f"a configuration of version {found.v}, expected {VERSION}")


def read_first(data: bytes) -> FirstAnswer:
    """A value of the bucket of first answers. Raises `ProtocolError`."""
    try:
        found = _first.decode(data)
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable first answer: {error}") from error
    if found.v != VERSION:
        raise ProtocolError(f"a first answer of version {found.v}, expected {VERSION}")
    return found
