"""Documents of configurations: what they may say, what they add, and what two of them have in common."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from ipc.catalog.entries import DirectorySource, ModelEntry
from ipc.errors import ConfigRefused, ContentConflict, InvalidInput, PenstockError, ProtocolError
from ipc.wire.cluster_configs import (
    MOST_MESSAGE_NBYTES,
    MOST_NBYTES,
    VERSION,
    Configuration,
    FirstAnswer,
    check_id,
    content_of,
    digest_of,
    document_of,
    encode,
    entry_of,
    key_of,
    merged,
    read_configuration,
    read_document,
    read_first,
    read_message,
)

BERT = "sie_server.adapters.bert_flash:BertFlashAdapter"


def document(**changes: Any) -> dict[str, Any]:
    made = {
        "sie_id": "acme/m",
        "hf_id": "acme/m",
        "tasks": {"encode": {"dense": {"dim": 8}}},
        "profiles": {"default": {"adapter_path": BERT, "max_batch_tokens": 64}},
    }
    return {**made, **changes}


def added(name: str, **profile: Any) -> dict[str, Any]:
    return {"sie_id": "acme/m", "profiles": {name: profile}}


FIRST = merged(None, document())


def test_a_profile_is_added_and_keeps_the_others() -> None:
    both = merged(FIRST, added("fast", extends="default", compute_precision="float16"))
    content = content_of(entry_of(both))
    assert content["default"] == content_of(entry_of(FIRST))["default"]
    assert content["fast"] == {**content["default"], "precision": "float16"}
    # Written out in full, and by `extends`: the same.
    full = {"adapter_path": BERT, "max_batch_tokens": 64, "compute_precision": "float16"}
    assert merged(both, added("fast", **full)) == both


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (added("default", adapter_path=BERT), "default"),
        (added("default", adapter_path="dense", max_batch_tokens=65), "default"),
        (document(hf_id="acme/other"), "hf_id"),
        (document(max_sequence_length=5), "max_sequence_length"),
    ],
)
def test_what_is_there_never_changes(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ContentConflict, match=words) as caught:
        merged(FIRST, change)
    assert caught.value.detail["error"] == "content_conflict"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights_path": "/etc", "hf_id": None}, "weights_path"),
        ({"hf_id": "../../etc"}, "hf_id"),
        ({"hf_id": "/root/model"}, "hf_id"),
        ({"hf_id": "a/b/c"}, "hf_id"),
        ({"profiles": {"default": {"adapter_path": "adapter.py:Adapter"}}}, "adapter_path"),
        ({"profiles": {"default": {"adapter_path": BERT, "max_batch_tokens": 0}}}, "max_batch_tokens"),
        ({"profiles": {"default": {"adapter_path": BERT, "compute_precision": "int3"}}}, "precision"),
        ({"profiles": {"default": {"adapter_path": BERT}, "x": {"extends": "y"}}}, "x"),
        ({"profiles": {"default": {"adapter_path": BERT, "other": 1}}}, "other"),
        ({"tasks": {}}, "tasks"),
        (
            {
                "profiles": {
                    "default": {
                        "adapter_path": BERT,
                        "adapter_options": {"loadtime": {"lora_paths": {"l": "/root/lora"}}},
                    }
                }
            },
            "lora_paths",
        ),
    ],
)
def test_what_a_box_of_another_host_cannot_have_is_refused_by_name(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigRefused, match=words):
        entry_of(merged(None, {k: v for k, v in document(**change).items() if v is not None}))


@pytest.mark.parametrize(
    "model", ["", "a b", "/a", "a/", "a//b", "a/../b", "a/status", "a:b", "\u00e4", "a" * 201, "a\n"]
)
def test_what_cannot_be_an_id_is_refused(model: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_id(model)
    assert caught.value.detail["error"] == "invalid_model_id" and len(caught.value.message) < 250


def test_a_document_that_stands_for_billions_of_values_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    with pytest.raises(InvalidInput, match="alias"):
        read_document("\n".join(lines).encode())


def test_the_digest_is_that_of_what_models_compute_and_not_of_the_text() -> None:
    one = content_of(entry_of(FIRST))
    default = {"max_batch_tokens": 64, "adapter_path": "dense"}
    other = content_of(entry_of(merged(None, document(profiles={"default": default}))))
    assert digest_of({"a": one, "b": one}) == digest_of({"b": other, "a": other})
    assert digest_of({"a": one}) != digest_of({"b": one}) and digest_of({}) == ""
    local = ModelEntry("acme/m", DirectorySource("/models/m"))
    assert digest_of({"a": content_of(local)}) != digest_of({"a": one})


def test_values_of_the_buckets_are_read_as_they_were_written() -> None:
    assert read_configuration(encode(FIRST)) == FIRST and FIRST.model == "acme/m"
    first = FirstAnswer(VERSION, "d", 201, b"{}")
    assert read_first(encode(first)) == first
    assert key_of("a") == key_of("a") != key_of("b")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 10_000,
        encode(Configuration(VERSION + 1, document())),
        encode(Configuration(VERSION, {})),
        encode(Configuration(VERSION, {"sie_id": "a/b"})),
        encode(Configuration(VERSION, {"sie_id": "../b", "profiles": {}})),
        encode(FirstAnswer(VERSION + 1, "")),
    ],
)
def test_what_is_no_value_is_a_protocol_error_and_nothing_else(data: bytes) -> None:
    for read in (read_configuration, read_first):
        with pytest.raises(ProtocolError):
            read(data)


def test_every_refusal_says_what_it_is() -> None:
    for body in (b"", b"{", b"sie_id: 5", b"sie_id: a/b\nprofiles: 1"):
        with pytest.raises(PenstockError) as caught:
            read_document(body)
        assert caught.value.detail["error"] in ("parse_error", "validation_error")


def told(**changes: Any) -> bytes:
    message = {"model_id": "acme/m", "model_config": yaml.safe_dump(document()), "epoch": 3, **changes}
    return msgspec.json.encode({name: value for name, value in message.items() if value is not None})


def test_a_message_brings_a_document_and_unknown_fields_are_passed_over() -> None:
    message = read_message(told(producer_id="sie-config", profiles_added=["default"], more={"a": [1]}))
    assert (message.producer, message.epoch) == ("sie-config", 3)
    assert document_of(message, "default") == document()
    assert read_message(told(router_id="old")).producer == "old"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "undecodable"),
        (b"\x82\xa8model_id\xa6acme/m", "undecodable"),
        (b"[]", "array"),
        (b'{"model_id": "a\xff"}', "undecodable"),
        (b'{"more": ' + b"[" * 200_000, "undecodable"),
        (told(model_id=None), "model_id"),
        (told(model_id=""), "model_id"),
        (told(model_id="x" * 257), "model_id"),
        (told(model_config=None), "model_config"),
        (told(model_config=""), "model_config"),
        (told(model_config={"sie_id": "acme/m"}), "model_config"),
        (told(epoch=-1), "epoch"),
        (told(epoch=2**60), "epoch"),
        (told(epoch="3"), "epoch"),
        (told(epoch=1.5), "epoch"),
        (told(producer_id=7), "producer_id"),
        (told(v=2), "version 2"),
        (b" " * (MOST_MESSAGE_NBYTES + 1), str(MOST_MESSAGE_NBYTES)),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_message(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_id": "acme/other"}, "acme/other"),
        ({"model_config": "sie_id: &a [x]\nb: *a"}, "alias"),
        ({"model_config": "- 1"}, "map"),
        ({"model_config": "["}, "YAML"),
        ({"model_config": "sie_id: ../x\nprofiles: {default: {}}", "model_id": "../x"}, "sie_id"),
        ({"model_config": "sie_id: acme/m\nprofiles: {}"}, "profiles"),
        ({"model_config": " " * (MOST_NBYTES + 1)}, str(MOST_NBYTES)),
        ({"bundle_id": "other"}, "bundle_id"),
    ],
)
def test_what_a_message_must_not_bring_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigRefused, InvalidInput), match=words) as refused:
        document_of(read_message(told(**changes)), "default")
    assert len(refused.value.message) < 400
