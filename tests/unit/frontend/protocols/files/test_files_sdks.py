"""Files through the unmodified SDKs of OpenAI and Anthropic, sync and async, and by two keys over two frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from frontend.state.files import Origin
from tests.fakes.two_frontends import OURS, THEIRS, Pair, Sdk, emptied, sdk_of, two_frontends
from tests.harness.later import anthropic, openai
from tests.harness.sdks import of_anthropic, of_openai


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two frontends that share a state directory and ask for a key."""
    with two_frontends(tmp_path_factory.mktemp("files")) as found:
        yield found


ours = emptied(of_openai, "files")
"""OpenAI's SDK, which asks the frontends in turn."""
claude = emptied(of_anthropic, "beta.files")
"""Anthropic's SDK, which asks the frontends in turn."""


def test_openai_uploads_lists_reads_and_deletes(ours: Sdk) -> None:
    after = {"anchor": "created_at", "seconds": 600}
    file = ours.call("files.create", file=("grüße.csv", b"a,b\n"), purpose="user_data", expires_after=after)
    assert (file.object, file.filename, file.bytes, file.purpose, file.status) == (
        "file", "grüße.csv", 4, "user_data", "processed"
    )  # fmt: skip
    assert 600 <= file.expires_at - file.created_at <= 601
    assert ours.call("files.retrieve", file.id) == file
    assert ours.content("files.content", file.id) == b"a,b\n"
    deleted = ours.call("files.delete", file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    with pytest.raises(openai.NotFoundError) as refused:
        ours.call("files.retrieve", file.id)
    assert refused.value.code == "file_not_found"


def test_openai_lists_all_pages_and_ends(ours: Sdk) -> None:
    ids = [ours.call("files.create", file=(f"{n}.txt", b"x"), purpose="user_data").id for n in range(5)]
    assert [file.id for file in ours.items("files.list", limit=2, order="asc")] == ids
    assert [file.id for file in ours.items("files.list", limit=2, order="desc")] == ids[::-1]
    assert ours.items("files.list", purpose="batch") == []


def test_openai_reads_files_of_containers(ours: Sdk, pair: Pair) -> None:
    async def make(owner: str) -> list[str]:
        files = pair.server.services.state.files
        return [
            (
                await files.add(
                    owner,
                    b"png",
                    name="plot.png",
                    purpose="agent_output",
                    origin=Origin("execute_python"),
                    container="cntr_1",
                )
            ).id
            for _ in range(3)
        ]

    ids = asyncio.run(make(pair.server.services.access.entries[0].id))
    listed = ours.items("containers.files.list", "cntr_1", limit=2)
    assert [file.id for file in listed] == ids
    assert (listed[0].object, listed[0].container_id, listed[0].path) == (
        "container.file", "cntr_1", "/mnt/data/plot.png"
    )  # fmt: skip
    assert ours.call("containers.files.retrieve", ids[0], container_id="cntr_1").bytes == 3
    assert ours.content("containers.files.content.retrieve", ids[0], container_id="cntr_1") == b"png"
    ours.call("containers.files.delete", ids[0], container_id="cntr_1")
    assert len(ours.items("containers.files.list", "cntr_1")) == 2
    with pytest.raises(openai.APIStatusError) as refused:
        ours.call("containers.create", name="mine")
    assert refused.value.status_code == 501


@pytest.mark.sample(1)
def test_anthropic_uploads_lists_reads_and_deletes(claude: Sdk) -> None:
    file = claude.call("beta.files.upload", file=("notes.md", b"# Hi"))
    assert (file.type, file.filename, file.mime_type, file.size_bytes) == (
        "file",
        "notes.md",
        "text/markdown",
        4,
    )
    assert file.created_at.tzinfo is not None and file.downloadable is True
    assert claude.call("beta.files.retrieve_metadata", file.id).id == file.id
    assert claude.content("beta.files.download", file.id) == b"# Hi"
    ids = [file.id] + [claude.call("beta.files.upload", file=("a.txt", b"x")).id for _ in range(4)]
    assert [one.id for one in claude.items("beta.files.list", limit=2)] == ids
    assert claude.call("beta.files.delete", file.id).id == file.id
    with pytest.raises(anthropic.NotFoundError):
        claude.call("beta.files.retrieve_metadata", file.id)


def test_files_of_one_key_do_not_exist_for_another(pair: Pair) -> None:
    with ExitStack() as stack:
        ours = sdk_of(stack, pair, of_openai, OURS)
        theirs = sdk_of(stack, pair, of_openai, THEIRS)
        file = ours.call("files.create", file=("a.txt", b"secret"), purpose="user_data")
        assert theirs.items("files.list") == []
        for method in ("files.retrieve", "files.content", "files.delete"):
            with pytest.raises(openai.NotFoundError):
                theirs.call(method, file.id)
        with pytest.raises(openai.NotFoundError):
            theirs.call("containers.files.content.retrieve", file.id, container_id="cntr_1")
        with pytest.raises(openai.NotFoundError):
            theirs.items("files.list", after=file.id)
        assert ours.content("files.content", file.id) == b"secret"
