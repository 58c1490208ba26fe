"""Code of a model's repository runs only where the operator trusts the code, whatever a library allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.extractors import required_library
from tests.tiny.models import build
from workers.adapters.base import LoadContext
from workers.adapters.registry import resolve
from workers.loading.failure import classify

CODE = """
from pathlib import Path

from transformers import BertConfig, BertModel

(Path(__file__).parents[3] / "ran").touch()


class Own(BertModel):
    pass


class OwnConfig(BertConfig):
    pass
"""


def rewrite(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def gliner(directory: Path) -> None:
    stored = json.loads((directory / "gliner_config.json").read_text())
    own = {"auto_map": {"AutoModel": "own.Own"}, "_name_or_path": str(directory)}
    rewrite(directory / "gliner_config.json", encoder_config=stored["encoder_config"] | own)


def gliner2(directory: Path) -> None:
    rewrite(directory / "encoder_config" / "config.json", auto_map={"AutoModel": "org/name--own.Own"})


def gliclass(directory: Path) -> None:
    (directory / "config.json").write_text(
        json.dumps(
            json.loads((directory / "config.json").read_text())
            | {"encoder_config": {"model_type": "own"}, "encoder_model": str(directory / "encoder")}
        )
    )
    (directory / "encoder").mkdir()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (directory / "encoder" / "config.json").write_text(json.dumps(config))
    (directory / "encoder" / "own.py").write_text(CODE)


def load(family: str, directory: Path, *, trusted: bool) -> None:
    context = LoadContext(
        directory=directory,
        model_id="own",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=None,
        options={},
        progress=lambda phase, fraction: None,
        trust_remote_code=trusted,
    )
    resolve(family).load(context)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that own code leaves; transformers copies code to a cache before the code runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return tmp_path / "modules" / "ran"


@pytest.mark.parametrize("change", [gliner, gliner2, gliclass])
def test_code_of_a_repository_does_not_run_through_a_library_that_trusts_all(
    change: Any, ran: Path, tmp_path: Path
) -> None:
    family = change.__name__
    required_library(family)
    directory = build(family, tmp_path / "model")
    (directory / "own.py").write_text(CODE)
    change(directory)
    with pytest.raises(ValueError) as refused:
        load(family, directory, trusted=False)
    assert "worker.trust_remote_code" in classify(refused.value).message
    assert not ran.exists()


def test_code_of_a_repository_runs_where_the_operator_trusts_the_code(ran: Path, tmp_path: Path) -> None:
    required_library("gliner")
    directory = build("gliner", tmp_path / "model")
    (directory / "own.py").write_text(CODE)
    gliner(directory)
    load("gliner", directory, trusted=True)
    assert list(tmp_path.rglob("ran"))
