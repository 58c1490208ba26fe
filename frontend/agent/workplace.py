"""Where the tools of one run work: the sandbox of its session, its files, its skills.

1. A session has one sandbox, whose name is a digest of owner and session. The sandbox begins with its first call.
2. `prepare` finds or fetches the files and skills of the request, and returns what the model is told of them. Before
   the first call of a sandbox they are mounted: files under unique base names, skills below `skills/`. Bytes that a
   session is sent again are one file, and a URL is fetched once.
3. `run` runs a call and keeps the files that the call has made. A call that fails gives the model an answer that says
   so; only a store that fails ends the run.
4. `missing` makes placeholders for requested files that no call has made.
"""

from __future__ import annotations

import hashlib
import mimetypes
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from frontend.agent import results, tools
from frontend.agent.host import ProducedFile, ToolHost
from frontend.agent.results import Answer
from frontend.agent.tools import BuiltIn, Tool
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import CODE, SHELL, AgentPlan, InputFile, SkillUse
from frontend.generation.searching import SearchOptions
from frontend.state.content import in_thread
from frontend.state.errors import FileElided, FilePlaceholder
from frontend.state.file_objects import (
    INLINE_NBYTES,
    MAX_SLICE_CHARS,
    PREVIEW_NBYTES,
    file_object,
    preview,
    text_slice,
)
from frontend.state.files import AGENT_OUTPUT, USER_DATA, File, FileStore, Origin, Placeholder, clean_name
from frontend.state.skills import OpenSkill, SkillStore
from frontend.web.addresses import FetchFailed
from ipc.errors import FileNotFound, InvalidInput, StateFull, ToolFault, ToolHostLost
from ipc.wire.tools import (
    NOT_PRODUCED,
    Call,
    Done,
    PythonCall,
    PythonResult,
    ResetCall,
    ShellCall,
    ShellResult,
    SurfaceCall,
    Wanted,
)

if TYPE_CHECKING:
    from frontend.agent.ranking import Rank
    from frontend.agent.web import Web
    from frontend.web.fetching import Fetcher

MAX_INPUT_CHARS, MAX_PREVIEW_CHARS = 4096, 32768
"""Characters of text that the model is shown of one input file, and of all of a request."""
SHELL_CHARS, MOST_SHELL_CHARS = 4096, 1 << 20
"""Characters of each stream of a shell: those of a call that names no number, and the most."""
MAX_BODIES_NBYTES = 64 << 20
"""Bytes of all files and figures that stand in the events and the answer of one run."""
MAX_SKILL_FILES, SKILL_LEVELS = 80, 4
"""Files of a skill that the model is shown, and their depth."""
_LEAST_TIMEOUT_S = 0.001
_NO_ROOM = "no_room"
_REASONS = {
    NOT_PRODUCED: "the file was not produced",
    _NO_ROOM: "the server has no room for the file",
    "too_large": "the file is too large",
    "refused": "the path is no regular file of its own name",
    "unreadable": "the file cannot be read",
}


def sandbox_of(owner: str, session: str) -> str:
    """The name of the sandbox of a session."""
    return hashlib.blake2b(f"{len(owner)}:{owner}{session}".encode(), digest_size=16).hexdigest()


def _digest(sandbox: str, name: str, data: bytes) -> str:
    """The end of the id of a file that messages of a session bring: the same for the same name and bytes."""
    digest = hashlib.blake2b(f"{sandbox}{len(name)}:{name}".encode(errors="surrogatepass"), digest_size=16)
    digest.update(data)
    return digest.hexdigest()


@dataclass(slots=True)
class Workplace:
    """The work of one run. `turn` is the number of user messages before the last one.

    `files` are those of the session, the oldest first. The `fetcher` is there where requests may name files by URL,
    the `web` where they may search.
    """

    host: ToolHost
    store: FileStore
    skills: SkillStore
    owner: str
    plan: AgentPlan
    sandbox: str
    turn: int
    fetcher: Fetcher | None = None
    web: Web | None = None
    rank: Rank | None = None
    files: list[File] = field(default_factory=list)
    _mounts: list[tuple[str, File]] = field(default_factory=list)
    _skills: list[tuple[str, OpenSkill]] = field(default_factory=list)
    _run: str = field(default_factory=lambda: uuid4().hex[:12])
    _made: set[str] = field(default_factory=set)
    _round: int = 0
    _index: int = 0
    _searches: int = 0
    _query: str = ""
    _is_mounted: bool = False
    _room_nbytes: int = field(default_factory=lambda: MAX_BODIES_NBYTES)

    async def prepare(self) -> str:
        """Find the files and skills of the request; what the model is told, which may be nothing.

        Raises `InvalidField` for what is not there.
        """
        texts = [await self._skill(use) for use in self.plan.skills]
        if texts:
            head = "Skills: before you use one, read its SKILL.md in the work directory."
            texts = ["\n".join([head, *texts])]
        if self.plan.inputs:
            texts.append(await self._inputs())
        return "\n\n".join(texts)

    async def _inputs(self) -> str:
        lines, left, taken = ["Files of the user:"], MAX_PREVIEW_CHARS, set[str]()
        for given in self.plan.inputs:
            file = await self._input(given)
            if file is None:
                continue
            path = _unique(file.name, taken)
            self._mounts.append((path, file))
            self.files = [*(each for each in self.files if each.id != file.id), file]
            lines.append(f"- {_described(file)}, in the work directory as {path}")
            text = await self._beginning(file, min(left, MAX_INPUT_CHARS))
            if text:
                left -= len(text)
                lines.append(f"  The beginning of its text:\n{text}")
        return "\n".join(lines)

    async def _input(self, given: InputFile) -> File | None:
        if given.file_id:
            try:
                file = await self.store.get(self.owner, given.file_id)
                os.close(await self.store.open(file))
            except (FileNotFound, FileElided, FilePlaceholder) as error:
                if given.required:
                    raise InvalidField(given.field, error.message) from None
                return None
            return file
        data = given.url.encode(errors="surrogatepass") or given.data
        id_ = f"file-{await in_thread(_digest, self.sandbox, given.name, data)}"
        with suppress(FileNotFound, FileElided, FilePlaceholder):
            # NOTE: clients send a conversation whole, with its files, each time.
            file = await self.store.get(self.owner, id_)
            if file.created + (file.expires - file.created) / 2 > time.time():
                os.close(await self.store.open(file))
                return file
        if given.url:
            return await self._fetched(given, id_)
        origin = Origin("input_file", 0, self.turn)
        return await self.store.add(
            self.owner, given.data, name=given.name, purpose=USER_DATA, origin=origin, id=id_
        )

    async def _fetched(self, given: InputFile, id_: str) -> File | None:
        """A file that the request names by its URL. Its bytes go to the store as they arrive."""
        assert self.fetcher is not None
        most_nbytes = self.plan.offer.max_file_nbytes
        async with self.store.draft() as draft:
            try:
                async with self.fetcher.open(given.url, most_nbytes=most_nbytes) as page:
                    async for piece in page.pieces():
                        await draft.write(piece)
            except FetchFailed as error:
                if given.required:
                    raise InvalidField(given.field, error.message) from None
                return None
            name = given.name or page.name
            ending = mimetypes.guess_extension(page.media_type) if not PurePosixPath(name).suffix else None
            return await self.store.add(
                self.owner,
                draft,
                name=name,
                purpose=USER_DATA,
                origin=Origin("input_file", 0, self.turn),
                id=id_,
                format=ending[1:] if ending else None,
            )

    async def _beginning(self, file: File, chars: int) -> str:
        text = await text_slice(self.store, file, 0, chars) if chars > 0 else None
        return "" if text is None else text[0].replace("\0", "")

    async def _skill(self, use: SkillUse) -> str:
        try:
            skill = await self.skills.open(self.owner, use.skill_id, use.version)
        except InvalidInput as error:
            raise InvalidField(use.field, error.message) from None
        folder = _unique(clean_name(skill.name).replace(" ", "-"), {name.lower() for name, _ in self._skills})
        self._skills.append((folder, skill))
        paths = [path for path, _ in skill.files if len(PurePosixPath(path).parts) <= SKILL_LEVELS]
        tree = "\n".join(f"  skills/{folder}/{path}" for path in sorted(paths)[:MAX_SKILL_FILES])
        return f"- {skill.name}: {skill.description}\n{tree}"

    def close(self) -> None:
        """Close the files of skills."""
        for _, skill in self._skills:
            for _, fd in skill.files:
                with suppress(OSError):
                    os.close(fd)
        self._skills = []

    async def run(self, tool: BuiltIn, text: str, round_: int) -> tuple[Answer, list[File]]:
        """Run a call with these arguments; its answer, and the files that the call has made."""
        if round_ != self._round:
            self._round, self._index = round_, 0
        try:
            given = tools.arguments_of(tool, text)
            if isinstance(given, tools.OfFiles):
                return await self._run_files(tool, given)
            if isinstance(given, tools.SearchArguments | tools.ExtractArguments):
                return await self._look(given), []
            if isinstance(given, tools.ReadArguments):
                return results.content(await self._read(given)), []
            if tool.name == tools.LIST:
                return results.content({"files": list(map(_listed, self.files))}), []
            done, _ = await self._call(ResetCall())
            return results.reset(done.result.status), []
        except (InvalidInput, ToolFault) as error:
            return results.refused(tool, results.ERROR, error.message, text), []

    async def _look(self, given: tools.SearchArguments | tools.ExtractArguments) -> Answer:
        """What the web gives."""
        assert self.web is not None
        options = self.plan.search or SearchOptions()
        if isinstance(given, tools.ExtractArguments):
            return await self.web.extract(given, options, self._query, self.rank)
        uses, self._searches, self._query = self._searches, self._searches + 1, given.query
        return await self.web.search(given, options, uses, self.rank)

    async def _run_files(self, tool: BuiltIn, given: tools.OfFiles) -> tuple[Answer, list[File]]:
        named = {each.name: each.format for each in given.outputs or ()}
        requested = {
            each["name"]: each.get("format") for each in self.plan.requested if each["name"] not in self._made
        }
        formats = {**requested, **named} if tool.name != tools.SURFACE else named
        outputs = [Wanted(name, format_) for name, format_ in formats.items()]
        done, produced = await self._call(self._call_of(given, outputs))
        files = await self._keep(tool, produced, formats, set(named))
        if isinstance(given, tools.SurfaceArguments):
            shown = results.surfaced(list(map(_surfaced, files)), tools.values_of_outputs(given))
        elif isinstance(done.result, PythonResult):
            names = [file.name for file in files if file.placeholder is None]
            images = [image for image in done.result.images_png if self._takes(len(image))]
            shown = results.python(done.result, self.plan.offer.code_timeout_s, names, images)
        else:
            assert isinstance(done.result, ShellResult) and isinstance(given, tools.ShellArguments)
            shown = results.shell(done.result, given.commands)
        return await self._with_files(shown, files, done.left), files

    def _call_of(self, given: Any, outputs: list[Wanted]) -> Call:
        if isinstance(given, tools.PythonArguments):
            return PythonCall(given.code, outputs, self.plan.offer.code_timeout_s)
        if isinstance(given, tools.SurfaceArguments):
            return SurfaceCall(outputs)
        most_s = self.plan.offer.shell_timeout_s
        asked_s = most_s if given.timeout_ms is None else max(given.timeout_ms / 1e3, _LEAST_TIMEOUT_S)
        chars = min(given.max_output_length or SHELL_CHARS, MOST_SHELL_CHARS)
        return ShellCall(given.commands, outputs, min(asked_s, most_s), chars)

    async def _call(self, call: Call) -> tuple[Done, list[ProducedFile]]:
        if not self._is_mounted:
            await self._mount()
            self._is_mounted = True
        try:
            return await self.host.run(self.sandbox, call, lasting=True)
        except ToolHostLost:
            # NOTE: the sandbox begins anew in the next host, without files.
            self._is_mounted = False
            raise

    async def _mount(self) -> None:
        for path, file in self._mounts:
            try:
                # NOTE: another request of the session may have stored the same bytes anew.
                fd = await self.store.open(await self.store.get(self.owner, file.id))
            except FileNotFound:
                continue
            try:
                await self.host.mount(self.sandbox, path, fd, lasting=True)
            finally:
                os.close(fd)
        for folder, skill in self._skills:
            for path, fd in skill.files:
                await self.host.mount(self.sandbox, f"skills/{folder}/{path}", fd, lasting=True)

    async def _keep(
        self, tool: Tool, produced: Sequence[ProducedFile], formats: dict[str, str | None], named: set[str]
    ) -> list[File]:
        """Store what a call has made. Files that only the request expects are no error while they are not there."""
        stored: list[File] = []
        try:
            for each in produced:
                if each.fd is None and each.path not in named:
                    continue
                stored.append(await self._store(tool, each, formats.get(each.path)))
                if each.fd is not None:
                    self._made |= {each.path, PurePosixPath(each.path).name}
        finally:
            for each in produced:
                if each.fd is not None:
                    os.close(each.fd)
        self.files += stored
        return stored

    async def _store(self, tool: Tool, produced: ProducedFile, format_: str | None) -> File:
        reason = _REASONS.get(produced.error, "the file cannot be had")
        placeholder = Placeholder(produced.error, reason) if produced.fd is None else None
        try:
            return await self._add(tool.name, produced.path, produced.fd, format_, placeholder)
        except StateFull:
            placeholder = Placeholder(_NO_ROOM, _REASONS[_NO_ROOM])
            return await self._add(tool.name, produced.path, None, format_, placeholder)

    async def _add(
        self, tool: str, path: str, source: int | None, format_: str | None, placeholder: Placeholder | None
    ) -> File:
        number = self._index
        self._index += 1
        return await self.store.add(
            self.owner,
            source,
            name=path,
            purpose=AGENT_OUTPUT,
            origin=Origin(tool, self._round, self.turn),
            id=f"file_{self._run}_r{self._round}_{number}",
            format=format_,
            container=self.plan.container,
            placeholder=placeholder,
        )

    async def missing(self, round_: int) -> list[File]:
        """Placeholders for requested files that no call has made, if any could have made them."""
        if self.plan.features.isdisjoint((CODE, SHELL)):
            return []
        if round_ != self._round:
            self._round, self._index = round_, 0
        placeholder = Placeholder(NOT_PRODUCED, _REASONS[NOT_PRODUCED])
        return [
            await self._add("request", each["name"], None, each.get("format"), placeholder)
            for each in self.plan.requested
            if each["name"] not in self._made
        ]

    async def shown(self, files: Iterable[File]) -> list[dict[str, Any]]:
        """The File objects of files that a call has made, with bodies while the answer has room."""
        return [await self._shown(file) for file in files]

    async def _shown(self, file: File) -> dict[str, Any]:
        has_room = self._takes(file.nbytes) if file.nbytes <= INLINE_NBYTES else True
        try:
            return await file_object(self.store, file, with_body=has_room)
        except FileNotFound:
            # NOTE: where a store is full, newer files of the same call displace older ones.
            return await file_object(self.store, file, with_body=False)

    def _takes(self, nbytes: int) -> bool:
        """Whether the answer has room for so many bytes, which are taken then."""
        if nbytes > self._room_nbytes:
            return False
        self._room_nbytes -= nbytes
        return True

    async def _with_files(self, answer: Answer, files: Sequence[File], left: int) -> Answer:
        """The answer with what the model reads of the files: their metadata and the beginning of texts."""
        texts = [answer.text]
        for file in files:
            if file.placeholder is not None:
                texts.append(f"File {file.name}: {file.placeholder.message}.")
                continue
            texts.append(f"File {_described(file)} is given to the user.")
            with suppress(FileNotFound):
                if beginning := await preview(self.store, file, PREVIEW_NBYTES):
                    texts.append(beginning.replace("\0", ""))
        if left:
            texts.append(f"{left} more new files stay in the work directory.")
        return replace(answer, text="\n".join(texts))

    async def _read(self, given: tools.ReadArguments) -> dict[str, Any]:
        file = next((each for each in self.files if each.id == given.file_id), None)
        if file is None:
            return {"file_id": given.file_id, "error": "this conversation has no file with this id"}
        start = given.start or 0
        described = {"file_id": file.id, "name": file.name, "format": file.format}
        try:
            file = await self.store.get(self.owner, file.id)
            piece = await text_slice(self.store, file, start, tools.MOST if given.end is None else given.end)
        except InvalidInput as error:
            return {**described, "error": error.message}
        if piece is None:
            return {**described, "error": "the file is no text"}
        text, total = piece
        place = {"start": start, "end": start + len(text), "total_chars": total}
        return {**described, **place, "max_slice_chars": MAX_SLICE_CHARS, "text": text}


def _described(file: File) -> str:
    return f"{file.name} (id {file.id}, {file.mime_type}, {file.nbytes} bytes)"


def _listed(file: File) -> dict[str, Any]:
    origin = file.origin
    return {
        "id": file.id,
        "name": file.name,
        "format": file.format,
        "bytes": file.nbytes,
        "purpose": file.purpose,
        "source": origin.tool,
        "round": origin.round,
        "turn": origin.turn,
    }


def _surfaced(file: File) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": file.name, "format": file.format, "bytes": file.nbytes}
    if file.placeholder is None:
        return {**shown, "status": results.SUCCESS}
    return {**shown, "status": results.ERROR, "error": file.placeholder.code}


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or the name with a number where another file of the run has it."""
    path, number = PurePosixPath(name), 1
    unique = name
    while unique.lower() in taken:
        number += 1
        unique = f"{path.stem}_{number}{path.suffix}"
    taken.add(unique.lower())
    return unique
