"""`penstock models pull` and `add` of models that the catalog lacks, copies without a network, and the progress."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.catalog.reading import read_catalog, read_entry
from penstock.cli import main
from penstock.downloads import ProgressLine
from tests.harness.ports import free_port
from tests.harness.server import ROOT
from tests.unit.penstock.own_models.test_own_models import (
    BERT,
    POOLING,
    architecture,
    modules,
    near_hub,
    write,
)

__all__ = ["near_hub"]
WEIGHTS = (ROOT / "tests" / "fakes" / "weights" / "model.safetensors").read_bytes()
DENSE = {
    "config.json": json.dumps(BERT).encode(),
    "modules.json": json.dumps(modules("Transformer", "Pooling")).encode(),
    "1_Pooling/config.json": json.dumps(POOLING).encode(),
    "tokenizer.json": b'{"model": {"vocab": {}}}',
    "model.safetensors": WEIGHTS,
    "onnx/model.onnx": b"never",
}


def names_below(root: Path) -> set[str]:
    """All files of a directory."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


COPIED = set(DENSE) - {"onnx/model.onnx"} | {"penstock.yaml"}


def test_any_repository_is_pulled_and_copied_for_a_machine_without_a_network(
    near_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    near_hub({"org/new": DENSE, "org/odd": {**DENSE, "modules.json": b"[]", "1_Pooling/config.json": b"{}"}})
    copies = tmp_path / "copies"
    assert main(["models", "pull", "org/new", "--to", str(copies)]) == 0
    printed = capsys.readouterr()
    assert f"in {copies}/org/new; serve it: penstock serve {copies}/org/new" in printed.out
    assert "org/new: download 100 %" in printed.err
    assert names_below(copies / "org/new") == COPIED
    entry = read_catalog([str(copies)])["org/new"]
    assert entry.loadtime == {"pooling": "cls", "normalize": False}

    assert main(["models", "pull", "org/odd"]) == 0, "what cannot be told can be fetched all the same"
    printed = capsys.readouterr()
    assert "org/odd: neither modules.json nor 1_Pooling/config.json says" in printed.err
    assert printed.out.startswith("org/odd: ") and "Fetching" not in printed.err
    assert main(["models", "pull", "org/odd", "--to", str(copies)]) == 0
    assert names_below(copies / "org/odd") == COPIED - {"penstock.yaml"}, "no entry without a family"
    for command in (["models", "show", "org/odd"], ["verify", "org/odd"]):
        assert main(command) == 1, "what needs a family ends"
        told = capsys.readouterr().err
        assert told.startswith("penstock: org/odd: neither modules.json nor")
    assert main(["models", "pull", "./nowhere", "org/absent"]) == 1
    printed = capsys.readouterr()
    assert "penstock: ./nowhere: there is no such directory" in printed.err
    assert "penstock: org/absent: NOT_FOUND: " in printed.err

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bind = f"127.0.0.1:{free_port()}"
    run = ["--set", f"run.dir={tmp_path / 'run'}", "--set", "grpc.enabled=false", "--bind", bind]
    assert main(["check", str(copies / "org" / "new"), *run]) == 0
    assert "1 model: org/new" in capsys.readouterr().out
    assert main(["models", "pull", str(copies / "org" / "new"), "--to", str(tmp_path / "again")]) == 0
    assert names_below(tmp_path / "again" / "org" / "new") == COPIED


def test_a_copy_of_a_catalog_model_keeps_its_entry(
    near_hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near_hub({"intfloat/multilingual-e5-base": DENSE})
    copies = tmp_path / "copies"
    assert main(["models", "pull", "intfloat/multilingual-e5-base:symmetric", "--to", str(copies)]) == 0
    root = copies / "intfloat" / "multilingual-e5-base"
    copied = read_entry(root / "penstock.yaml")
    shipped = read_entry(ROOT / "config/models/e5/multilingual-e5-base.yaml")
    assert copied == msgspec.structs.replace(shipped, source=copied.source, served=True)
    assert copied.source == type(copied.source)(str(root))
    assert main(["models", "pull", "numind/NuNER_Zero", "--to", str(copies)]) == 1
    assert "borrows the tokenizer of microsoft/deberta-v3-large from the hub cache" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_a_link_out_of_a_model_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "m", config=architecture("BertForTokenClassification"))
    (tmp_path / "secret").write_text("secret")
    (root / "merges.txt").symlink_to(tmp_path / "secret")
    copies = tmp_path / "copies"
    assert main(["models", "pull", str(root), "--to", str(copies)]) == 1
    assert "m: merges.txt is a link out of the model's directory and is not copied" in capsys.readouterr().err
    assert not list(copies.rglob("merges.txt"))
    (root / "merges.txt").unlink()
    (root / "merges.txt").symlink_to("config.json")
    assert main(["models", "pull", str(root), "--to", str(copies)]) == 0
    assert (copies / "m" / "merges.txt").read_bytes() == (root / "config.json").read_bytes()


def test_progress_tells_bytes_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    line = ProgressLine("m", lambda: now[0])

    def told(mebibytes: int) -> None:
        line.count(mebibytes << 20, 1000 << 20)
        line("download", mebibytes / 1000)

    told(100)
    now[0] += 10
    told(150)
    told(300)
    line("download", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "m: download 10 %, 100.0 MiB of 1000.0 MiB",
        "m: download 30 %, 300.0 MiB of 1000.0 MiB, 20.0 MiB/s, 35 s left",
        "m: download 100 %",
    ]
    monkeypatch.setattr("sys.stderr", Terminal())
    told(400)
    line("download", 1.0)
    assert sys.stderr.getvalue() == (  # type: ignore[attr-defined]
        "\r\x1b[Km: download  40%, 400.0 MiB of 1000.0 MiB, 30.0 MiB/s, 20 s left\r\x1b[Km: download 100%\n"
    )


def test_add_writes_an_entry_that_the_catalog_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "weights" / "m", config=BERT)
    to = tmp_path / "catalog"
    (tmp_path / "empty").mkdir()
    empty = ("--catalog", str(tmp_path / "empty"))

    def add(*arguments: str) -> tuple[int, str]:
        code = main(["models", "add", *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    code, text = add(str(root), *empty, "--output", str(to))
    assert code == 3 and "State adapter: dense with loadtime.pooling" in text and not to.exists()
    fields = (
        "--field",
        "adapter=dense",
        "--field",
        "loadtime.pooling=lasttoken",
        "--field",
        "dimensions=[4, 2]",
    )
    code, text = add(f"{root}=org/mine", *empty, "--output", str(to), *fields)
    file = to / "org--mine.yaml"
    assert code == 0 and f"wrote {file}; serve it: penstock serve --catalog {to} --models org/mine" in text
    assert "pooling        lasttoken   [stated]" in text
    entry = read_catalog([str(to)])["org/mine"]
    assert entry.loadtime == {"pooling": "lasttoken", "normalize": True} and entry.dimensions == (4, 2)
    code, text = add(f"{root}=org/mine", "--catalog", str(to), *fields)
    assert code == 3 and f"penstock: {file} exists already: remove the file, or name another place" in text
    assert main(["models", "show", str(root / ".." / "m"), "--json"]) == 1, "the class says no pooling"
    assert "State adapter: dense" in capsys.readouterr().err
    code, text = add(str(root), *empty, "--output", "-", *fields)
    assert code == 0 and text.startswith("id: m\nsource: {kind: directory")
    assert main(["models", "add", str(root), *empty, "--output", "-", *fields, "--json"]) == 0
    added = json.loads(capsys.readouterr().out)
    assert (added["id"], added["file"], added["entry"]["adapter"]) == ("m", None, "dense")
    assert {"what": "pooling", "value": "lasttoken", "where": "stated"} in added["read"]
    for bad, why in (
        (
            "loadtime.poling=x",
            "the entry would be refused: loadtime.poling: unknown option; did you mean 'pooling'?",
        ),
        ("runtime", "--field runtime: expected NAME=VALUE"),
        ("runtime.=1", "expected NAME=VALUE"),
        ("adapter.x=1", "adapter has a value already"),
        ("runtime={", "--field runtime={: "),
        ("max_sequence_length=-1", "--field: Expected `int` >= 1 - at `$.max_sequence_length`"),
        ("inputs=5", "--field: Expected `array`, got `int` - at `$.inputs`"),
        ("source=x", "--field: Expected `object`, got `str` - at `$.source`"),
        ("loadtime.pooling=5", "loadtime.pooling 5: expected one or a list of cls, max, mean,"),
        ("loadtime.pooling=[1]", "loadtime.pooling [1]: expected one or a list of cls, max, mean,"),
    ):
        code, text = add(str(root), *empty, "--output", str(to / "other.yaml"), *fields, "--field", bad)
        assert code == 3 and why in text and "Traceback" not in text, text
    assert names_below(to) == {"org--mine.yaml"}
    assert "the catalog has this model" in add("BAAI/bge-m3")[1]
    write(root, config=architecture("BertForTokenClassification"))
    assert "name a directory for the entry: --output DIR" in add(str(root))[1]
