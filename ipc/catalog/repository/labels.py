"""Label files: the name of class `i` is line `i`, counted from 0."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.catalog.repository import document, layout
from ipc.catalog.repository.layout import ModelRefused

MOST_BYTES = 1 << 20
MOST_LABELS = 100_000


def with_labels(config: ModelConfig, root: Path, directory: Path, follow_links: bool) -> ModelConfig:
    """The configuration with the labels that its outputs name. Raises `ModelRefused`."""
    if not any(output.label_filename for output in config.outputs):
        return config
    outputs = tuple(_labelled(output, root, directory, follow_links) for output in config.outputs)
    return msgspec.structs.replace(config, outputs=outputs)


def _labelled(output: TensorConfig, root: Path, directory: Path, follow_links: bool) -> TensorConfig:
    if not output.label_filename:
        return output
    field = f"output {output.name[:200]!a}: label_filename"
    path = layout.named_file(directory, output.label_filename, field)
    labels = read(layout.inside(root, path, follow_links))
    return msgspec.structs.replace(output, labels=labels)


def read(path: Path) -> tuple[str, ...]:
    """The labels of a file, without white space around them. Raises `ModelRefused` naming file and line."""
    lines = document.read_bounded(path, MOST_BYTES).split(b"\n")
    if lines[-1].strip() == b"":
        lines.pop()
    if len(lines) > MOST_LABELS:
        raise ModelRefused(f"{path.name}: {len(lines)} lines; the limit is {MOST_LABELS}")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{path.name}:{number}: no UTF-8") from error
    return tuple(found)
