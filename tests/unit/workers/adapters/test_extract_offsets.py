"""Places in answers point at what they say, whatever characters a text holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc.wire.extraction import Extraction
from ipc.wire.messages import ExtractCall, InputItem
from tests.conformance.extractors import required_library
from tests.tiny.models import build
from workers.adapters import registry
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.ner import STRATEGIES

# Letters of several scripts, combining marks, joined emoji, blanks of all kinds, what normalizers widen or drop.
ODD = "aZß é\u0301\u0327東京の\u00a0\u2009\t\n👩\u200d👧🇫🇷ﬁﷺ\ufeff\u200eİ\u0131Σς־שׁ५०½²ª\U0001d54f.,-_'\"#@"
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8", exclude_characters="\0")),
    max_size=60,
)
MIXED = st.lists(
    st.one_of(TEXTS, st.sampled_from(["Marie Curie", "Paris", "bridge", "naïve"])), max_size=12
).map(" ".join)
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Adapter]:
    """Loads a tiny model with the family that serves it."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("offsets")

    def loaded(family: str, tiny: str) -> Adapter:
        directory = build(tiny, place / tiny) if not (place / tiny).exists() else place / tiny
        context = LoadContext(
            directory, tiny, torch.device("cpu"), torch.float32, None, {}, lambda phase, part: None
        )
        return registry.resolve(family).load(context)

    return loaded


@pytest.fixture(scope="module", params=[("ner", "ner"), ("ner", "ner_xlmr"), ("gliner", "gliner")], ids=str)
def adapter(request: pytest.FixtureRequest, load: Callable[[str, str], Adapter]) -> Adapter:
    """A family that places what it finds."""
    family, tiny = request.param
    if family == "gliner":
        required_library("gliner")
    return load(family, tiny)


@pytest.fixture(scope="module")
def windowed(load: Callable[[str, str], Adapter]) -> Adapter:
    """A token classifier that reads long texts in windows."""
    return load("ner", "ner")


def run(adapter: Adapter, call: ExtractCall) -> list[Extraction]:
    """What the adapter finds, as the worker would ask it."""
    adapter.refuse_unsupported(call)
    found = adapter.extract(adapter.collate(adapter.prepare(call.items, call)))  # type: ignore[arg-type]
    return [one for one in found if isinstance(one, Extraction)]


@pytest.mark.sample(2)
@QUICK
@given(texts=st.lists(MIXED, min_size=1, max_size=4), choice=st.integers(0, 4))
def test_a_place_holds_the_text_of_its_entity(adapter: Adapter, texts: list[str], choice: int) -> None:
    by_ner = adapter.spec.family == "ner"
    options = {"aggregation_strategy": STRATEGIES[choice]} if by_ner else {"threshold": 0.6}
    labels = [] if by_ner else ["person", "city"]
    found = run(adapter, ExtractCall([InputItem(text) for text in texts], labels, options=options))
    assert len(found) == len(texts)
    for text, one in zip(texts, found, strict=True):
        for entity in one.entities:
            assert entity.start is not None and entity.end is not None
            assert text[entity.start : entity.end] == entity.text != ""


@settings(QUICK, max_examples=10)
@given(texts=st.lists(MIXED, min_size=20, max_size=60).map(" ".join))
def test_windows_place_their_entities_in_the_whole_text(windowed: Adapter, texts: str) -> None:
    [found] = run(windowed, ExtractCall([InputItem(texts)], options={}, overflow="chunk"))
    ends = [0]
    for entity in found.entities:
        assert texts[entity.start : entity.end] == entity.text != ""
        assert (entity.start or 0) >= ends[-1], "entities of two windows overlap"
        ends.append(entity.end or 0)
