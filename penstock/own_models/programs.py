"""`penstock serve ./model.onnx`: programs that lie in no repository, in a repository made for them.

1. A name that leads to a file of a program (`.onnx`, `.pt2`), or to a directory whose only weights are in ONNX, is
   that program. Of several programs in a directory `model.onnx` is meant, in the directory itself or in `onnx/`.
2. The program and its files of data are linked into a repository below the run directory, copied where a link cannot
   be made. The server takes inputs, outputs and datatypes from the program's own signature, as for each program without
   a configuration (docs/repository.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ipc import extras
from ipc.errors import ConfigError
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings
from penstock.own_models.files import CannotTell, ModelFiles

FILES = {".onnx": "model.onnx", ".pt2": "model.pt2"}
"""Endings of programs, and the names of their files in a repository."""
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_CHOSEN = ("model.onnx", "onnx/model.onnx")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}")


def program_of(name: str) -> Path | None:
    """The program that a name leads to; None for a name of something else. Raises `CannotTell` for several programs."""
    try:
        place = Path(name).expanduser().absolute()
        if place.is_file():
            return place if place.suffix.lower() in FILES else None
        if not name or not place.is_dir():
            return None
    except (OSError, RuntimeError):
        return None
    names = ModelFiles.of_directory(place).names
    programs = sorted(file for file in names if Path(file).suffix.lower() == ".onnx")
    if not programs or any(file.endswith(_WEIGHTS) for file in names):
        return None
    chosen = next((file for file in _CHOSEN if file in programs), programs[0])
    if len(programs) > 1 and chosen not in _CHOSEN:
        listed = ", ".join(ascii(file)[1:-1] for file in programs[:4])
        raise CannotTell(
            f"{name}: there are {len(programs)} programs: {listed}; name one: {name}/{programs[0]}"
        )
    return place / chosen


def name_of(name: str, program: Path, alias: str) -> str:
    """The id of a program: the alias, else the name of its directory or file. Raises `CannotTell`."""
    given = Path(name).expanduser().absolute()
    model = alias or (given.name if given.is_dir() else program.stem)
    if not _NAME.fullmatch(model):
        raise CannotTell(
            f"{name}: {model[:200]!a} is no name for a program; give one behind the path: {name}=my-model"
        )
    return model


def line_of(model: str, program: Path) -> str:
    """What the operator is told."""
    return f"{program} is served as {model}: named tensors, inputs and outputs by its own signature (docs/kserve.md)"


def lay_out(config: Settings, programs: Mapping[str, Path]) -> Path:
    """A repository of these programs by name. Raises `ConfigError` if the run directory cannot be written."""
    from workers.loading.program_files import external_files

    if not extras.has_worker():
        raise CannotTell(f"a program needs {extras.needed('worker')}")
    for program in programs.values():
        if program.suffix.lower() == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
            raise CannotTell(f"{program}: a program in ONNX needs {extras.needed('onnx')}")
    facts = [
        (model, str(path), path.stat().st_mtime_ns, path.stat().st_size) for model, path in programs.items()
    ]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    try:
        prepare_run_dir(config.paths)
        root = config.paths.own_models() / digest
        for model, program in programs.items():
            place = root / model / "1"
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            for file, path in external_files(program).items():
                target = Path(os.path.normpath(place / file))
                # NOTE: by links in its own directory a program can name such a file with a path that leads elsewhere.
                if target.is_relative_to(place):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _put(path, target)
            _put(program, place / FILES[program.suffix.lower()])
    except OSError as error:
        raise ConfigError(f"{config.paths.root}: a program cannot be laid out: {error.strerror}") from error
    return root


def _put(source: Path, target: Path) -> None:
    """Link a file, or copy it to another file system. What is there of an earlier start is replaced in one step."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            os.link(os.path.realpath(source), draft)
        except OSError:
            shutil.copyfile(source, draft)
        draft.replace(target)
    finally:
        # NOTE: where both names are links to one file, nothing is renamed and the draft stays.
        with contextlib.suppress(OSError):
            draft.unlink()
