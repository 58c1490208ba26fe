"""docs/models.md: the shipped catalog, one table per family."""

from __future__ import annotations

from ipc.catalog.entries import ModelEntry
from ipc.catalog.reading import read_entries
from penstock.families import FAMILIES, Family
from tools.source_tree import ROOT

CATALOG = ROOT / "config" / "models"
_HEAD = """# Models

Made by `make docs` from `config/models/`: {count} models in {families} families.

By default only models without `served: false` are served. `catalog.models` names those to serve, `catalog.serve_all`
serves every one; see [settings.md](settings.md). Any other model of a family is served by its path or hub id, see
[own_models.md](own_models.md).

```
penstock models list --output sparse        # what there is, and what is on disk
penstock models show BAAI/bge-m3            # prompts, options and profiles
penstock models pull BAAI/bge-m3            # download
penstock verify BAAI/bge-m3                 # compare with the reference library
penstock serve --models BAAI/bge-m3
```

A profile is also a model of its own, `<model>:<profile>`. Length is in tokens.
"""


def render() -> str:
    """The whole page."""
    entries = read_entries([str(CATALOG)]).entries.values()
    used = {name: family for name, family in FAMILIES.items() if any(one.adapter == name for one in entries)}
    parts = [_HEAD.format(count=len(entries), families=len(used))]
    for name, family in used.items():
        chosen = sorted((one for one in entries if one.adapter == name), key=lambda one: one.id.lower())
        parts.append(_section(name, family, chosen))
    return "\n".join(parts)


def _section(name: str, family: Family, entries: list[ModelEntry]) -> str:
    needs = f" Needs the extra `{family.extra}`." if family.extra else ""
    inputs = " and ".join(sorted({kind for one in entries for kind in one.inputs}, reverse=True))
    head = f"## {family.title}\n\n{family.about} Adapter `{name}`, input {inputs}.{needs}\n"
    table = [
        "| model | outputs | length | profiles | description |",
        "|---|---|---|---|---|",
        *map(_row, entries),
    ]
    return head + "\n" + "\n".join(table) + "\n"


def _row(entry: ModelEntry) -> str:
    outputs = ", ".join(f"{name} {spec.dims}" if spec.dims else name for name, spec in entry.outputs.items())
    profiles = ", ".join(f"`{name}`" for name in entry.profiles if name != "default")
    length = str(entry.max_sequence_length or "")
    return f"| `{entry.id}` | {outputs} | {length} | {profiles} | {entry.description} |"
