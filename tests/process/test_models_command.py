"""`penstock models list | show | pull`, as an operator runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.cli import main
from tests.fakes.hub import COMMIT, Files, hub
from tests.harness.server import FAKE_CATALOG, ROOT

WEIGHTS = (ROOT / "tests" / "fakes" / "weights" / "model.safetensors").read_bytes()
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the environment, an empty hub cache, no network."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_list_shows_every_model_with_what_it_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "OUTPUTS", "DIMS", "LENGTH", "SERVED", "DISK", "AS", "MEMORY"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert len(cells) == len(rows) >= 60
    assert cells[MINILM][:4] == ["dense", "384", "256", "yes"] and cells[MINILM][5] == "MB"
    assert cells["BAAI/bge-m3"][:5] == ["dense+sparse+multi+score", "1024", "8192", "no", "-"]
    assert cells["vidore/colpali-v1.3-hf"][1:5] == ["128", "-", "no", "-"]


def test_list_is_narrowed_by_family_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--output", "sparse", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in rows} == {"splade", "bge_m3"}
    assert main(["models", "list", "--family", "donut", "--json"]) == 0
    donut = json.loads(capsys.readouterr().out)
    assert len(donut) == 3 and {row["outputs"][0] for row in donut} == {"json"}
    assert donut[0]["inputs"] == ["image"] and donut[0]["on_disk"] is False
    assert main(["models", "list", "--family", "donat"]) == 1
    assert "did you mean 'donut'?" in capsys.readouterr().err


def test_list_says_what_these_settings_would_serve(capsys: pytest.CaptureFixture[str]) -> None:
    def served(*flags: str) -> set[str]:
        assert main(["models", "list", "--json", "--catalog", str(FAKE_CATALOG), *flags]) == 0
        return {row["id"] for row in json.loads(capsys.readouterr().out) if row["served"]}

    assert served("--models", "fake/echo,fake/slow") == {"fake/echo", "fake/slow"}
    assert served("--models", "fake/echo", "--set", "catalog.serve_all=true") > {"fake/echo", "fake/slow"}


def test_show_says_everything_about_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "Qwen/Qwen3-Embedding-0.6B", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["id"] == "Qwen/Qwen3-Embedding-0.6B"
    assert shown["runtime"]["query_template"] == "Instruct: {instruction}\nQuery:{text}"
    assert shown["outputs"] == {"dense": {"dims": 1024, "similarity": "cosine"}}
    assert shown["on_disk"] == "no; fetch it with `penstock models pull Qwen/Qwen3-Embedding-0.6B`"
    assert main(["models", "show", "numind/NuNER_Zero"]) == 0
    text = capsys.readouterr().out
    assert "the extra gliner (pip install" in text and "merge_adjacent_entities: true" in text
    assert main(["models", "show", MINILM]) == 0
    assert " MB in " in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "pull", "verify"])
def test_an_unknown_model_is_answered_with_the_nearest_name(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", action, "BAAI/bge-m4"]) == 1
    assert "did you mean 'BAAI/bge-m3'?" in capsys.readouterr().err


def pull(tmp_path: Path, endpoint: str, *models: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock models pull` against the hub at `endpoint`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "HF_"))}
    environment = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), **more}
    return subprocess.run(
        [sys.executable, "-m", "penstock", "models", "pull", "--catalog", str(tmp_path / "models"), *models],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def catalog(tmp_path: Path, **sources: str) -> None:
    """A catalog with one model per keyword, from the hub source written in YAML."""
    (tmp_path / "models").mkdir()
    for name, source in sources.items():
        (tmp_path / "models" / f"{name}.yaml").write_text(f"id: my/{name}\nsource: {source}\n")


@pytest.mark.long
def test_pull_brings_the_files_that_loaders_read_and_no_others(tmp_path: Path) -> None:
    catalog(
        tmp_path,
        whole="{kind: hub, repo: org/whole, files: [head.pt], tokenizer_repo: org/words}",
        pickled="{kind: hub, repo: org/pickled}",
        modules="{kind: hub, repo: org/modules}",
    )
    repositories: Mapping[str, Files] = {
        "org/whole": {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "pytorch_model.bin": b"never",
            "head.pt": b"head",
            "onnx/model.onnx": b"never",
            "onnx/config.json": b"never",
            "training_args.bin": b"never",
        },
        "org/words": {"tokenizer.json": b"words", "config.json": b"{}", "model.safetensors": b"never"},
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"weights", "optimizer.pt": b"never"},
        "org/modules": {
            "config.json": b"{}",
            "modules.json": json.dumps(
                [
                    {"path": path, "type": f"a.{path[2:]}"}
                    for path in ("0_Transformer", "1_Pooling", "2_Dense")
                ]
            ).encode(),
            "0_Transformer/model.safetensors": WEIGHTS,
            "0_Transformer/pytorch_model.bin": b"never",
            "1_Pooling/pytorch_model.bin": b"never",
            "2_Dense/pytorch_model.bin": b"weights",
        },
    }
    with hub(repositories) as found:
        done = pull(tmp_path, found.url, "my/whole")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("my/whole: ") and COMMIT in done.stdout
        assert "download 100 %" in done.stderr
        assert sorted(found.served) == [
            "org/whole/config.json", "org/whole/head.pt", "org/whole/model.safetensors",
            "org/words/config.json", "org/words/tokenizer.json",
        ]  # fmt: skip
        found.served.clear()
        pull(tmp_path, found.url, "my/pickled")
        assert sorted(found.served) == ["org/pickled/config.json", "org/pickled/pytorch_model.bin"]
        found.served.clear()
        pull(tmp_path, found.url, "my/modules")
        assert sorted(found.served) == [
            f"org/modules/{name}"
            for name in (
                "0_Transformer/model.safetensors",
                "2_Dense/pytorch_model.bin",
                "config.json",
                "modules.json",
            )
        ]
    again = pull(tmp_path, "http://127.0.0.1:9", "my/whole", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_pull_names_what_went_wrong_and_goes_on_with_the_next_model(tmp_path: Path) -> None:
    catalog(
        tmp_path,
        absent="{kind: hub, repo: org/absent}",
        cut="{kind: hub, repo: org/cut}",
        whole="{kind: hub, repo: org/whole}",
        here="{kind: directory, path: /nowhere}",
    )
    whole = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    with hub({"org/cut": {**whole, "model.safetensors": WEIGHTS[:-1]}, "org/whole": whole}) as found:
        (tmp_path / "models" / "torn.yaml").write_text("id: my/torn\nsource: {\n")
        done = pull(tmp_path, found.url, "my/absent", "my/cut", "my/whole", "my/torn", "my/here")
    assert done.returncode == 1
    problems = [line for line in done.stderr.splitlines() if line.startswith("penstock: my/")]
    host = found.url.removeprefix("http://")
    assert problems[0].startswith(f"penstock: my/absent: NOT_FOUND: {host} has no such repository, ")
    assert "penstock: my/cut: UNKNOWN: model.safetensors is cut off" in problems[1]
    assert problems[2].startswith("penstock: my/torn: UNKNOWN: while parsing")
    assert problems[3] == "penstock: my/here: not from the hub, and its files are not here"
    assert done.stdout.startswith("my/whole: ")


def test_pull_without_a_network_says_so(tmp_path: Path) -> None:
    catalog(tmp_path, whole="{kind: hub, repo: org/whole}")
    offline = pull(tmp_path, "http://127.0.0.1:9", "my/whole", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "org/whole is not in the hub cache, and HF_HUB_OFFLINE forbids downloads" in offline.stderr
    unreachable = pull(tmp_path, "http://127.0.0.1:9", "my/whole")
    assert unreachable.returncode == 1
    assert "penstock: my/whole: NETWORK: org/whole cannot be had from 127.0.0.1:9 (" in unreachable.stderr
    for way in ("HTTPS_PROXY", "HF_ENDPOINT", "`penstock models pull ID --to DIR`", "copied directory"):
        assert way in unreachable.stderr
    assert "Traceback" not in offline.stderr + unreachable.stderr


def test_a_gated_model_wants_its_token_and_no_secret_is_printed(tmp_path: Path) -> None:
    catalog(tmp_path, gated="{kind: hub, repo: org/gated}", absent="{kind: hub, repo: org/absent}")
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    token, names = "hf_" + "t" * 30, ("my/gated", "my/absent")
    with hub({"org/gated": files}, gated={"org/gated": token}) as found:
        mirror = found.url.replace("http://", "http://somebody:password@")
        without = pull(tmp_path, found.url, "my/gated")
        wrong = pull(tmp_path, mirror, *names, HF_TOKEN=token[:-1])
        right = pull(tmp_path, found.url, *names, HF_TOKEN=token)
    host = found.url.removeprefix("http://")
    way = f"penstock: my/gated: GATED: {host} refuses org/gated: accept its terms there and set HF_TOKEN to a token "
    assert way in without.stderr and way in wrong.stderr
    assert right.stdout.startswith("my/gated: ") and "my/absent: NOT_FOUND: " in right.stderr
    printed = "".join(done.stdout + done.stderr for done in (without, wrong, right))
    assert "password" not in printed and token[:-1] not in printed
