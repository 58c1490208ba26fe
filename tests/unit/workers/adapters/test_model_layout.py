"""Reading model directories: module names old and new, settings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml

from ipc.catalog.reading import read_catalog
from ipc.wire.messages import EncodeCall, InputItem
from tests.harness.calls import asked
from tests.harness.later import sentence_transformers
from tests.tiny.models import build, write_json
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.colbert import ColbertAdapter
from workers.adapters.dense import DenseAdapter
from workers.adapters.shared.checkpoint import CheckpointError, build_transformer, tokenizer_of
from workers.adapters.shared.heads import build_head
from workers.adapters.shared.sentence_transformers_layout import read_layout
from workers.adapters.shared.text_model import Prompts
from workers.adapters.shared.transformer_settings import UnsupportedLayoutError

CPU = torch.device("cpu")


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object on disk."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def retype(directory: Path, index: int, name: str) -> None:
    """Change the type of one module."""
    modules = json.loads((directory / "modules.json").read_text())
    modules[index]["type"] = name
    write_json(directory / "modules.json", modules)


@pytest.fixture()
def model(tmp_path: Path) -> Path:
    """A fresh tiny model that a test may change."""
    return build("dense_projected", tmp_path / "model")


def test_a_directory_saved_by_the_installed_library_reads_like_the_old_one(
    model: Path, tmp_path: Path
) -> None:
    sentence_transformers.SentenceTransformer(str(model), device="cpu").save(str(tmp_path / "saved"))
    types = [module["type"] for module in json.loads((tmp_path / "saved" / "modules.json").read_text())]
    assert types[0] != "sentence_transformers.models.Transformer"
    old, new = read_layout(model), read_layout(tmp_path / "saved")
    assert (new.pooling, new.include_prompt) == (old.pooling, old.include_prompt) == (("cls", "mean"), True)
    assert (
        [m.kind for m in new.vector_modules] == [m.kind for m in old.vector_modules] == ["Dense", "LayerNorm"]
    )


def test_a_module_that_cannot_run_is_named(model: Path) -> None:
    retype(model, 2, "sentence_transformers.models.LSTM")
    with pytest.raises(UnsupportedLayoutError, match=r"sentence_transformers\.models\.LSTM"):
        read_layout(model)


def test_a_module_of_other_code_is_refused_even_under_a_known_name(model: Path) -> None:
    retype(model, 0, "custom_st.Transformer")
    with pytest.raises(UnsupportedLayoutError, match=r"custom_st\.Transformer"):
        read_layout(model)


def test_a_module_path_cannot_leave_the_directory(model: Path) -> None:
    modules = json.loads((model / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write_json(model / "modules.json", modules)
    with pytest.raises(UnsupportedLayoutError, match="leaves the model directory"):
        read_layout(model)


def test_a_dense_layer_that_reads_elsewhere_is_refused(model: Path) -> None:
    rewrite(model / "2_Dense" / "config.json", module_input_name="token_embeddings")
    with pytest.raises(UnsupportedLayoutError, match="token_embeddings"):
        read_layout(model)


def test_a_stored_file_cannot_switch_remote_code_on(model: Path) -> None:
    rewrite(model / "sentence_bert_config.json", model_args={"trust_remote_code": True, "x": 1})
    assert read_layout(model).model_arguments == {"x": 1}


def test_a_stored_file_cannot_lead_a_loader_to_files_that_nobody_checked(model: Path) -> None:
    arguments = {"subfolder": "../../elsewhere", "weights_only": False, "add_pooling_layer": False}
    rewrite(model / "sentence_bert_config.json", model_kwargs=arguments, processor_kwargs=arguments)
    layout = read_layout(model)
    assert layout.model_arguments == layout.tokenizer_arguments == {"add_pooling_layer": False}


def test_an_activation_outside_torch_is_refused(model: Path) -> None:
    rewrite(model / "2_Dense" / "config.json", activation_function="os.system")
    dense = read_layout(model).vector_modules[0]
    with pytest.raises(ValueError, match=r"os\.system"):
        build_head(dense.kind, dense.directory, dense.config)


def test_weights_that_a_checkpoint_lacks_are_not_made_up(model: Path) -> None:
    rewrite(model / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks weights: encoder\.layer\.2"):
        build_transformer(model, device=CPU, dtype=torch.float32)


def test_layers_without_weights_are_refused_before_they_are_made(model: Path) -> None:
    rewrite(model / "config.json", num_hidden_layers=10**8)
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers: 100000000, and the weights have \d+ tensors"
    ):
        build_transformer(model, device=CPU, dtype=torch.float32)


def test_a_checkpoint_that_names_the_type_of_a_relative_is_read_as_its_own_class(tmp_path: Path) -> None:
    directory = build("lighton_ocr", tmp_path / "model")
    stored = json.loads((directory / "config.json").read_text())
    left = {
        name: value for name, value in stored.items() if name not in ("tie_word_embeddings", "image_token_id")
    }
    write_json(directory / "config.json", {**left, "model_type": "mistral3"})
    factory = transformers.LightOnOcrForConditionalGeneration
    loaded = build_transformer(directory, device=CPU, dtype=torch.float32, factory=factory)
    assert isinstance(loaded.config, transformers.LightOnOcrConfig)
    assert loaded.config.image_token_id == 151655 and loaded.config.tie_word_embeddings


def test_a_vocabulary_that_is_missing_or_damaged_is_not_made_up(model: Path) -> None:
    context = LoadContext(model, "m", CPU, torch.float32, None, {}, lambda phase, fraction: None)
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="a JSON file of the tokenizer is damaged"):
        DenseAdapter.load(context)
    for path in model.glob("*token*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="the tokenizer has no vocabulary"):
        DenseAdapter.load(context)
    with pytest.raises(CheckpointError, match="the tokenizer has no vocabulary"):
        tokenizer_of(context)


def test_pickled_weights_alone_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no safetensors"):
        build_transformer(model, device=CPU, dtype=torch.float32)


def test_the_stored_dtype_does_not_decide(model: Path) -> None:
    loaded = build_transformer(model, device=CPU, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_load_reports_its_phases(model: Path) -> None:
    seen: list[tuple[str, float]] = []
    DenseAdapter.load(
        LoadContext(
            model, "m", CPU, torch.float32, None, {}, lambda phase, fraction: seen.append((phase, fraction))
        )
    )
    assert seen == [("tokenizer", 1.0), ("weights", 1.0), ("proof", 1.0)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("tiny", ["colbert_stanford", "colbert_pylate"])
@pytest.mark.parametrize("prefixes", [("[Q] ", "[D] "), ("[Q]", "[D]"), (None, None)])
@pytest.mark.parametrize("is_query", [True, False])
def test_markers_under_their_names_in_a_file_of_sie_are_the_tokens_of_the_checkpoint(
    tmp_path: Path, tiny: str, prefixes: tuple[str | None, str | None], is_query: bool
) -> None:
    directory = build(tiny, tmp_path / "weights")
    loadtime = {"query_max_length": 32, "doc_max_length": 180, "query_prefix": prefixes[0]}
    written = {
        "sie_id": "org/late",
        "weights_path": "weights",
        "tasks": {"encode": {"multivector": {"dim": 128}}},
        "profiles": {
            "default": {
                "adapter_path": "sie_server.adapters.colbert:ColBERTAdapter",
                "adapter_options": {"loadtime": {**loadtime, "doc_prefix": prefixes[1]}},
            }
        },
    }
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(written))
    entry = read_catalog([str(tmp_path)])["org/late"]
    adapter = ColbertAdapter.load(
        LoadContext(directory, "m", CPU, torch.float32, None, entry.loadtime, lambda *_: None)
    )
    texts = ["The river turns the wheel.", "Paris"]
    call = EncodeCall([InputItem(text) for text in texts], ["multivector"], is_query=is_query)
    batch = adapter.collate([p for p in adapter.prepare(call.items, call) if isinstance(p, Prepared)])
    found = adapter.token_vectors(batch).numpy()
    reference = sentence_transformers.MultiVectorEncoder(str(directory), device="cpu")
    expected = (reference.encode_query if is_query else reference.encode_document)(texts)
    np.testing.assert_allclose(found, np.concatenate([np.asarray(rows) for rows in expected]), atol=2e-5)


NAMED = {"query": "Q: ", "passage": "P: ", "other": "O: "}


@pytest.mark.parametrize(
    ("prompts", "options", "wanted"),
    [
        (Prompts(), asked(), ("", "")),
        (Prompts(named=NAMED), asked(is_query=True), ("Q: ", "")),
        (Prompts(named=NAMED), asked(), ("P: ", "")),
        (Prompts(named={**NAMED, "document": ""}), asked(), ("", "")),
        (Prompts(named={"corpus": "C: "}), asked(), ("C: ", "")),
        (Prompts(default="O: "), asked(is_query=True), ("", "")),
        (Prompts(default="O: "), asked(is_query=False), ("", "")),
        (Prompts(default="O: "), asked(is_query=None), ("O: ", "")),
        (Prompts(named=NAMED, default="O: "), asked(is_query=None), ("P: ", "")),
        (Prompts(named=NAMED), asked("Find it:", is_query=True), ("Find it: ", "")),
        (Prompts(named=NAMED), asked("Find it:\n"), ("Find it:\n", "")),
        (Prompts(default_instruction="D"), asked(is_query=True), ("D ", "")),
        (Prompts(default_instruction="D"), asked(), ("", "")),
        (
            Prompts(named=NAMED, query_template="I: {instruction} Q: {text}!", default_instruction="D"),
            asked(is_query=True),
            ("I: D Q: ", "!"),
        ),
        (
            Prompts(query_template="{instruction}|{text}"),
            asked("{text}", is_query=True),
            ("{text}|", ""),
        ),
        (Prompts(query_template="<{text}>", document_template="[{text}]"), asked("X"), ("[", "]")),
    ],
)
def test_the_prompt_rule(prompts: Prompts, options: EncodeCall, wanted: tuple[str, str]) -> None:
    assert prompts.affixes(options.instruction, options.is_query) == wanted


def test_a_template_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a template needs"):
        Prompts(query_template="query: ")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"vocab_size": 12},
            r"embeddings\.word_embeddings\.weight is \[\d+, 64\] in the weights and \[12, 64\]",
        ),
        (
            {"intermediate_size": 96},
            r"dense\.bias is \[128\] in the weights and \[96\] by config\.json and 5 more",
        ),
        (
            {"num_hidden_layers": 1},
            r"counts fewer layers than there are, and has no place for encoder\.layer\.1\.",
        ),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused_with_the_tensor_and_both_shapes(
    changed: dict[str, int], why: str, model: Path
) -> None:
    rewrite(model / "config.json", **changed)
    with pytest.raises(CheckpointError, match=f"config.json does not fit the weights: .*{why}"):
        build_transformer(model, device=CPU, dtype=torch.float32)
    build_transformer(build("dense_t5", model.parent / "t5"), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("rr_qwen3", transformers.AutoModelForCausalLM),
        ("rr_bert", transformers.AutoModelForSequenceClassification),
    ],
)
def test_layers_that_a_config_does_not_count_are_refused_of_a_model_with_a_head_too(
    name: str, factory: Any, tmp_path: Path
) -> None:
    directory = build(name, tmp_path / "model")
    rewrite(directory / "config.json", num_hidden_layers=1, layer_types=None)
    with pytest.raises(
        CheckpointError, match=r"counts fewer layers .* no place for \w+\.(encoder\.)?layers?\.1\."
    ):
        build_transformer(directory, device=CPU, dtype=torch.float32, factory=factory)


def test_layers_that_stored_arguments_leave_out_are_no_contradiction_but_layers_that_nothing_counts_are(
    model: Path,
) -> None:
    first: dict[str, Any] = {"config_arguments": {"num_hidden_layers": 1}}
    built = build_transformer(model, device=CPU, dtype=torch.float32, **first)
    assert built.config.num_hidden_layers == 1
    rewrite(model / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="counts fewer layers"):
        build_transformer(model, device=CPU, dtype=torch.float32, **first)


@pytest.mark.parametrize("factory", [None, transformers.AutoModelForCausalLM])
def test_layers_that_predict_tokens_ahead_are_left_out(factory: Any, tmp_path: Path) -> None:
    directory = build("rr_qwen3", tmp_path / "model")
    rewrite(directory / "config.json", num_hidden_layers=1, layer_types=None, num_nextn_predict_layers=1)
    build_transformer(directory, device=CPU, dtype=torch.float32, factory=factory)
