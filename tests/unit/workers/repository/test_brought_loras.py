"""LoRA adapters of models that generate, as names of a catalog: those of its files, and those that requests load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from ipc import deadline, settings
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, OutputSpec, Profile
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.store.wishes import BroughtLora, Wishes
from workers.lifecycle.model_states import groups
from workers.repository.catalog_files import CatalogWatch, open_catalog

BASE = "tiny/chat"
LEGAL = DirectorySource("/loras/legal")


def chat(name: str = BASE, **fields: Any) -> ModelEntry:
    """The entry of a model that generates."""
    return ModelEntry(
        name, DirectorySource("/weights"), adapter="causal", outputs={"chat": OutputSpec()}, **fields
    )


def opened(root: Path) -> tuple[Settings, Wishes]:
    """The settings of a server with one model, and what its requests wish."""
    (root / "catalog").mkdir()
    entry = {"id": BASE, "source": {"kind": "directory", "path": "/weights"}, "adapter": "causal"}
    entry |= {"outputs": {"chat": {}}, "loras": {"legal": {"kind": "directory", "path": "/loras/legal"}}}
    (root / "catalog" / "chat.yaml").write_text(json.dumps(entry))
    flags = {"run.dir": str(root / "run"), "catalog.dirs": str(root / "catalog")}
    found = settings.load(flags=flags, environ={})
    prepare_run_dir(found.paths)
    return found, Wishes(found.paths, Store(found.paths))


def test_an_adapter_is_a_variant_that_shares_the_weights_of_its_model() -> None:
    catalog = Catalog([chat(loras={"legal": LEGAL}, runtime={"tool_format": "qwen"}, served_name="gpt")])
    assert list(catalog) == [BASE, f"{BASE}:legal"]
    for name in ("legal", f"{BASE}:legal", "gpt:legal"):
        assert catalog[name].id == f"{BASE}:legal"
    assert catalog["legal"].runtime == {"tool_format": "qwen", "lora": "legal"}
    assert len(groups(catalog)) == 1


def test_a_name_that_two_models_have_or_that_is_a_model_leads_to_no_adapter() -> None:
    loras = {"legal": LEGAL, "other": LEGAL, "third": LEGAL}
    catalog = Catalog(
        [chat(loras=loras), chat("other", loras={"legal": LEGAL}), chat("x", served_name="third")]
    )
    assert "legal" not in catalog
    assert (catalog["other"].id, catalog["third"].id) == ("other", "x")
    assert catalog["other:legal"].runtime == {"lora": "legal"}


def test_a_profile_of_the_same_name_goes_before_the_adapter_and_encoders_have_no_variants() -> None:
    own = Profile(runtime={"lora": "legal", "reasoning": "off"})
    catalog = Catalog([chat(loras={"legal": LEGAL}, profiles={"legal": own})])
    assert catalog[f"{BASE}:legal"].runtime == {"lora": "legal", "reasoning": "off"}
    encoder = ModelEntry("e", DirectorySource("/weights"), loras={"legal": LEGAL})
    assert list(Catalog([encoder])) == ["e"]


def test_workers_follow_adapters_that_requests_load_and_unload(tmp_path: Path) -> None:
    found, wishes = opened(tmp_path)
    watch = CatalogWatch(found.catalog.dirs, wishes=wishes)
    row, until_ns = BroughtLora(BASE, "/loras/late"), deadline.after(60)
    asyncio.run(wishes.bring_lora("late", row, until_ns))
    asyncio.run(wishes.bring_lora("legal", BroughtLora(BASE, "/elsewhere"), until_ns))
    asyncio.run(wishes.bring_lora("foreign", BroughtLora("gone", "/loras/late"), until_ns))
    assert watch.differs()
    assert watch.changed(), "a row is whole at once and need not settle"
    catalog = open_catalog(found.catalog, found.repository, wishes=wishes)
    assert set(catalog) == {BASE, f"{BASE}:legal", f"{BASE}:late"}
    assert catalog[BASE].loras == {"legal": LEGAL, "late": DirectorySource("/loras/late")}
    watch.was_read(catalog.files)
    assert asyncio.run(wishes.end_lora("late"))
    assert watch.differs()
    assert "late" not in open_catalog(found.catalog, found.repository, wishes=wishes)
    assert not asyncio.run(wishes.end_lora("late"))
