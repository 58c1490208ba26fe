"""`worker.precision` reaches the models that take the precision, and their status tells what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ipc.catalog.entries import DirectorySource, ModelEntry, OutputSpec
from ipc.settings import Run, Settings, Worker
from ipc.wire.messages import ModelStatus
from tests.tiny import chat_models, models
from workers.adapters.base import Adapter
from workers.device.devices import Device
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import Loader
from workers.loading.source import SourceError

Precision = Literal["auto", "float32", "int8", "int4", "fp8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small chat model."""
    return chat_models.save("llama3", tmp_path_factory.mktemp("chat") / "model")


def load(
    directory: Path, home: Path, precision: Precision, own: str | None = None, adapter: str = "causal"
) -> tuple[Adapter, ModelStatus, int]:
    """A model of a server with `worker.precision`, and whose entry may have its `own`; its status; bytes foreseen."""
    settings = Settings(
        run=Run(state_dir=str(home / "state"), cache_dir=str(home / "cache")),
        worker=Worker(precision=precision),
    )
    outputs = {"chat": OutputSpec()} if adapter == "causal" else {"dense": OutputSpec()}
    entry = ModelEntry(
        "tiny/model", DirectorySource(str(directory)), adapter=adapter, outputs=outputs, precision=own
    )
    loader = Loader(settings, Device(torch.device("cpu"), "cpu", "", 1), lambda work: work())
    foreseen: list[int] = []
    instance = Instance([entry])
    loaded = loader.load(instance, lambda _, nbytes: foreseen.append(nbytes), lambda: None)
    instance.adapter, instance.state = loaded.adapter, "loaded"
    return loaded.adapter, instance.status(entry, "cpu"), foreseen[0]


def test_the_setting_quantises_a_model_that_generates_and_its_status_tells_what_it_holds(
    model: Path, tmp_path: Path
) -> None:
    plain, told, whole = load(model, tmp_path, "auto")
    assert (told.precision, told.weight_bytes) == ("float32", plain.memory_bytes - told.cache_bytes)
    reference = AutoModelForCausalLM.from_pretrained(model)
    described = ("llama", sum(parameter.numel() for parameter in reference.parameters()), "")
    assert (told.architecture, told.parameters, told.stored) == described
    assert told.template == AutoTokenizer.from_pretrained(model).chat_template
    for precision in ("int8", "int4"):
        adapter, status, foreseen = load(model, tmp_path, precision)
        assert precision in status.precision.split("+")
        assert (status.architecture, status.parameters, status.stored) == described
        assert 0 < status.weight_bytes < told.weight_bytes and foreseen < whole
        assert status.weight_bytes + status.cache_bytes == adapter.memory_bytes
        assert adapter.engine is not None and status.cache_tokens == adapter.engine.capacity


def test_what_the_entry_says_goes_before_the_setting(model: Path, tmp_path: Path) -> None:
    assert load(model, tmp_path, "int8", own="float32")[1].precision == "float32"
    assert load(model, tmp_path, "float32", own="int8")[1].precision.startswith("int8")


def test_a_model_that_makes_vectors_has_numbers_under_a_setting_for_weights_and_refuses_its_own(
    tmp_path: Path,
) -> None:
    directory = models.build("dense_mean", tmp_path / "encoder")
    adapter, status, _ = load(directory, tmp_path, "int8", adapter="dense")
    assert adapter.memory_bytes == load(directory, tmp_path, "float32", adapter="dense")[0].memory_bytes
    assert (status.precision, status.weight_bytes, status.cache_bytes, status.cache_tokens) == ("", 0, 0, 0)
    with pytest.raises(SourceError, match="precision: int8 is for models that generate text"):
        load(directory, tmp_path, "auto", own="int8", adapter="dense")
