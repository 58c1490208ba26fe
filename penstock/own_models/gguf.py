"""Models in GGUF files: which file a name means, and the description out of the file's own fields.

A file, or the only model of a directory or repository, needs no more than its name. Of several a file of the directory
is named by its path, and a file of a repository by a part of its name: `owner/name:Q4_K_M`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.own_models.description import Description
from penstock.own_models.files import CannotTell, ModelFiles, shown
from penstock.own_models.readers import laid_over
from workers.loading import gguf_file

_TAGGED = re.compile(r"^(?P<repo>[^:]+/[^:]+):(?P<tag>[A-Za-z0-9._-]{1,64})$")
_TEMPLATE = "tokenizer.chat_template"
_MOST_SHOWN = 8


def split_tag(name: str) -> tuple[str, str]:
    """`owner/name:Q4_K_M` as repository and tag; the tag is empty where the name has none."""
    match = _TAGGED.match(name)
    return (match["repo"], match["tag"]) if match else (name, "")


def chosen(names: Collection[str], tag: str, how: str) -> str:
    """The GGUF file that holds the model; empty where there is none. Raises `CannotTell` for several.

    `how` tells the operator how one of several is named: `directory/{}`, or `owner/name:{}` for a repository.
    """
    models = gguf_file.choices(list(names))
    if tag:
        models = [model for model in models if tag.lower() in _words(model)]
        if not models:
            listed = _listed(gguf_file.choices(list(names)))
            raise CannotTell(f"no GGUF file of this repository is {shown(tag)}; there {listed}")
    if len(models) > 1:
        example = how.replace("{}", tag_of(models[0]) if how.endswith(":{}") else models[0])
        raise CannotTell(f"there {_listed(models)}; name one, such as {example}")
    return models[0] if models else ""


def _words(name: str) -> set[str]:
    """Ways to say which of several files is meant: the whole name, and what follows each dash or dot of its stem."""
    stem = gguf_file.stem_of(name).lower()
    return {name.lower(), stem, *(stem[at + 1 :] for at, letter in enumerate(stem) if letter in "-.")}


def tag_of(name: str) -> str:
    """What follows the last dash or dot of the name, `Q4_K_M` as a rule."""
    return re.split(r"[-.]", gguf_file.stem_of(name))[-1]


def _listed(models: list[str]) -> str:
    more = f" and {len(models) - _MOST_SHOWN} more" if len(models) > _MOST_SHOWN else ""
    return f"are {len(models)} GGUF models: {shown(', '.join(models[:_MOST_SHOWN]), 400)}{more}"


def describe(files: ModelFiles, name: str, stated: Mapping[str, Any]) -> Description:
    """The description of the model in a file of `files`, which need not be there yet. Raises `CannotTell`."""
    if stated.get("adapter", "causal") != "causal":
        raise CannotTell(f"adapter {shown(stated['adapter'])}: GGUF files hold models of the family causal")
    model = Description(files, stated, {"adapter": "causal"})
    model.offer(["text"], chat={})
    path = files.root / name
    if path.is_file():
        _read(model, path)
    else:
        model.tell("family", "causal", name)
        model.tell("weights", "read when the file has come", name)
    model.fields = laid_over(model.fields, stated)
    return model


def _read(model: Description, path: Path) -> None:
    try:
        stored = gguf_file.read_model(path)
        gguf_file.refuse_unserved(stored)
    except (gguf_file.GgufRefused, ImportError) as error:
        raise CannotTell(str(error)) from error
    except OSError as error:
        raise CannotTell(f"{path.name}: cannot be read: {error.strerror}") from error
    kinds = [tensor.kind for tensor in stored.tensors.values()]
    usual = max(kinds, key=kinds.count)
    parts = len(gguf_file.parts_of(path.name))
    model.tell("family", "causal", f"general.architecture {stored.architecture}")
    model.tell(
        "weights",
        f"{stored.values / 1e6:.0f} M numbers, mostly {usual}, turned into floats at load",
        path.name + (f" and {parts - 1} more" if parts > 1 else ""),
    )
    if stored.fields.get(_TEMPLATE):
        model.tell("chat template", "stored", _TEMPLATE)
    else:
        model.tell("chat template", "none: completions only", "none is stored")
    length = stored.get("context_length")
    if not 0 < length < 2**31:
        raise CannotTell(
            f"{path.name}: {stored.architecture}.context_length {length}: expected a positive number"
        )
    model.fields["max_sequence_length"] = length
    model.tell("length", f"{length} tokens", f"{stored.architecture}.context_length")
