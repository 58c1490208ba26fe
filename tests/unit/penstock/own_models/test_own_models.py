"""Models that the catalog lacks: what their own files say, what is refused, and what is served then."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ipc.catalog.entries import Catalog, DirectorySource
from ipc.catalog.reading import read_catalog, read_entry
from ipc.errors import ConfigError
from ipc.settings import Settings, load
from penstock import downloads
from penstock.cli import main
from penstock.own_models import entries, fitting
from penstock.own_models.files import MOST_BYTES, CannotTell, ModelFiles
from penstock.own_models.places import OWN_ENTRY, Own, find
from tests.conformance.minilm import DIRECTORY as MINILM
from tests.conformance.minilm import reference
from tests.fakes.hub import Files, hub
from tests.harness.server import FAKE_CATALOG
from tests.tiny import models as tiny
from tests.tiny import onnx_files
from tests.unit.workers.adapters.test_dense_reference import encode
from tests.unit.workers.adapters.test_dense_reference import load as load_adapter
from workers.loading.program_files import external_files
from workers.repository.catalog_files import open_catalog

BERT = {"architectures": ["BertModel"], "hidden_size": 8, "max_position_embeddings": 512, "vocab_size": 30}
KINDS = "sentence_transformers.models."
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole file of weights."""


def write(root: Path, **files: Any) -> Path:
    """A directory with these JSON files, `__` for a slash and without endings; nobody reads weights and words."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "model.safetensors").write_bytes(NO_TENSORS)
    (root / "vocab.txt").touch()
    for name, value in files.items():
        path = root / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return root


def modules(*kinds: str) -> list[dict[str, str]]:
    """modules.json of these kinds, each after the first in a directory of its own."""
    return [
        {"path": f"{at}_{kind}" if at else "", "type": KINDS + kind, "name": str(at)}
        for at, kind in enumerate(kinds)
    ]


def architecture(name: str, **more: Any) -> dict[str, Any]:
    """config.json of a class of transformers."""
    return {**BERT, "architectures": [name], **more}


def told(own: Own) -> dict[str, str]:
    """What the operator is told, by what it is about."""
    return {line.what: line.value for line in own.told}


def test_a_real_directory_says_everything() -> None:
    own = find(str(MINILM), "minilm")
    assert own.entry == {
        "id": "minilm",
        "source": {"kind": "directory", "path": str(MINILM)},
        "adapter": "dense",
        "inputs": ["text"],
        "outputs": {"dense": {"dims": 384, "similarity": "cosine"}},
        "max_sequence_length": 256,
        "loadtime": {"pooling": "mean", "normalize": True},
    }
    assert [line.where for line in own.told] == [
        "modules.json: Transformer > Pooling > Normalize",
        "1_Pooling/config.json",
        "modules.json",
        "the configuration of the layers",
        "none is stored",
        "sentence_bert_config.json",
    ]


def test_a_served_path_gives_the_vectors_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = serve(monkeypatch, tmp_path, f"{MINILM}=text-embedding-3-small", "--models", "BAAI/bge-m3")
    assert "text-embedding-3-small, from " in capsys.readouterr().err
    catalog = open_catalog(started.catalog, started.repository)
    assert [entry.id for entry in catalog.sources] == ["BAAI/bge-m3", "text-embedding-3-small"]
    entry = catalog["text-embedding-3-small"]
    adapter = load_adapter(MINILM, length=entry.max_sequence_length, **entry.runtime, **entry.loadtime)
    texts = ["Water turns the wheel.", "x", "a longer text about turbines " * 60]
    assert np.abs(encode(adapter, texts) - reference(texts)).max() < 1e-5
    assert adapter.dims == {"dense": entry.outputs["dense"].dims}


def serve(monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str) -> Settings:
    """The settings with which `penstock serve` would become a server."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    found: list[Settings] = []

    def become(program: str, command: list[str], environment: Mapping[str, str]) -> None:
        found.append(load(None, environ=environment))

    monkeypatch.setattr(os, "execve", become)
    main(["serve", *arguments, "--set", f"run.dir={root / 'run'}"])
    return found[0]


POOLING = {"pooling_mode": "cls", "include_prompt": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (
        {
            "modules": modules("Transformer", "Pooling", "Dense"),
            "1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "2_Dense__config": {"in_features": 16, "out_features": 4},
            "config_sentence_transformers": {
                "prompts": {"query": "q: ", "document": None}, "similarity_fn_name": "dot",
            },
            "config": architecture("XLMRobertaModel", model_type="xlm-roberta", pad_token_id=1),
            "tokenizer_config": {"model_max_length": 10**30},
        },
        {
            "outputs": {"dense": {"dims": 4, "similarity": "dot"}},
            "loadtime": {"pooling": ["cls", "mean"], "normalize": False},
            "runtime": {"prompts": {"query": "q: "}},
            "max_sequence_length": 510,
        },
    ),
    "dense in a directory below": (
        {
            "modules": [{"path": "0_Transformer", "type": KINDS + "Transformer"},
                        {"path": "1_Pooling", "type": KINDS + "Pooling"}],
            "0_Transformer__config": BERT,
            "0_Transformer__sentence_bert_config": {"max_seq_length": 64},
            "1_Pooling__config": POOLING,
        },
        {"adapter": "dense", "outputs": {"dense": {"dims": 8, "similarity": "cosine"}}, "max_sequence_length": 64},
    ),
    "dense without modules": (
        {"config": BERT, "1_Pooling__config": POOLING},
        {"adapter": "dense", "loadtime": {"pooling": "cls", "normalize": True}},
    ),
    "static_embedding": (
        {"modules": modules("StaticEmbedding", "Normalize"), "config_sentence_transformers": {"truncate_dim": 2}},
        {"outputs": {"dense": {"similarity": "cosine"}}, "loadtime": {"normalize": True}},
    ),
    "static_embedding without modules": (
        {"config": {"normalize": False, "embedding_dtype": "int8"}},
        {"adapter": "static_embedding", "loadtime": {"normalize": False}},
    ),
    "splade": (
        {"modules": modules("MLMTransformer", "SpladePooling"), "config": architecture("BertForMaskedLM")},
        {"outputs": {"sparse": {"dims": 30, "similarity": "dot"}}},
    ),
    "splade with queries that are looked up": (
        {
            "modules": [{"path": "", "type": "sentence_transformers.sparse_encoder.models.Router"}],
            "document_0_MLMTransformer__config": architecture("BertForMaskedLM"),
            "document_1_SpladePooling__config": {},
            "idf": {},
        },
        {"adapter": "splade", "outputs": {"sparse": {"dims": 30, "similarity": "dot"}},
         "loadtime": {"query_encoding": "idf"}},
    ),
    "colbert": (
        {
            "modules": modules("Transformer", "Dense"),
            "1_Dense__config": {"in_features": 8, "out_features": 4, "bias": False},
            "config": BERT,
            "config_sentence_transformers": {"query_length": 32, "document_length": 180},
            "sentence_bert_config": {"max_seq_length": 179},
        },
        {"outputs": {"multivector": {"similarity": "maxsim", "dims": 4}, "score": {}}, "max_sequence_length": 180},
    ),
    "cross_encoder": (
        {"modules": modules("Transformer"), "config": architecture("BertForSequenceClassification", num_labels=1)},
        {"outputs": {"score": {}}, "max_sequence_length": 512},
    ),
    "nli_zero_shot": (
        {"config": architecture("BertForSequenceClassification", id2label={"0": "NO", "1": "Entailment"})},
        {"outputs": {"json": {}}, "inputs": ["text"]},
    ),
    "text_classification": (
        {"config": architecture("BertForSequenceClassification", id2label={"0": "joy", "1": "fear"})},
        {"outputs": {"json": {}}},
    ),
    "ner": ({"config": architecture("BertForTokenClassification")}, {"outputs": {"json": {}}}),
    "causal": (
        {
            "config": architecture("Gemma3ForCausalLM", text_config={"max_position_embeddings": 99}),
            "tokenizer_config": {"chat_template": "{{ messages }}"},
        },
        {"outputs": {"chat": {}}, "max_sequence_length": 99},
    ),
    "clip": (
        {"config": {"architectures": ["CLIPModel"], "projection_dim": 16},
         "tokenizer_config": {"model_max_length": 77}},
        {"inputs": ["text", "image"], "outputs": {"dense": {"dims": 16, "similarity": "cosine"}},
         "max_sequence_length": 77},
    ),
    "colqwen2": (
        {"config": {"architectures": ["ColQwen2ForRetrieval"], "embedding_dim": 128}},
        {"outputs": {"multivector": {"similarity": "maxsim", "dims": 128}, "score": {}}},
    ),
    "donut": (
        {"config": {"architectures": ["VisionEncoderDecoderModel"], "encoder": {"model_type": "donut-swin"}}},
        {"inputs": ["image"], "outputs": {"json": {}}},
    ),
    "lighton_ocr": ({"config": architecture("LightOnOCRForConditionalGeneration")}, {"inputs": ["image"]}),
    "glm_ocr": ({"config": architecture("GlmOcrForConditionalGeneration")}, {"inputs": ["image"]}),
    "detection": ({"config": architecture("DetrForObjectDetection")}, {"inputs": ["image"]}),
    "gliner2": (
        {"config": architecture("SpanExtractorModel", model_type="extractor"), "encoder_config__config": BERT},
        {"inputs": ["text"], "outputs": {"json": {}}},
    ),
    "gliner": (
        {"gliner_config": {"max_len": 384, "model_name": "microsoft/deberta-v3-base"}},
        {"outputs": {"json": {}}, "max_sequence_length": 384},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_each_family_give_its_entry(name: str, tmp_path: Path) -> None:
    files, wanted = CASES[name]
    own = find(str(write(tmp_path / "my-model", **files)))
    assert own.entry | {"adapter": name, **wanted} == own.entry
    (tmp_path / "entry.yaml").write_text(own.text)
    entry = read_entry(tmp_path / "entry.yaml")
    assert (entry.id, entry.served, entry.error) == ("my-model", True, "")


def test_the_width_of_static_embeddings_is_that_of_their_table(tmp_path: Path) -> None:
    files = CASES["static_embedding"][0]
    root = write(tmp_path / "m", **files)
    save_file({"embedding.weight": torch.zeros(9, 6)}, str(root / "model.safetensors"))
    assert find(str(root)).entry["outputs"]["dense"]["dims"] == 2, "the first values"
    (root / "config_sentence_transformers.json").unlink()
    assert find(str(root)).entry["outputs"]["dense"]["dims"] == 6


def test_bge_m3_is_known_by_its_heads(tmp_path: Path) -> None:
    files = CASES["dense without modules"][0] | {"modules": modules("Transformer", "Pooling")}
    root = write(tmp_path / "m", **files)
    assert find(str(root)).entry["adapter"] == "dense"
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (root / name).touch()
    assert find(str(root)).entry["adapter"] == "bge_m3"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "there is no config.json with `architectures`"),
        ({"config": BERT}, "State adapter: dense with loadtime.pooling"),
        ({"config": architecture("BertForMaskedLM")}, "State adapter: splade, or adapter: dense with"),
        (
            {"config": architecture("LlamaForCausalLM") | {"quantization_config": {"quant_method": "hqq"}}},
            "quantization_config.quant_method hqq is not read; read are gptq, awq (version gemm), fp8",
        ),
        (
            {"config": architecture("LlamaForCausalLM") | {"quantization_config": {"quant_method": "gptq"}}},
            "gptq: quantization_config.bits None is not read; read are 4, 8",
        ),
        (
            {"config": architecture("BertForTokenClassification") | {"quantization_config": {"quant_method": "fp8"}}},
            "quantization_config.quant_method fp8: the family ner reads no quantised weights",
        ),
        ({"config": architecture("BlipForConditionalGeneration")}, "no family here runs this class"),
        ({"config": architecture("WhisperForConditionalGeneration")}, "a model of speech, which no family here runs"),
        ({"config": architecture("T5ForConditionalGeneration")}, "an encoder alone (T5EncoderModel) gives vectors"),
        ({"config": architecture("MarianMTModel")}, "turns a text into a text, which no family here runs"),
        ({"modules": modules("SparseAutoEncoder"), "config": BERT}, "no family here runs these modules"),
        ({"modules": modules("Transformer", "LogitScore")}, "State adapter: qwen3_reranker with"),
        ({"modules": [{"type": "other.Pooling", "path": ""}]}, "unsupported module 'other.Pooling'"),
        ({"config": architecture("Qwen3VLForConditionalGeneration")}, "State adapter: qwen3_vl_embedding, or adapter:"),
        ({"config": {"model_type": "extractor", "architecture": "boundary"}}, "architecture 'boundary'; only span is"),
        ({"adapter_config": {"base_model_name_or_path": "org/base"}}, "LoRA adapter of org/base, no model"),
        ({"config": "{"}, "config.json: no JSON: "),
        ({"config": "[1]"}, "config.json: expected a JSON object, got list"),
        ({"config": "null"}, "config.json: expected a JSON object, got NoneType"),
        ({"config": "[" * 100_000}, "config.json: no JSON: "),
        ({"modules": "{}"}, "modules.json: expected a JSON list of objects"),
        ({"config": " " * (MOST_BYTES + 1)}, f"config.json: larger than {MOST_BYTES} bytes"),
        ({"modules": [{"type": KINDS + "Pooling", "path": "../../etc"}]}, "path ../../etc: expected a directory"),
        ({"modules": [{"type": KINDS + "Pooling", "path": "/etc"}]}, "path /etc: expected a directory"),
        ({"modules": [{"type": KINDS + "Pooling", "path": 7}]}, "path: expected a text, got 7"),
        (
            {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"pooling_mode": ["\x1b[2Jx"]}},
            r"the layout of the model cannot be read: unknown pooling \x1b[2Jx",
        ),
        ({"modules": modules("Transformer", "Pooling"), "config": BERT}, "1_Pooling/config.json is missing, which"),
        (
            {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": POOLING},
            "config.json is missing, empty or no file; the file describes the transformer",
        ),
        ({"config": architecture("\x1b[31mEvil")}, r"architectures \x1b[31mEvil: no family"),
        (
            {**CASES["dense"][0], "config_sentence_transformers": {"prompts": {"q": 1}}},
            "prompts: expected at most 1000 texts",
        ),
        ({**CASES["dense"][0], "config_sentence_transformers": {"prompts": [1]}}, "cannot be read"),
        ({**CASES["dense"][0], "sentence_bert_config": {"max_seq_length": "x"}}, "cannot be read"),
        (
            {
                "config": architecture("MPNetForSequenceClassification")
                | {"model_type": "mpnet", "max_position_embeddings": 2, "pad_token_id": 1, "num_labels": 1}
            },
            "pad_token_id 1 leaves none of 2 positions (max_position_embeddings)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_with_the_reason(files: Any, why: str, tmp_path: Path) -> None:
    root = write(tmp_path / "my-model", **files)
    with pytest.raises(CannotTell) as refused:
        find(str(root))
    assert why in refused.value.message and refused.value.message.startswith(f"{root}: ")
    assert len(refused.value.message) < 600 and "\x1b" not in refused.value.message


def test_a_directory_without_weights_or_with_a_million_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "m", config=architecture("BertForTokenClassification"))
    os.mkfifo(root / "modules.json")
    os.mkfifo(root / "model.safetensors.index.json")
    (root / "circle").symlink_to("circle")
    assert find(str(root)).entry["adapter"] == "ner", "a pipe is no file"
    (root / "model.safetensors").rename(root / "model.gguf")
    with pytest.raises(CannotTell, match=r"model\.gguf is not a GGUF file"):
        find(str(root))
    (root / "model.gguf").unlink()
    with pytest.raises(CannotTell, match="there are no weights"):
        find(str(root))
    monkeypatch.setattr("penstock.own_models.files.MOST_FILES", 8)
    (root / "below").mkdir()
    for number in range(8):
        os.mkfifo(root / "below" / str(number))
    with pytest.raises(CannotTell, match="more than 8 files"):
        find(str(root))


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        (
            {"vocab_size": 31},
            {},
            "embeddings.word_embeddings.weight is [30, 8] in the weights and [31, 8] by config.json",
        ),
        (
            {"hidden_size": 9},
            {},
            "embeddings.word_embeddings.weight is [30, 8] in the weights and [30, 9] by config.json",
        ),
        (
            {"num_hidden_layers": 3},
            {},
            "num_hidden_layers is 3, and the weights have 2 layers, the last with encoder.layer.1.bias",
        ),
        ({"num_hidden_layers": 1}, {}, "num_hidden_layers is 1, and the weights have 2 layers"),
        ({}, {"encoder.layer.02.bias": [8]}, ""),
        ({}, {f"encoder.layer.{'9' * 5000}.bias": [8]}, ""),
        ({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}, {}, ""),
        ({"embedding_size": 4, "num_hidden_layers": 9}, {"embeddings.word_embeddings.weight": [30, 4],
          "decoder.layer.0.bias": [1]}, ""),
        ({"vocab_size": 31, "auto_map": {}}, {}, ""),
        ({"vocab_size": 31, "quantization_config": {"quant_method": "mxfp4"}}, {}, ""),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_headers_of_its_weights_is_refused_before_the_start(
    config: dict[str, Any], tensors: dict[str, list[int]], why: str, tmp_path: Path
) -> None:
    stated = {
        **architecture("BertForTokenClassification"),
        "model_type": "bert",
        "num_hidden_layers": 2,
        **config,
    }
    root = write(tmp_path / "m", config=stated)
    shapes = {"embeddings.word_embeddings.weight": [30, 8]} | {
        f"encoder.layer.{n}.bias": [8] for n in range(2)
    }
    save_file({k: torch.zeros(v) for k, v in (shapes | tensors).items()}, str(root / "model.safetensors"))
    if not why:
        assert find(str(root)).entry["adapter"] == "ner"
        return
    with pytest.raises(CannotTell) as refused:
        find(str(root))
    assert f"config.json does not fit the weights: {why}" in refused.value.message


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "field", "why"),
    [
        (
            "clip",
            "vision_config.hidden_size",
            r"vision_model.encoder.layers.0.mlp.fc1.weight is \[64, 32\] in",
        ),
        (
            "colpali",
            "vlm_config.text_config.num_hidden_layers",
            "num_hidden_layers is 3, and the weights have 2 ",
        ),
        ("donut", "decoder.vocab_size", "decoder.model.decoder.embed_tokens.weight is "),
        ("florence2", "text_config.vocab_size", r"shared.weight is |embed_tokens.weight is "),
        ("gliclass", "encoder_config.vocab_size", "word_embeddings.weight is "),
        ("layoutlmv3", "intermediate_size", "intermediate.dense.weight is "),
        ("lighton_ocr", "text_config.intermediate_size", "mlp.down_proj.weight is "),
        ("nli_bart", "decoder_layers", "decoder_layers is 2, and the weights have 1 layers"),
        ("qwen3_vl", "text_config.hidden_size", r"embed_tokens.weight is \["),
    ],
)
def test_weights_of_every_family_are_held_against_their_config(
    family: str, field: str, why: str, tmp_path: Path
) -> None:
    root = tiny.build(family, tmp_path / "m")
    fitting.refuse_unfitting("m", ModelFiles.of_directory(root))
    stored = json.loads((root / "config.json").read_text())
    *around, name = field.split(".")
    functools.reduce(operator.getitem, around, stored)[name] += 1
    (root / "config.json").write_text(json.dumps(stored))
    with pytest.raises(CannotTell, match=f"m: config.json does not fit the weights: .*(?:{why})"):
        fitting.refuse_unfitting("m", ModelFiles.of_directory(root))


@pytest.mark.parametrize("family", ["dense_t5", "grounding_dino", "rtdetr", "colqwen2"])
def test_weights_with_parts_of_several_kinds_fit_their_config(family: str, tmp_path: Path) -> None:
    root = tiny.build(family, tmp_path / "m")
    fitting.refuse_unfitting("m", ModelFiles.of_directory(root))


def test_weights_that_are_cut_off_or_missing_are_refused_before_the_start(tmp_path: Path) -> None:
    root = write(tmp_path / "m", config=architecture("BertForTokenClassification"))
    (root / "model.safetensors").write_bytes(NO_TENSORS[:-1])
    with pytest.raises(CannotTell, match=r"m: model\.safetensors is cut off inside its header"):
        find(str(root))
    (root / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CannotTell, match=r"a pointer of Git LFS, .* fetch the file with `git lfs pull`"):
        find(str(root))
    (root / "model.safetensors").write_bytes(NO_TENSORS)
    write(root, **{"model.safetensors.index": {"weight_map": {"a": "model-2.safetensors"}}})
    with pytest.raises(CannotTell, match=r"1 of 1 weight files are missing, first model-2\.safetensors"):
        find(str(root))


def test_an_index_of_weights_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "m", config=architecture("BertForTokenClassification"))
    write(root, **{"model.safetensors.index": {"weight_map": {"a": "model.safetensors"}}})
    assert find(str(root)).entry["adapter"] == "ner"
    monkeypatch.setattr("workers.loading.stored_files._MOST_HEADER_BYTES", 40)
    with pytest.raises(CannotTell, match=r"model\.safetensors\.index\.json is damaged"):
        find(str(root))


def test_a_machine_with_frontends_only_reads_directories_and_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "m", config=architecture("BertForTokenClassification"))
    for name in ("huggingface_hub", "torch", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find(str(root)).entry["adapter"] == "ner"
    with pytest.raises(CannotTell, match=r"org/new: a model of the hub needs the extra worker"):
        find("org/new")


def test_a_path_that_is_no_text_is_refused_without_a_stack(tmp_path: Path) -> None:
    root = write(
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff")),
        config=architecture("BertForTokenClassification"),
    )
    with pytest.raises(CannotTell, match="a path must be printable text; make a link") as refused:
        find(str(root), "m")
    assert refused.value.message.isascii()


def test_a_stored_length_of_vectors_is_told(tmp_path: Path) -> None:
    files = CASES["dense"][0]
    own = find(str(write(tmp_path / "m", **files | {"config_sentence_transformers": {"truncate_dim": 4}})))
    assert told(own)["truncation"] == "the first 4 values of a vector"
    assert told(own)["width"] == "4" and own.entry["outputs"]["dense"]["dims"] == 4
    for at, wrong in enumerate((0, -1, True, "4", 4.0, [4])):
        root = write(
            tmp_path / f"m-{at}", **files | {"config_sentence_transformers": {"truncate_dim": wrong}}
        )
        with pytest.raises(CannotTell, match="truncate_dim: expected a whole number above 0"):
            find(str(root))


def test_a_repository_in_the_hub_cache_is_told_from_its_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "models--org--m"
    snapshot = write(root / "snapshots" / "abc", config=architecture("BertForTokenClassification"))
    with pytest.raises(
        CannotTell, match=r"a repository in the hub cache; name a directory below .*/snapshots, or its"
    ):
        find(str(root))
    assert find(str(snapshot)).entry["id"] == "abc"


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "m", **CASES["dense in a directory below"][0])
    (root / "vocab.txt").rename(root / "0_Transformer" / "sentencepiece.bpe.model")
    assert find(str(root)).entry["adapter"] == "dense"
    (root / "0_Transformer" / "sentencepiece.bpe.model").unlink()
    with pytest.raises(CannotTell, match=r"no tokenizer, such as tokenizer\.json\. Save the tokenizer"):
        find(str(root))


def test_fields_that_the_operator_states_go_before_the_files(tmp_path: Path) -> None:
    root = write(tmp_path / "m", config=BERT)
    own = find(str(root), "x", {"adapter": "dense", "loadtime": {"pooling": "cls"}, "dimensions": [4]})
    assert own.entry["loadtime"] == {"pooling": "cls", "normalize": True}
    assert (own.entry["id"], own.entry["dimensions"]) == ("x", [4])
    assert told(own)["pooling"] == "cls"
    with pytest.raises(CannotTell, match=r"State loadtime\.pooling"):
        find(str(root), "", {"adapter": "dense"})
    with pytest.raises(CannotTell, match="no family whose files are read here"):
        find(str(root), "", {"adapter": "my.module:Class"})


def test_a_directory_that_brings_its_entry_is_served_by_the_entry(tmp_path: Path) -> None:
    root = write(tmp_path / "copy", config=BERT)
    text = "id: org/model\nsource: {kind: directory, path: .}\nadapter: dense\nruntime: {query_template: 'q: {text}'}\n"
    (root / OWN_ENTRY).write_text(text)
    own = find(str(root))
    assert own.entry["source"] == {"kind": "directory", "path": str(root)}
    assert (own.entry["id"], own.entry["runtime"]) == ("org/model", {"query_template": "q: {text}"})
    assert find(str(root), "other").entry["id"] == "other"
    for hostile in (
        text.replace("path: .", "path: /etc"),
        text.replace("adapter: dense", "adapter: os:system"),
        text + "loras: {x: {kind: directory, path: /etc}}\n",
        text + "unknown: 1\n",
        text + "runtime: {prompts: {a: &a [x], b: *a}}\n",
        text + "#" * (1 << 16),
        "[]",
        "id: [",
    ):
        (root / OWN_ENTRY).write_text(hostile)
        with pytest.raises(CannotTell, match=re.escape(OWN_ENTRY)):
            find(str(root))


@pytest.fixture
def near_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub of this process: call with repositories."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    opened = []

    def start(repositories: Mapping[str, Files]) -> Any:
        opened.append(hub(repositories))
        found = opened[-1].__enter__()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", found.url + TEMPLATE)
        return found

    yield start
    for each in opened:
        each.__exit__(None, None, None)


TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


def test_a_repository_of_the_hub_is_read_by_its_small_files(
    near_hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = near_hub(
        {
            "org/new": {
                "config.json": json.dumps(BERT | {"model_type": "bert"}).encode(),
                "modules.json": json.dumps(modules("Transformer", "Pooling")).encode(),
                "1_Pooling/config.json": json.dumps(POOLING).encode(),
                "tokenizer.json": b'{"model": {"vocab": {}}}',
                "model.safetensors": b"never",
                "sparse_linear.pt": b"never",
                "colbert_linear.pt": b"never",
            },
            "org/gguf": {"model.gguf": b"never", "mmproj-model.gguf": b"never"},
            "org/quants": {f"q/m-{kind}.gguf": b"never" for kind in ("Q4_K_M", "Q4_K_S", "UD-Q8_0")},
        }
    )
    own = find("org/new")
    assert own.entry["source"] == {
        "kind": "hub", "repo": "org/new", "files": ["sparse_linear.pt", "colbert_linear.pt"],
    }  # fmt: skip
    assert (own.entry["id"], own.entry["adapter"]) == ("org/new", "bge_m3")
    assert sorted(found.served) == [
        f"org/new/{name}" for name in ("1_Pooling/config.json", "config.json", "modules.json")
    ]
    gguf = find("org/gguf")
    assert gguf.entry["source"] == {"kind": "hub", "repo": "org/gguf", "gguf": "model.gguf"}
    assert (gguf.entry["id"], gguf.entry["adapter"]) == ("org/gguf", "causal")
    with pytest.raises(
        CannotTell, match=r"there are 3 GGUF models: .*; name one, such as org/quants:Q4_K_M$"
    ):
        find("org/quants")
    for tag, name in (("q4_k_s", "Q4_K_S"), ("Q8_0", "UD-Q8_0"), ("UD-Q8_0", "UD-Q8_0")):
        assert find(f"org/quants:{tag}").entry["source"]["gguf"] == f"q/m-{name}.gguf"
    with pytest.raises(CannotTell, match=r"no GGUF file of this repository is Q4_K; there are 3 GGUF models"):
        find("org/quants:Q4_K")
    with pytest.raises(CannotTell, match="has no such repository"):
        find("org/absent")
    found.close()
    with pytest.raises(
        CannotTell, match=r"org/new cannot be had from 127\.0\.0\.1:\d+ \(Connection refused\)"
    ):
        find("org/new")
    [cached] = tmp_path.glob("hub/models--org--new/snapshots/*")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (cached / name).touch()
    (cached / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    save_file({"a": torch.zeros(1)}, cached / "model.safetensors")
    assert find("org/new").entry == own.entry, "the cache serves while the hub is away"
    save_file({"embed_tokens.weight": torch.zeros(5, 8)}, cached / "model.safetensors")
    with pytest.raises(CannotTell, match=r"org/new: config.json does not fit .* is \[5, 8\] in the weights"):
        find("org/new")
    (cached / "tokenizer.json").write_text("{}")
    with pytest.raises(CannotTell, match=r"org/new: tokenizer\.json is no tokenizer: .*`model`"):
        find("org/new")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CannotTell, match="org/absent is not in the hub cache, and HF_HUB_OFFLINE forbids"):
        find("org/absent")


def test_where_no_hub_answers_one_try_ends_with_one_message(
    near_hub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"the hub client tries again after {seconds} s")

    near_hub({}).close()
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", sleep)
    assert downloads.run(["org/any"], Catalog([]), None) == 1
    message = capsys.readouterr().err
    assert message.startswith("penstock: org/any: NETWORK: org/any cannot be had from ")
    assert message.count("\n") == 1 and "(Connection refused); ways" in message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./nowhere", "./nowhere: there is no such directory"),
        ("./nowhere.gguf", "./nowhere.gguf: there is no such file"),
        ("./nowhere.ONNX", "./nowhere.ONNX: there is no such file"),
        ("~nobody-at-all/x", "~nobody-at-all/x: there is no such directory"),
        ("./" + "x" * 5000, "there is no such directory"),
        (__file__, "this is a file and no GGUF; name the directory of the model"),
        ("bge-m4", "'bge-m4' is no model of the catalog, no directory, and no id of the hub"),
        ("BAAI/bge-m4", "did you mean 'BAAI/bge-m3'?"),
        ("a/b/c", "no id of the hub"),
        ("org/\x1b", "no id of the hub"),
    ],
)
def test_a_name_that_means_nothing_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    dirs = "" if "/" in name else str(FAKE_CATALOG)
    run = {"catalog.models": name, "catalog.dirs": dirs, "run.dir": str(tmp_path / "run")}
    config = load(None, run, environ={})
    with pytest.raises(Exception, match=re.escape(why)):
        entries.resolve(config)


def test_a_program_is_served_from_a_repository_that_is_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    Path(elsewhere).mkdir()
    wide, exported = tmp_path / "wide.onnx", tmp_path / "exported"
    wide.write_bytes(onnx_files.table("wide.data", 2, 4))
    (tmp_path / "wide.data").write_bytes(bytes(32))
    (exported / "onnx").mkdir(parents=True)
    for name in ("model.onnx", "model_int8.onnx"):
        (exported / "onnx" / name).write_bytes(onnx_files.add_sub())
    started = serve(
        monkeypatch, tmp_path, f"{wide}=adder", str(exported), "--set", f"repository.dirs={elsewhere}"
    )
    assert started.repository.dirs[0] == elsewhere and not any(started.catalog.models)
    assert f"{wide} is served as adder: named tensors" in capsys.readouterr().err
    root = Path(started.repository.dirs[1])
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {"adder/1/model.onnx", "adder/1/wide.data", "exported/1/model.onnx"}
    assert (root / "exported/1/model.onnx").read_bytes() == (exported / "onnx" / "model.onnx").read_bytes()
    again = serve(
        monkeypatch, tmp_path, f"{wide}=adder", str(exported), "--set", f"repository.dirs={elsewhere}"
    )
    assert again.repository.dirs == started.repository.dirs and not list(root.rglob(".*"))
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(18, "Invalid cross-device link")))
    (copied,) = serve(monkeypatch, tmp_path, str(wide)).repository.dirs
    assert (Path(copied) / "wide/1/model.onnx").read_bytes() == wide.read_bytes()
    explicit = serve(monkeypatch, tmp_path, str(wide), "--set", "repository.control=explicit")
    assert explicit.repository.models == ("wide",)
    (twice,) = serve(monkeypatch, tmp_path, f"{wide}=one", f"{wide}=two").repository.dirs
    assert sorted(path.name for path in Path(twice).iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("file", "laid"),
    [
        ("data/../weights", {"1/weights"}),
        ("link/../../../weights", set()),
        ("{home}/weights", set()),
    ],
)
def test_a_program_names_no_place_outside_of_its_repository(
    file: str, laid: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "program"
    (home / "a" / "b" / "c").mkdir(parents=True)
    (home / "data").mkdir()
    (home / "link").symlink_to(home / "a" / "b" / "c")
    (home / "weights").write_bytes(bytes(32))
    (home / "model.onnx").write_bytes(onnx_files.table(file.format(home=home), 2, 4))
    assert external_files(home / "model.onnx"), "the file lies in the directory of the program"
    [root] = map(Path, serve(monkeypatch, tmp_path, str(home)).repository.dirs)
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {f"program/{name}" for name in {"1/model.onnx", *laid}}


def test_a_program_in_onnx_is_refused_at_the_start_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_bytes(onnx_files.add_sub())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["serve", str(tmp_path / "model.onnx"), "--set", f"run.dir={tmp_path / 'run'}"]) == 3
    assert "model.onnx: a program in ONNX needs the extra onnx (pip install" in capsys.readouterr().err


def test_of_several_programs_one_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decoder.onnx", "encoder.onnx"):
        (tmp_path / name).touch()
    run = {"run.dir": str(tmp_path / "run")}
    for model, why in (
        (
            str(tmp_path),
            f"there are 2 programs: decoder.onnx, encoder.onnx; name one: {tmp_path}/decoder.onnx",
        ),
        (f"{tmp_path}/encoder.onnx=a/b", "'a/b' is no name for a program"),
        (f"{tmp_path}/encoder.onnx,{tmp_path}/decoder.onnx=encoder", "has the id 'encoder'; name it:"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            entries.resolve(load(None, run | {"catalog.models": model}, environ={}))


def test_programs_and_models_of_other_engines_are_refused_with_what_serves_them(tmp_path: Path) -> None:
    for file in ("a model.onnx", "add.pt2"):
        (tmp_path / file).touch()
        with pytest.raises(CannotTell) as refused:
            find(str(tmp_path / file))
        served = f"penstock serve {shlex.quote(str(tmp_path / file))} serves its named tensors"
        assert f"this is a program, which has no catalog entry: {served}" in refused.value.message
    exported = tmp_path / "exported"
    (exported / "onnx").mkdir(parents=True)
    (exported / "config.json").write_text(json.dumps(BERT))
    (exported / "onnx" / "model.onnx").touch()
    with pytest.raises(
        CannotTell, match=f"are a program, .* penstock serve {exported}/onnx/model.onnx serves"
    ):
        find(str(exported))
    converted = write(tmp_path / "converted", config={"bos_token": "<s>"})
    (converted / "model.bin").touch()
    (converted / "vocabulary.json").write_text("[]")
    with pytest.raises(CannotTell, match="in the form of CTranslate2, which is not read"):
        find(str(converted))


def test_ids_of_own_models_are_unique_and_known_models_are_not_read(tmp_path: Path) -> None:
    root = write(tmp_path / "one" / "m", config=architecture("BertForTokenClassification"))
    write(tmp_path / "two" / "m", config=architecture("BertForTokenClassification"))
    write(tmp_path / "two" / ".bad", config=architecture("BertForTokenClassification"))

    def resolve(*models: str) -> dict[str, str]:
        run = {"run.dir": str(tmp_path / "run"), "catalog.dirs": str(FAKE_CATALOG)}
        return entries.resolve(load(None, run | {"catalog.models": ",".join(models)}, environ={}))

    assert resolve("fake/echo=e") == {}
    with pytest.raises(Exception, match="another model, has the id 'm'; name it:"):
        resolve(str(root), str(tmp_path / "two" / "m"))
    with pytest.raises(Exception, match="'default' stands for the model of generated text; name it"):
        resolve(f"{root}=default")
    with pytest.raises(Exception, match=r"'.bad' is no id for a model"):
        resolve(str(tmp_path / "two" / ".bad"))
    with pytest.raises(Exception, match="the catalog, or another model, has the id 'fake/echo'; name it:"):
        resolve(f"{root}=fake/echo")
    copy = write(tmp_path / "copy", config=architecture("BertForTokenClassification"))
    entry = {"id": "fake/echo", "source": {"kind": "directory", "path": "."}, "adapter": "ner"}
    (copy / OWN_ENTRY).write_text(json.dumps(entry))
    served = resolve(str(copy), "fake/slow")
    catalog = read_catalog(served["catalog.dirs"].split(","), served["catalog.models"].split(","))
    assert catalog.reading.bad == [] and [each.id for each in catalog.sources] == ["fake/echo", "fake/slow"]
    assert catalog["fake/echo"].source == DirectorySource(str(copy)), "a copy takes the catalog's place"
    with pytest.raises(Exception, match="another model, has the id 'fake/echo'; name it:"):
        resolve(f"{root}=fake/echo", str(copy))
    made = resolve(f"{root}=a", f"{root}=b", f"{tmp_path}/two/m=c", "fake/echo=e")
    assert made["catalog.models"] == "a=b,c,fake/echo=e"
    fakes, own = made["catalog.dirs"].split(",")
    assert fakes == str(FAKE_CATALOG)
    assert {read_entry(path).id for path in Path(own).iterdir()} == {"a", "c"}
    assert resolve(f"{root}=a", f"{root}=b", f"{tmp_path}/two/m=c", "fake/echo=e") == made
    assert resolve(str(root))["catalog.dirs"] != made["catalog.dirs"], "a server that runs keeps its own"
