"""`penstock rm`: what goes, what stays, and the question before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from tests.unit.penstock.test_model_list import cached

CONFIG = "config.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub cache, and a run directory of no server."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PENSTOCK_RUN__DIR", str(tmp_path / "run"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def on_terminal(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[str]:
    """Standard input is a terminal, where somebody gives this answer; returns the questions."""
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    return questions


def directory(root: Path, *names: str) -> Path:
    """A directory with these files."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12345")
    return root


def test_a_repository_goes_out_of_the_hub_cache_and_others_stay(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(hub, "org/one", CONFIG, "model.safetensors")
    cached(hub, "org/two", CONFIG, "model.safetensors")
    assert main(["rm", "org/one", "--yes"]) == 0
    assert "org/one: " in capsys.readouterr().out
    assert [each.name for each in hub.glob("models--*")] == ["models--org--two"]
    assert main(["rm", "org/one", "--yes"]) == 1
    assert "org/one: not in the hub cache" in capsys.readouterr().err


def test_one_of_several_gguf_models_of_a_repository_goes_alone(hub: Path) -> None:
    cached(hub, "org/quants", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert main(["rm", "org/quants:q8_0", "--yes"]) == 0
    left = {path.name for path in hub.rglob("*.gguf")}
    assert left == {"m-Q4_K_M.gguf"}
    assert main(["rm", "org/quants:Q8_0", "--yes"]) == 1
    assert main(["rm", "org/quants:Q4_K_M", "--yes"]) == 0
    assert not list(hub.glob("models--*"))


def test_a_gguf_model_goes_alone_out_of_a_repository_with_other_weights(hub: Path) -> None:
    cached(hub, "org/both", "m-Q8_0.gguf", CONFIG, "model.safetensors")
    assert main(["rm", "org/both:Q8_0", "--yes"]) == 0
    assert {path.name for path in hub.rglob("snapshots/*/*")} == {CONFIG, "model.safetensors"}
    assert main(["rm", "org/both", "--yes"]) == 0
    assert not list(hub.glob("models--*"))


def test_the_question_names_what_goes_and_no_is_the_default(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = directory(tmp_path / "mine", CONFIG, "sub/model.safetensors")
    questions = on_terminal(monkeypatch, "")
    assert main(["rm", str(place)]) == 1
    assert f"10 B, the whole directory {place}, files: 2? [y/N]" in questions[0]
    assert (place / CONFIG).exists() and "nothing is deleted" in capsys.readouterr().err
    on_terminal(monkeypatch, "y")
    assert main(["rm", str(place)]) == 0
    assert not place.exists()


def test_nothing_goes_where_nobody_can_be_asked(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = directory(tmp_path / "mine", CONFIG)
    assert main(["rm", str(place)]) == 3
    assert "add --yes" in capsys.readouterr().err
    assert place.exists()


def test_a_gguf_file_goes_alone_out_of_the_working_directory(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = directory(tmp_path / "mine", "a.gguf")
    monkeypatch.chdir(place)
    assert main(["rm", "./a.gguf", "--yes"]) == 0
    assert place.is_dir() and not list(place.iterdir())


def test_a_gguf_file_goes_alone_where_its_directory_has_other_files(hub: Path, tmp_path: Path) -> None:
    place = directory(tmp_path / "mine", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "notes.txt")
    assert main(["rm", str(place / "a-00001-of-00002.gguf"), "--yes"]) == 0
    assert [each.name for each in place.iterdir()] == ["notes.txt"]


def test_what_is_no_model_stays_with_the_reason(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = directory(tmp_path / "papers", "thesis.txt")
    model = directory(tmp_path / "model", CONFIG, "model.safetensors")
    (tmp_path / "link").symlink_to(model)
    catalog = directory(tmp_path / "home" / "catalog", CONFIG)
    (catalog / "here.yaml").write_text("id: org/here\nadapter: dense\nsource: {kind: directory, path: .}\n")
    monkeypatch.chdir(model)
    refusals = {
        str(other): "no configuration and no weights",
        str(other / "thesis.txt"): "a file that is no model",
        str(tmp_path / "link"): "a link",
        str(model): "the working directory",
        "/": "holds your home",
        "nowhere": "no model of the catalog",
        "org/none": "not in the hub cache",
        "org/none:Q4_0": "not in the hub cache",
        "org/here": "holds the catalog directory",
    }
    for name, reason in refusals.items():
        assert main(["rm", name, "--yes", "--catalog", str(catalog)]) == 1, name
        assert reason in capsys.readouterr().err, name
    assert main(["rm", "sentence-transformers/all-MiniLM-L6-v2", "--yes"]) == 1
    assert "pip uninstall" in capsys.readouterr().err
    assert (other / "thesis.txt").exists() and (model / CONFIG).exists() and (catalog / CONFIG).exists()


def test_the_other_models_go_where_one_cannot(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = directory(tmp_path / "mine", CONFIG)
    capsys.readouterr()
    assert main(["rm", "nowhere", str(place), "--yes", "--json"]) == 1
    assert not place.exists()
    missing, gone = json.loads(capsys.readouterr().out)
    assert "no model of the catalog" in missing["error"] and not missing["bytes"]
    assert gone == {"model": str(place), "bytes": 5, "error": ""}


def test_files_behind_links_of_the_cache_stay_and_so_do_contents_that_another_model_has(
    hub: Path, tmp_path: Path
) -> None:
    cached(hub, "org/quants", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16.gguf")
    links = {path.name: path for path in hub.rglob("snapshots/*/*.gguf")}
    outside = directory(tmp_path / "elsewhere", "mine.gguf") / "mine.gguf"
    links["m-Q8_0.gguf"].unlink()
    links["m-Q8_0.gguf"].symlink_to(outside)
    links["m-F16.gguf"].unlink()
    links["m-F16.gguf"].symlink_to(links["m-Q4_K_M.gguf"].readlink())
    assert main(["rm", "org/quants:Q8_0", "--yes"]) == 0
    assert outside.exists() and not links["m-Q8_0.gguf"].is_symlink()
    assert main(["rm", "org/quants:F16", "--yes"]) == 0
    assert not links["m-F16.gguf"].is_symlink() and links["m-Q4_K_M.gguf"].exists()


@pytest.mark.parametrize("command", [["rm", "--yes", "--json"], ["pull", "--json"], ["show"], ["chat"]])
def test_a_name_that_no_message_can_hold_is_refused_before_anything_happens(
    command: list[str], hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = directory(tmp_path / "mine\udcff", CONFIG)
    with pytest.raises(SystemExit) as ended:
        main([*command, str(place)])
    assert ended.value.code == 2 and "\\udcff' is no text in UTF-8" in capsys.readouterr().err
    assert (place / CONFIG).exists()
