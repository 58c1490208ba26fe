"""docs/settings.md: every setting with default, allowed values, and its comment in config/server.yaml."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import inspect

from ipc import setting_sources, settings
from tools.source_tree import ROOT

SOURCE = ROOT / "config" / "server.yaml"
_HEAD = """# Settings

Made by `make docs` from `ipc/settings.py` and `config/server.yaml`.

Precedence: default, then the file (`--config` or `PENSTOCK_CONFIG`), then the environment, then flags. `server.bind` is
`PENSTOCK_SERVER__BIND` in the environment and `--set server.bind=...` on the command line, and so for every other.
Several values of one setting, directories too, are separated by commas, and spaces beside a comma do not count; in
the file they are lists, whose texts may hold commas.
Sizes are bytes, or have a unit: B, KiB, MiB, GiB, TiB, and kB, MB, GB, TB by thousands.
"""


def render() -> str:
    """The whole page."""
    told = dict(_comments())
    parts = [_HEAD]
    for section in msgspec.structs.fields(settings.Settings):
        assert told[section.name], f"{SOURCE.name}: the section {section.name} has no comment"
        parts.append(f"## {section.name}\n\n{told[section.name]}\n")
        parts.append("| setting | default | takes | meaning |\n|---|---|---|---|")
        for field in inspect.type_info(section.type).fields:  # type: ignore[attr-defined]
            name = f"{section.name}.{field.name}"
            default = f"`{setting_sources.shown(field.name, field.default)}`"
            takes = setting_sources.taken(field.name, field.type)
            parts.append(f"| `{name}` | {default} | {takes} | {_cell(told[name])} |")
        parts.append("")
    return "\n".join(parts)


def _comments() -> Iterator[tuple[str, str]]:
    """(section or section.field, the comment lines right above it)."""
    above: list[str] = []
    section = ""
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        if text:
            name = text.partition(":")[0]
            section = section if line.startswith(" ") else name
            yield (f"{section}.{name}" if line.startswith(" ") else name), " ".join(above)
        above = []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
