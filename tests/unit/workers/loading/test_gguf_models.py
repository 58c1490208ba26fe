"""Models in GGUF files: named, described, copied and served, with tokenizer and end tokens of the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.wire.messages import Ending, GenerateCall, Sampling
from penstock import downloads
from penstock.own_models.files import CannotTell
from penstock.own_models.places import find
from tests.tiny import chat_tokenizers, gguf_models
from tests.unit.workers.adapters import test_causal_adapter
from workers.adapters.base import Prepared
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared import gguf_weights
from workers.lifecycle.loading import fetch
from workers.lifecycle.memory_budget import estimate
from workers.loading.gguf_file import GgufRefused, read_model
from workers.loading.source import SourceError, from_directory

TEXTS = (
    "What is a penstock?",
    "In 2024, 1234 + 56 = 1290.",
    "Où est l'été? 日本語 и кириллица 😀👍🏽",
    "def f(x):\n\treturn x  # two  spaces\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
)


def unread(phase: str, part: float) -> None:
    """Progress that nobody reads."""


def adapter_of(path: Path) -> CausalAdapter:
    context = test_causal_adapter.context(path.parent)
    return CausalAdapter.load(dataclasses.replace(context, gguf=path.name, max_sequence_length=None))


def generated(adapter: CausalAdapter, calls: list[GenerateCall]) -> list[str]:
    """Texts of answers that are generated together."""
    texts = {}
    for key, call in enumerate(calls):
        [prepared] = adapter.prepare(call.items, call)
        assert isinstance(prepared, Prepared)
        texts[key] = ""
        adapter.engine.add(dataclasses.replace(prepared.payload, key=key))
    while adapter.engine.has_work:
        for emission in adapter.engine.step():
            texts[emission.key] += emission.text
    return list(texts.values())


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_1"), ("qwen3", "Q6_K")])
def test_answers_are_those_of_transformers_with_the_numbers_of_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_models.write(path, family, kind)
    adapter = adapter_of(path)
    count = sum(parameter.numel() for parameter in wanted.parameters())
    held = adapter.held
    assert (held.architecture, held.parameters, held.stored) == (family, count, kind)
    calls = [
        GenerateCall(
            messages=[{"role": "user", "content": text}],
            ending=Ending(max_tokens=24, ignore_eos=True),
            sampling=Sampling(temperature=0.0),
        )
        for text in TEXTS[:4]
    ]
    tokenizer, texts = chat_tokenizers.build("chatml"), []
    for call in calls:
        ids = tokenizer.apply_chat_template(call.messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            found = wanted.generate(
                torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False
            )
        texts.append(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
    assert generated(adapter, calls) == texts
    assert [generated(adapter, [call])[0] for call in calls] == texts


def test_the_tokenizer_of_a_file_cuts_texts_like_the_original(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "qwen2", fields={"tokenizer.ggml.eot_token_id": 7})
    stored, original = read_model(path), chat_tokenizers.build("chatml")
    tokenizer = gguf_weights.read_tokenizer(stored)
    for text in (*TEXTS, ""):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == original.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == (original.eos_token, original.pad_token)
    ends = {7, original.eos_token_id, *original.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])}
    assert gguf_weights.end_ids(stored) == sorted(ends - {None})
    assert tokenizer.model_max_length == gguf_models.CONTEXT


@pytest.mark.parametrize(
    ("name", "words"),
    [("smollm", ["a", " ", "1", "2", "3"]), ("gpt-2", ["a", " 123"]), ("llama-bpe", ["a", " ", "123"])],
)
def test_texts_are_cut_in_the_way_that_the_file_names(name: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "qwen2", fields={"tokenizer.ggml.pre": name})
    backend = gguf_weights.read_tokenizer(read_model(path)).backend_tokenizer
    assert [word.replace("Ġ", " ") for word, _ in backend.pre_tokenizer.pre_tokenize_str("a 123")] == words


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre 'unheard-of'"),
        ({"tokenizer.ggml.merges": None}, "there is no tokenizer.ggml.merges"),
        (
            {"tokenizer.ggml.eos_token_id": 100_000},
            r"tokenizer.ggml.eos_token_id 100000: there are \d+ tokens",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None},
            "neither tokenizer.ggml.merges nor",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_had_is_refused(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "qwen2", fields=fields)
    with pytest.raises(GgufRefused, match=why):
        gguf_weights.read_tokenizer(read_model(path))


def test_a_file_is_described_by_its_fields_and_served_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Chat.Q4_0.gguf"
    gguf_models.write(path, "qwen2", "Q4_0")
    own = find(str(path))
    source = {"kind": "directory", "path": str(tmp_path), "gguf": path.name}
    assert own.entry == {
        "id": "Tiny-Chat.Q4_0",
        "source": source,
        "adapter": "causal",
        "inputs": ["text"],
        "outputs": {"chat": {}},
        "max_sequence_length": gguf_models.CONTEXT,
    }
    assert {told.what: told.where for told in own.told} == {
        "family": "general.architecture qwen2",
        "weights": path.name,
        "chat template": "tokenizer.chat_template",
        "length": "qwen2.context_length",
    }
    assert "mostly Q4_0" in own.lines
    assert find(str(path), "mine").entry["id"] == "mine"
    assert find(str(tmp_path)).entry == {**own.entry, "id": tmp_path.name}, "a directory with one model"
    entry = msgspec.convert(own.entry, ModelEntry)
    assert fetch(entry, unread) == tmp_path
    values = read_model(path).values
    assert estimate(tmp_path, gguf=path.name, dtype=torch.bfloat16) == 2 * values
    assert estimate(tmp_path, gguf=path.name) == path.stat().st_size


def test_of_several_files_one_is_named(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "tiny-Q4_0.gguf", "qwen2", "Q4_0", parts=2)
    gguf_models.write(tmp_path / "tiny-Q8_0.gguf", "qwen2", "Q8_0")
    names = "tiny-Q4_0-00001-of-00002.gguf, tiny-Q8_0.gguf"
    with pytest.raises(
        CannotTell, match=rf"there are 2 GGUF models: {names}; name one, such as {tmp_path}/tiny-Q4"
    ):
        find(str(tmp_path))
    own = find(str(tmp_path / "tiny-Q4_0-00002-of-00002.gguf"))
    assert (own.entry["id"], own.entry["source"]["gguf"]) == ("tiny-Q4_0", "tiny-Q4_0-00001-of-00002.gguf")
    (tmp_path / "tiny-Q4_0-00002-of-00002.gguf").unlink()
    with pytest.raises(CannotTell, match="1 of 2 files are missing"):
        find(str(tmp_path / "tiny-Q4_0-00001-of-00002.gguf"))


def test_a_file_that_a_load_would_refuse_is_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "qwen2")
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(CannotTell, match=r"model\.gguf: model\.gguf is cut off: \d+ bytes"):
        find(str(path))
    with pytest.raises(SourceError, match=r"model\.gguf is cut off"):
        from_directory(tmp_path, path.name)
    with pytest.raises(SourceError, match=r"the model directory has no other\.gguf"):
        from_directory(tmp_path, "other.gguf")
    with pytest.raises(CannotTell, match="GGUF files hold models of the family causal"):
        find(str(path), stated={"adapter": "dense"})
    with pytest.raises(CannotTell, match="this is a file and no GGUF"):
        find(__file__)


@pytest.mark.parametrize("name", ["/etc/model.gguf", "../model.gguf", "a/../../model.gguf", "model.bin"])
def test_a_catalog_names_a_gguf_file_inside_of_the_directory_only(name: str) -> None:
    raw = {"id": "m", "source": {"kind": "directory", "path": "/models", "gguf": name}}
    with pytest.raises(msgspec.ValidationError, match=r"source.gguf"):
        msgspec.convert(raw, ModelEntry)


def test_a_copy_has_the_file_and_its_parts_alone(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    gguf_models.write(here / "tiny.gguf", "qwen2", parts=2)
    (here / "other.gguf").write_bytes(b"GGUF")
    entry = msgspec.convert(find(str(here / "tiny-00001-of-00002.gguf")).entry, ModelEntry)
    assert downloads.run([entry.id], Catalog([entry]), str(tmp_path / "to")) == 0
    copy = tmp_path / "to" / "tiny"
    names = sorted(path.name for path in copy.iterdir())
    assert names == ["penstock.yaml", "tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]
    own = find(str(copy))
    assert own.complete and own.entry["source"] == {
        "kind": "directory", "path": str(copy), "gguf": "tiny-00001-of-00002.gguf",
    }  # fmt: skip


def test_a_hub_source_states_its_file() -> None:
    raw = {"id": "m", "source": {"kind": "hub", "repo": "o/m", "gguf": "q/m-Q4_K_M.gguf"}}
    assert msgspec.convert(raw, ModelEntry).source == HubSource("o/m", gguf="q/m-Q4_K_M.gguf")


@pytest.mark.parametrize(("prefix", "first"), [(None, "\u2581ab"), (False, "ab")])
def test_a_sentencepiece_vocabulary_merges_by_its_scores(
    prefix: bool | None, first: str, tmp_path: Path
) -> None:
    letters = ["\u2581", "a", "b", "c"]
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        "ab",
        "\u2581ab",
        "abc",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 259 + [-9.0] * 4 + [-1.0, -2.0, -3.0]
    path = tmp_path / "model.gguf"
    fields = {
        "tokens": words,
        "scores": scores,
        "token_type": kinds,
        "model": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
        "add_bos_token": None,
    }
    described = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    dropped = dict.fromkeys(("merges", "pre", "padding_token_id"))
    gguf_models.write(path, fields={**described, **{f"tokenizer.ggml.{name}": None for name in dropped}})
    tokenizer = gguf_weights.read_tokenizer(read_model(path))
    ids = tokenizer.encode("ab c\u00e9")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", first, "\u2581", "c", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab c\u00e9"
