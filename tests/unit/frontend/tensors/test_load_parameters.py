"""What a load by name may bring: a configuration, and files where the operator allows them."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.tensors import config_messages
from frontend.tensors.control import MOST_FILES, Brought, read_brought
from ipc.catalog.repository import MOST_CONFIG_NBYTES, Wish
from ipc.errors import BodyTooLarge, InvalidInput, Unsupported
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import Repository, Settings, load
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from tests.tiny.program_sources import IDENTITY
from tests.tiny.programs import write_model
from workers.repository import configuration, entries


def settings_of(**more: Any) -> Settings:
    """Settings that allow files of at most 100 bytes."""
    chosen = {"repository.allow_files": "true", "repository.max_upload_bytes": "100", **more}
    return load(None, {name: str(value) for name, value in chosen.items()}, {})


def test_what_is_brought_is_read_from_both_transports() -> None:
    text = base64.b64encode(b"program").decode()
    expected = Brought("{}", {"1/model.onnx": b"program", "labels.txt": b""})
    over_http = {"config": "{}", "file:1/model.onnx": text, "file:labels.txt": ""}
    over_grpc = {"config": "{}", "file:1/model.onnx": b"program", "file:labels.txt": b""}
    for given in (over_http, over_grpc):
        found = read_brought(given, settings_of())
        assert found == expected and found.nbytes == 7
    assert read_brought({}, settings_of()) is None
    without = settings_of(**{"repository.allow_files": "false"})
    assert read_brought({"config": "{}"}, without) == Brought("{}")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"config ": "{}"}, "expected 'config' or"),
        ({"config": None}, "got null"),
        ({"config": b"{}"}, "got bytes"),
        ({"config": 1}, "got a number"),
        ({"config": "x" * (MOST_CONFIG_NBYTES + 1)}, f"the limit is {MOST_CONFIG_NBYTES}"),
        ({"config": "\ud800"}, "Unicode"),
        ({"file:1/m": ""}, "'config' is missing"),
        ({"file:1/m": []}, "'config' is missing"),
        *(
            ({"config": "{}", f"file:{path}": b""}, "below the model's directory")
            for path in (
                "",
                "/",
                "/etc/passwd",
                "../x",
                "1/../../x",
                "1//x",
                ".hidden",
                "1/.x",
                "a/b/c/d/e",
                "1/a\\b",
                "1/a\0b",
                "1/a\nb",
                "x" * 201,
                "config.pbtxt",
                "config.yaml",
            )
        ),
        ({"config": "{}", "file:1": b"", "file:1/m": b""}, "another file lies below it"),
        ({"config": "{}", "file:1/m": "a=b"}, "not valid base64"),
        ({"config": "{}", "file:1/m": "é"}, "not valid base64"),
        ({"config": "{}", "file:1/m": True}, "expected a file in base64, got a truth value"),
        (
            {"config": "{}", **{f"file:1/{n}": b"" for n in range(MOST_FILES + 1)}},
            f"the limit is {MOST_FILES}",
        ),
    ],
)
def test_what_cannot_be_brought_is_named(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match="load parameter") as caught:
        read_brought(parameters, settings_of())
    assert words in caught.value.message


def test_what_the_operator_does_not_allow() -> None:
    files = {"config": "{}", "file:1/m": b"x" * 101}
    with pytest.raises(Unsupported, match=r"repository\.allow_files"):
        read_brought(files, settings_of(**{"repository.allow_files": "false"}))
    with pytest.raises(BodyTooLarge, match=r"101 bytes, the limit is 100 \(repository\.max_upload_bytes\)"):
        read_brought(files, settings_of())
    with pytest.raises(Unsupported, match=r"catalog\.watch"):
        read_brought({"config": "{}"}, settings_of(**{"catalog.watch": "false"}))


def wishes_in(root: Path) -> Wishes:
    """Those of a server whose run directory is `root`."""
    paths = RunPaths(root, "t")
    prepare_run_dir(paths)
    return Wishes(paths, Store(paths))


def test_an_override_is_there_until_it_is_taken_away(tmp_path: Path) -> None:
    wishes = wishes_in(tmp_path)
    draft = wishes.draft("m", "{}", {"1/model.py": b"x = 1", "labels.txt": b"a\n"})
    assert wishes.brought() == {} and wishes.nbytes() == 7, "written, and not in force"
    asyncio.run(wishes.put("m", draft))
    asyncio.run(wishes.put("other", Wish(True, "{}")))
    assert wishes.get("m") == draft and set(wishes.brought()) == {"m", "other"}
    assert (wishes.root_of(draft) / "m" / "1" / "model.py").read_bytes() == b"x = 1"
    wishes.discard(draft)
    assert (wishes.root_of(draft) / "m" / "1" / "model.py").is_file(), "in force"
    assert asyncio.run(wishes.put("m", Wish(loaded=False))) == draft
    wishes.discard(draft)
    assert wishes.loaded("m") is False and list(wishes.brought()) == ["other"]
    assert not list(wishes.directory.iterdir())


def test_entries_are_those_of_the_override(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "add_sub")
    chosen = Repository(dirs=(str(tmp_path / "models"),), allow_python=True)
    wishes = wishes_in(tmp_path)
    [plain] = entries.read(chosen, wishes)
    asyncio.run(wishes.put("add_sub", Wish(True, '{"max_batch_size": 3}')))
    [changed] = entries.read(chosen, wishes)
    assert (changed.id, changed.config.max_batch_size, changed.directory) == ("add_sub@1", 3, plain.directory)
    assert changed.code != plain.code and entries.read(chosen, wishes) == [changed]
    asyncio.run(wishes.put("new", wishes.draft("new", '{"name": "new"}', {"4/model.py": IDENTITY.encode()})))
    made = {entry.id: entry for entry in entries.read(chosen, wishes)}
    assert list(made) == ["add_sub@1", "new@4"]
    assert Path(made["new@4"].directory).is_relative_to(wishes.directory)
    asyncio.run(wishes.put("gone", Wish(True, "{}")))
    assert list(made) == [entry.id for entry in entries.read(chosen, wishes)], "no files, no model"


@pytest.mark.parametrize(
    "model", ["add_sub", "accumulator_by_id", "classifier", "versions_specific", "reshape"]
)
def test_the_configuration_that_is_shown_can_be_brought_again(tmp_path: Path, model: str) -> None:
    directory = write_model(tmp_path, model)
    found = configuration.read(tmp_path, directory, False)
    assert found is not None
    config = configuration.convert(found[1], model)
    text = json.dumps(config_messages.configuration(model, config)).encode()
    assert configuration.convert(configuration.parse_json("config", text), model) == config
