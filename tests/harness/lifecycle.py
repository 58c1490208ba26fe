"""Catalogs whose files tests write and change, and the states that a server tells of their models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.server import Server, serving

MIB = 1 << 20
ON_DEMAND = {"catalog.models": "", "catalog.preload": ""}


class Models:
    """A catalog directory of models of the weighing family."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory

    def write(self, name: str, profiles: Mapping[str, Any] | None = None, **loadtime: Any) -> str:
        """Write one model's file in one step, with weights of the size that the model will take; returns its id."""
        self.write_text(name, self.text(name, profiles, **loadtime))
        return name

    def text(self, name: str, profiles: Mapping[str, Any] | None = None, **loadtime: Any) -> str:
        """The file that `write` writes."""
        entry = {
            "id": name,
            "source": {"kind": "directory", "path": str(self.weights(name, loadtime.get("hold_bytes", MIB)))},
            "adapter": "tests.fakes.weighing:WeighingAdapter",
            "outputs": {"dense": {"dims": loadtime.get("dims", 16)}},
            "max_sequence_length": 512,
            "loadtime": {"dims": 16, **loadtime},
            "profiles": dict(profiles or {}),
        }
        return json.dumps(entry)  # JSON is YAML

    def weights(self, name: str, nbytes: int) -> Path:
        """A directory with a safetensors file of one tensor of zeros, which takes no room on the disk."""
        directory = self.directory / "weights" / name.replace("/", "-")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}")
        tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
        head = json.dumps({"weights": tensor}).encode()
        with (directory / "model.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + nbytes)
        return directory

    def write_text(self, name: str, text: str) -> None:
        """Write anything in the place of a model's file."""
        draft = self._path(name).with_suffix(".draft")
        draft.write_text(text)
        draft.replace(self._path(name))

    def remove(self, name: str) -> None:
        """Take a model's file away."""
        self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.directory / f"{name.replace('/', '-')}.yaml"


@contextlib.contextmanager
def serving_models(
    tmp_path: Path, models: Models, settings: Mapping[str, Any] | None = None, supervised: bool = True
) -> Iterator[Server]:
    """A ready server over these models, which loads none at the start unless the settings say so."""
    chosen = {**ON_DEMAND, **(settings or {})}
    with serving(
        tmp_path, models=(), settings=chosen, catalog=models.directory, supervised=supervised
    ) as server:
        yield server


def info(server: Server, model: str) -> Any:
    """ModelInfo of a model."""
    return server.get(f"/v1/models/{model}").json()


def state(server: Server, model: str) -> str:
    """State of a model; its error code when the server does not know it."""
    found = info(server, model)
    return str(found["state"] if "state" in found else found["detail"]["code"])


def load(server: Server, model: str, wait: bool = True) -> Any:
    """POST /v1/admin/load."""
    return server.post(f"/v1/admin/load/{model}", {"wait": wait})


def unload(server: Server, model: str, wait: bool = True) -> Any:
    """POST /v1/admin/unload."""
    return server.post(f"/v1/admin/unload/{model}", {"wait": wait})
