"""Patterns of settings, of catalog entries and of MCP servers: a line break at the end of a text passes none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_draws
from hypothesis import strategies as st
from msgspec import inspect

from ipc import mcp_servers, settings
from ipc.catalog import entries
from ipc.errors import ConfigError

READ = (settings.Settings, entries.ModelEntry, mcp_servers.McpConfig)


def patterns(kind: Any) -> Iterator[str]:
    """The patterns of all texts within a type of msgspec."""
    if isinstance(kind, inspect.StrType) and kind.pattern is not None:
        yield kind.pattern
    within = [getattr(kind, name, ()) for name in ("fields", "types", "item_types")]
    for one in (
        getattr(kind, "item_type", None),
        getattr(kind, "key_type", None),
        getattr(kind, "type", None),
    ):
        within.append((one,) if one is not None else ())
    for each in (one for several in within for one in several):
        yield from patterns(each.type if isinstance(each, inspect.Field) else each)


WHOLE = sorted({one for kind in READ for one in patterns(inspect.type_info(kind))} - {"^/"})
"""Without that of `agent.shell_path`, which tells the beginning alone."""


def test_all_patterns_are_found() -> None:
    assert entries.ID in WHOLE and len(WHOLE) >= 14
    assert not [one for one in WHOLE if one.endswith("$")]


@pytest.mark.parametrize("pattern", WHOLE)
@settings_of_draws(max_examples=10)
@given(data=st.data())
def test_no_text_with_a_line_break_matches(pattern: str, data: st.DataObject) -> None:
    kind = Annotated[str, msgspec.Meta(pattern=pattern)]
    text = data.draw(st.from_regex(pattern))
    assert msgspec.convert(text, kind) == text and "\n" not in text
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text + "\n", kind)


@pytest.mark.parametrize("name", ["run.instance", "cluster.name", "cluster.box", "shared_memory.key_prefix"])
def test_a_setting_with_a_line_break_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        settings.load(flags={name: "a\n"}, environ={})
