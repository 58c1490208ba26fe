"""The files of loaded models are overwritten in place, cut to nothing and deleted: answers stay, and nobody dies."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.harness.server import Server, serving, wait_until
from tests.tiny import chat_models, loras, onnx_files, programs
from tests.tiny.models import build
from workers.loading.reading import files_of

TABLE = (512, 64)
"""Rows and width of a table outside of its program."""
ENCODERS = {"tiny/dense": "dense_mean", "tiny/pickled": "dense_mean", "tiny/heads": "dense_projected"}
Asks = dict[str, Callable[[], Any]]


def write(place: Path) -> list[str]:
    """One model or more of each format; returns the names of those of the catalog."""
    (place / "catalog").mkdir()
    for name, tiny in ENCODERS.items():
        _entry(place, name, build(tiny, place / "models" / name), "dense", {"dense": {}})
    _pickle(place / "models" / "tiny" / "pickled")
    loras.write(place / "loras" / "first", place / "models" / "tiny" / "dense")
    _entry(place, "tiny/m3", build("bge_m3", place / "models" / "m3"), "bge_m3", {"dense": {}, "sparse": {}})
    _entry(place, "tiny/ner", build("ner", place / "models" / "ner"), "ner", {"json": {}})
    _entry(place, "tiny/gliner", build("gliner", place / "models" / "gliner"), "gliner", {"json": {}})
    chat_models.write_entry(
        place / "catalog", "tiny/chat", chat_models.save("chatml", place / "models" / "chat")
    )
    for name, program in (("exported", programs.EXPORTED), ("scripted", programs.SCRIPTED)):
        programs.write_model(place / "repository", "classifier", name, program)
    table = place / "repository" / "table" / "1"
    table.mkdir(parents=True)
    (table / "model.onnx").write_bytes(onnx_files.table("model.onnx.data", *TABLE))
    (table / "model.onnx.data").write_bytes(np.random.default_rng(0).random(TABLE, np.float32).tobytes())
    return [*ENCODERS, "tiny/m3", "tiny/ner", "tiny/gliner", "tiny/chat"]


def _entry(place: Path, name: str, directory: Path, adapter: str, outputs: dict[str, Any]) -> None:
    source = {"kind": "directory", "path": str(directory)}
    entry = {"id": name, "source": source, "adapter": adapter, "outputs": outputs}
    (place / "catalog" / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(entry))


def _pickle(directory: Path) -> None:
    """Store the weights as torch does."""
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()


def asks_of(server: Server) -> Asks:
    """A request to each model, which gives the part of the answer that the weights decide."""

    def posted(path: str, body: Any, *keys: str | int) -> Callable[[], Any]:
        def ask() -> Any:
            answer = server.post(path, body)
            assert answer.status == 200, (path, answer.status, answer.text[:300])
            found = answer.json()
            for key in keys:
                found = found[key]
            return found

        return ask

    items = {"items": [{"text": "Ada Lovelace was in London and in Paris"}]}
    image = np.random.default_rng(1).random((1, 3, programs.SIDE, programs.SIDE), np.float32)
    picture = {
        "name": "image",
        "shape": list(image.shape),
        "datatype": "FP32",
        "data": image.flatten().tolist(),
    }
    rows = {"name": "INPUT", "shape": [3, 1], "datatype": "INT64", "data": [0, 200, 511]}
    chat = {
        "model": "tiny/chat",
        "max_tokens": 16,
        "temperature": 0,
        "messages": [_user("tell me of the sea")],
    }
    encoded = {name: posted(f"/v1/encode/{name}", items, "items") for name in (*ENCODERS, "tiny/m3")}
    labelled = {**items, "params": {"labels": ["person", "city"]}}
    return encoded | {
        "lora": posted("/v1/encode/tiny/dense", {**items, "params": {"options": {"lora": "first"}}}, "items"),
        "sparse": posted("/v1/encode/tiny/m3", {**items, "params": {"output_types": ["sparse"]}}, "items"),
        "ner": posted("/v1/extract/tiny/ner", items, "items"),
        "gliner": posted("/v1/extract/tiny/gliner", labelled, "items"),
        "chat": posted("/v1/chat/completions", {**chat, "logprobs": True}, "choices"),
        "onnx": posted("/v2/models/table/infer", {"inputs": [rows]}, "outputs"),
        "exported": posted("/v2/models/exported/infer", {"inputs": [picture]}, "outputs"),
        "scripted": posted("/v2/models/scripted/infer", {"inputs": [picture]}, "outputs"),
    }


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def overwrite(path: Path) -> None:
    """Other bytes of the same number, in the same file."""
    content = np.frombuffer(path.read_bytes(), np.uint8)
    with path.open("r+b") as stream:
        stream.write((content ^ 0x11).tobytes())


DAMAGES: tuple[Callable[[Path], None], ...] = (overwrite, lambda path: os.truncate(path, 0), Path.unlink)


@contextmanager
def asking(asks: Asks, right: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A client that asks all models in turn until the end, and compares; gives a wait for a whole round.

    One request runs at a time: values of a batch may differ in their last digit from those of a single request.
    """
    end, rounds = threading.Event(), threading.Semaphore(0)

    def client() -> None:
        try:
            while not end.is_set():
                for name, ask in asks.items():
                    assert ask() == right[name], f"the answer of {name} changed"
                rounds.release()
        finally:
            rounds.release(100)

    def wait() -> None:
        for _ in range(2):
            assert rounds.acquire(timeout=60), "the client stands still"

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(client)
        try:
            yield wait
        finally:
            end.set()
        running.result()


def test_files_of_loaded_models_may_be_overwritten_cut_and_deleted(tmp_path: Path) -> None:
    names = write(tmp_path)
    settings = {
        "catalog.lora_dirs": tmp_path / "loras",
        "catalog.watch": False,
        "repository.dirs": tmp_path / "repository",
        "limits.load_wait_s": 60,
    }
    with serving(tmp_path, names, settings, catalog=tmp_path / "catalog") as server:
        asks = asks_of(server)
        wait_until(lambda: server.encode("tiny/dense", ["a"], options={"lora": "first"}).status == 200)
        for ask in asks.values():  # the next ones find what may be kept, such as the keys of a prompt
            ask()
        right, pid = {name: ask() for name, ask in asks.items()}, server.worker_pid()
        files = [path for kind in ("models", "loras", "repository") for path in files_of(tmp_path / kind)]
        with asking(asks, right) as round_of_all:
            for damage in DAMAGES:
                for path in files:
                    damage(path)
                round_of_all()
        assert {name: ask() for name, ask in asks.items()} == right
        assert (server.worker_pid(), server.starts(0)) == (pid, 1)
