"""Which directories of a repository are models and versions, which the policy chooses, and where names may lead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.settings import Repository
from workers.repository import entries, layout
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

CONFIG = """
max_batch_size: 4
input { name: "A" data_type: TYPE_FP32 dims: 2 }
output { name: "B" data_type: TYPE_FP32 dims: 2 }
"""


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files by their path; a path that ends in / is a directory."""
    for name, text in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def read(root: Path, **settings: object) -> dict[str, RepositoryEntry]:
    """Entries by id."""
    return {entry.id: entry for entry in entries.read(Repository(dirs=(str(root),), **settings))}  # type: ignore[arg-type]


def problem(root: Path, **settings: object) -> str:
    """The error of the only entry."""
    [entry] = read(root, **settings).values()
    return entry.error


def versions(root: Path, policy: str) -> list[str]:
    write(root, {f"m/{version}/model.pt2": "" for version in (1, 2, 3, 10)})
    write(root, {"m/config.pbtxt": CONFIG + policy})
    return list(read(root))


def test_directories_are_models_and_numbers_are_versions(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a/3/model.pt2": "",
            "a/03/model.pt2": "",
            "a/-1/model.pt2": "",
            "a/1.5/model.pt2": "",
            "a/notes/model.pt2": "",
            "a/99999999999999999999/model.pt2": "",
            ".hidden/1/model.pt2": "",
            "readme.txt": "",
            "b/0/model.onnx": "",
            "モデル/7/model.pt": "",
        },
    )
    found = read(tmp_path)
    assert list(found) == ["a@3", "b@0", "モデル@7"]
    assert [entry.adapter for entry in found.values()] == ["torch_export", "onnx", "torchscript"]
    assert not any(entry.error for entry in found.values())
    assert found["b@0"].source.path == str(tmp_path / "b" / "0")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("", ["m@10"]),
        ("version_policy { latest { num_versions: 2 } }", ["m@3", "m@10"]),
        ("version_policy { latest { num_versions: 99 } }", ["m@1", "m@2", "m@3", "m@10"]),
        ("version_policy { all { } }", ["m@1", "m@2", "m@3", "m@10"]),
        ("version_policy { specific { versions: [10, 2, 2] } }", ["m@2", "m@10"]),
        ("version_policy { specific { versions: [2, 7] } }", ["m@2"]),
    ],
)
def test_the_policy_chooses_versions(tmp_path: Path, policy: str, chosen: list[str]) -> None:
    assert versions(tmp_path, policy) == chosen


def test_a_specific_version_that_is_not_there_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions(tmp_path, "version_policy { specific { versions: [2, 7] } }")
    assert "m has no version 7" in caplog.text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"m/": ""}, "no version"),
        ({"m/1/": ""}, "version 1 has no program; looked for model.pt2, model.pt, model.onnx, model.py"),
        ({"m/1/model.pt2": "", "m/1/model.onnx": ""}, "model.pt2 and model.onnx; state platform or backend"),
        (
            {"m/1/model.pt2": "", "m/config.pbtxt": "", "m/config.yaml": ""},
            "both config.pbtxt and config.yaml",
        ),
        (
            {"m/1/model.pt2": "", "m/config.pbtxt": "version_policy { specific { versions: 5 } }"},
            "none of the versions [5]",
        ),
        ({"m/1/model.pt2": "", "m/config.pbtxt": 'platform: "onnxruntime_onnx"'}, "looked for model.onnx"),
        ({"m/1/model.py": ""}, "repository.allow_python is off"),
        ({"m/1/model.pt2": "", "m/config.pbtxt/": ""}, "config.pbtxt is no plain file"),
        ({"m/1/model.pt2/": ""}, "version 1 has no program"),
        (
            {"m/1/model.pt2": "", "m/config.pbtxt": "#" * (1 << 20) + "\n"},
            "config.pbtxt has more than 1048576 bytes",
        ),
    ],
)
def test_what_is_wrong_with_a_model_is_the_error_of_its_entry(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    write(tmp_path, files)
    assert said in problem(tmp_path)


@pytest.mark.parametrize("policy", ["", "version_policy { specific { versions: 5 } }"])
def test_a_model_without_a_version_has_an_entry_without_a_number(tmp_path: Path, policy: str) -> None:
    write(tmp_path, {"m/config.pbtxt": policy, "m/notes/model.pt2": "", "n/0/model.pt2": ""})
    assert {name: entry.is_version for name, entry in read(tmp_path).items()} == {"m@": False, "n@0": True}


def test_one_bad_model_keeps_no_other_away(tmp_path: Path) -> None:
    write(tmp_path, {"bad/1/model.pt2": "", "bad/config.pbtxt": "{", "good/1/model.pt2": ""})
    found = read(tmp_path)
    assert "config.pbtxt:1:1" in found["bad@1"].error
    assert not found["good@1"].error


def test_the_backend_chooses_among_programs_and_a_file_name_may_be_stated(tmp_path: Path) -> None:
    write(tmp_path, {"m/1/model.pt2": "", "m/1/model.onnx": "", "m/config.pbtxt": 'backend: "onnxruntime"'})
    assert read(tmp_path)["m@1"].program == "model.onnx"
    write(tmp_path, {"m/1/net.pt2": "", "m/config.pbtxt": 'default_model_filename: "net.pt2"'})
    assert (read(tmp_path)["m@1"].program, read(tmp_path)["m@1"].adapter) == ("net.pt2", "torch_export")
    write(tmp_path, {"m/1/net": "", "m/config.pbtxt": 'default_model_filename: "net"'})
    assert "does not tell the platform" in read(tmp_path)["m@1"].error


@pytest.mark.parametrize(
    "name", ["../1/model.pt2", "/etc/passwd", "..", "a/b.pt2", "x\\0y.pt2", "nowhere.pt2"]
)
def test_a_stated_file_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"m/1/model.pt2": "", "m/config.pbtxt": f'default_model_filename: "{name}"'})
    assert problem(tmp_path)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "", "warmup/../../other/x", "none.txt"])
def test_label_files_are_below_the_model(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"secret": "a", "other/x": "a", "m/warmup/": ""})
    if not name:
        with pytest.raises(ModelRefused):
            layout.named_file(tmp_path, "", "field")
        return
    with pytest.raises(ModelRefused, match="field: "):
        layout.named_file(tmp_path / "m", name, "field")


def test_links_may_lead_anywhere_within_the_repository_and_out_of_it_only_when_allowed(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(outside, {"1/model.pt2": "", "config.pbtxt": CONFIG, "net/model.pt2": ""})
    write(root, {"real/1/model.pt2": ""})
    (root / "same").symlink_to(root / "real")
    assert not any(entry.error for entry in read(root).values())
    (root / "away").symlink_to(outside)
    assert "away is a link out of the repository" in read(root)["away@1"].error
    assert not read(root, follow_links=True)["away@1"].error


@pytest.mark.parametrize("linked", ["m/1", "m/1/model.pt2", "m/config.pbtxt"])
def test_every_part_of_a_model_that_is_a_link_is_looked_at(tmp_path: Path, linked: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(outside, {"m/1/model.pt2": "", "m/config.pbtxt": CONFIG})
    write(
        root,
        {f"m/{name}": CONFIG if name == "config.pbtxt" else "" for name in ("1/model.pt2", "config.pbtxt")},
    )
    path = root / linked
    if path.is_dir():
        (path / "model.pt2").unlink()
        path.rmdir()
    else:
        path.unlink()
    path.symlink_to(outside / linked)
    assert "link out of the repository" in problem(root)
    assert not problem(root, follow_links=True)
    path.unlink()
    path.symlink_to(path.name)
    [entry] = read(root).values()
    assert entry.error, "a link to itself"


def test_names_that_are_none_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(
        tmp_path,
        {"a@b/1/model.pt2": "", "a:b/1/model.pt2": "", "a b/1/model.pt2": "", "x\x07/1/model.pt2": ""},
    )
    assert list(read(tmp_path)) == ["a b@1"]
    assert caplog.text.count("is no name for a model") == 3


def test_a_missing_repository_and_a_model_in_two_are_errors_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"repository\.dirs: directory .*nowhere cannot be read"):
        entries.read(Repository(dirs=(str(tmp_path / "nowhere"),)))
    for root in ("a", "b"):
        write(tmp_path / root, {"m/1/model.pt2": ""})
    with pytest.raises(ConfigError, match="'m' is in two"):
        entries.read(Repository(dirs=(str(tmp_path / "a"), str(tmp_path / "b"))))


def test_the_stamp_follows_the_files_of_a_version_and_those_beside_all_versions(tmp_path: Path) -> None:
    write(
        tmp_path, {"m/1/model.pt2": "a", "m/2/model.pt2": "a", "m/labels.txt": "x", "m/1/more/deep.bin": "x"}
    )
    model = tmp_path / "m"

    def stamps() -> tuple[str, str]:
        return layout.stamp(model, 1), layout.stamp(model, 2)

    before = stamps()
    write(tmp_path, {"m/1/model.pt2": "ab"})
    after = stamps()
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)
    write(tmp_path, {"m/labels.txt": "xy"})
    assert all(one != other for one, other in zip(stamps(), after, strict=True))
    last = stamps()
    write(tmp_path, {"m/.tmp": "x", "m/1/__pycache__/model.pyc": "x"})
    assert stamps() == last
    os.truncate(model / "1" / "more" / "deep.bin", 0)
    assert stamps()[0] != last[0]
