"""The resources of skills and their versions. Each caller sees the caller's own skills only.

1. An upload is gathered in memory, and its bytes count in the budget of bodies until the skill is stored. What a zip
   may inflate to counts as well.
2. One file that is a zip, by its ending or its first bytes, holds the skill. All else are files of the skill.
3. The form is Anthropic's where a header of Anthropic, or the parameter `source`, is present.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from falcon.asgi import Request, Response

from frontend.generation.errors import InvalidField, MalformedBody
from frontend.generation.multipart import FRAMING_NBYTES, Fields, Part, held_parts
from frontend.generation.requests import ORDERS, decode, is_anthropic, number, owner_of, receive, word
from frontend.protocols.skills import schemas
from frontend.protocols.skills.schemas import (
    CUSTOM,
    MOST_LISTED,
    SkillChange,
    SkillUpload,
    VersionUpload,
    version_id,
)
from frontend.sending import answer_json
from frontend.services import Services
from frontend.state.archives import MAX_NBYTES, ZIP_MAGIC, SkillFiles, from_parts, from_zip
from frontend.state.content import StoredBytes, in_thread
from frontend.state.skills import Skill, SkillNotFound, SkillStore, Version

ZIP = "application/zip"
SOURCES = (CUSTOM, "anthropic", "anthropic_example", "plugin")
_PARTS = ("files", "file", "files[]")
_FIELDS = frozenset((*SkillUpload.__struct_encode_fields__, *VersionUpload.__struct_encode_fields__)) - {
    "files"
}
_MOST_TITLE = 255
_MOST_INFLATION = 1_032
"""Bytes that deflate makes of one byte, at most."""
_DIGITS = 12
_LATEST = "latest"
_SWITCH = {"": False, "false": False, "true": True}


def wants_anthropic(req: Request | None) -> bool:
    """Whether the form of Anthropic is asked for."""
    return is_anthropic(req) or (req is not None and req.get_param("source") is not None)


class _Resource:
    """A resource over the skills of a server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def _skills(self) -> SkillStore:
        return self._services.state.skills

    @asynccontextmanager
    async def _uploaded(self, req: Request) -> AsyncGenerator[tuple[SkillFiles, Fields], None]:
        """The checked skill of an upload, with the other fields."""
        gathered, bodies = _Gathered(), self._services.bodies
        deadline_ns = req.context.penstock.deadline_ns
        async with held_parts(req, bodies, deadline_ns, MAX_NBYTES + FRAMING_NBYTES, gathered.take):
            with bodies.holding(gathered.most_inflated()):
                yield await in_thread(gathered.checked), gathered.fields

    async def _number(self, req: Request, skill_id: str, version: str) -> int:
        """The number of a version that a client names by number, id, or `latest`. Raises `SkillNotFound`."""
        if version == _LATEST:
            return (await self._skills.get(owner_of(req), skill_id)).latest
        digits = version.removeprefix(f"{skill_id}_v")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS):
            raise SkillNotFound(f"no skill with the id {skill_id[:100]!a} has a version {version[:100]!a}")
        return int(digits)

    async def _version(self, req: Request, skill_id: str, version: str) -> Version:
        number_ = await self._number(req, skill_id, version)
        return await self._skills.version(owner_of(req), skill_id, number_)

    async def _send(self, req: Request, resp: Response, version: Version) -> None:
        descriptor = await self._skills.packed(version)
        named = version_id(version.skill, version.number)
        resp.content_type, resp.content_length = ZIP, version.nbytes
        resp.set_header("Content-Disposition", f'attachment; filename="{named}.zip"')
        if req.method == "HEAD":
            os.close(descriptor)
        else:
            resp.stream = StoredBytes(descriptor, range(version.nbytes))


class SkillsResource(_Resource):
    """POST: store a skill. GET: the skills of the caller."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """The new skill."""
        async with self._uploaded(req) as (files, fields):
            title = fields.text("display_name") or fields.text("display_title")
            if len(title) > _MOST_TITLE:
                raise InvalidField("display_name", f"{len(title)} characters, the limit is {_MOST_TITLE}")
            skill = await self._skills.add(owner_of(req), files, title=title)
        _answer_skill(req, resp, skill)

    async def on_get(self, req: Request, resp: Response) -> None:
        """A page of skills, oldest first unless `order` is `desc`. Other sources than `custom` have none."""
        is_custom = word(req, "source", SOURCES, CUSTOM) == CUSTOM
        limit, order, after = _listing(req)
        skills, has_more = list[Skill](), False
        if is_custom:
            skills, has_more = await self._skills.page(owner_of(req), after=after, limit=limit, order=order)
        ids = [skill.id for skill in skills]
        if wants_anthropic(req):
            shown = [schemas.messages_skill_of(skill) for skill in skills]
            answer_json(resp, schemas.MessagesSkillList("list", shown, *_ends(ids, has_more)))
        else:
            listed = [schemas.skill_of(skill) for skill in skills]
            answer_json(resp, schemas.SkillList("list", listed, *_ends(ids, has_more)))


class SkillResource(_Resource):
    """GET, POST and DELETE of one skill."""

    async def on_get(self, req: Request, resp: Response, skill_id: str) -> None:
        """The skill."""
        skill = await self._skills.get(owner_of(req), skill_id)
        _answer_skill(req, resp, skill)

    async def on_post(self, req: Request, resp: Response, skill_id: str) -> None:
        """Choose the default version."""
        parse = partial(decode, kind=SkillChange, max_items=self._services.settings.limits.max_items)
        change: SkillChange = await receive(self._services, req, parse)
        version = await self._number(req, skill_id, str(change.default_version))
        skill = await self._skills.choose(owner_of(req), skill_id, version)
        _answer_skill(req, resp, skill)

    async def on_delete(self, req: Request, resp: Response, skill_id: str) -> None:
        """Delete the skill with its versions."""
        await self._skills.delete(owner_of(req), skill_id)
        if wants_anthropic(req):
            answer_json(resp, schemas.MessagesDeletedSkill(skill_id, "skill_deleted"))
        else:
            answer_json(resp, schemas.DeletedSkill(skill_id, "skill.deleted", True))


class SkillContentResource(_Resource):
    """GET and HEAD of the zip of the default version."""

    async def on_get(self, req: Request, resp: Response, skill_id: str) -> None:
        """The zip."""
        await self._send(req, resp, await self._skills.version(owner_of(req), skill_id))

    on_head = on_get


class VersionsResource(_Resource):
    """POST: store a version. GET: the versions of a skill."""

    async def on_post(self, req: Request, resp: Response, skill_id: str) -> None:
        """The new version."""
        await self._skills.get(owner_of(req), skill_id)
        async with self._uploaded(req) as (files, fields):
            given = fields.text("default").lower()
            if given not in _SWITCH:
                raise InvalidField("default", f"{given[:64]!a} is neither true nor false")
            version = await self._skills.add_version(owner_of(req), skill_id, files, default=_SWITCH[given])
        _answer_version(req, resp, version)

    async def on_get(self, req: Request, resp: Response, skill_id: str) -> None:
        """A page of versions, oldest first unless `order` is `desc`."""
        limit, order, after = _listing(req)
        behind = await self._number(req, skill_id, after) if after else None
        versions, has_more = await self._skills.versions(
            owner_of(req), skill_id, after=behind, limit=limit, order=order
        )
        ids = [version_id(skill_id, version.number) for version in versions]
        if wants_anthropic(req):
            shown = [schemas.messages_version_of(version) for version in versions]
            answer_json(resp, schemas.MessagesSkillVersionList("list", shown, *_ends(ids, has_more)))
        else:
            listed = [schemas.version_of(version) for version in versions]
            answer_json(resp, schemas.SkillVersionList("list", listed, *_ends(ids, has_more)))


class VersionResource(_Resource):
    """GET and DELETE of one version."""

    async def on_get(self, req: Request, resp: Response, skill_id: str, version: str) -> None:
        """The version."""
        row = await self._version(req, skill_id, version)
        _answer_version(req, resp, row)

    async def on_delete(self, req: Request, resp: Response, skill_id: str, version: str) -> None:
        """Delete the version; the last one with its skill."""
        number_ = await self._number(req, skill_id, version)
        await self._skills.delete_version(owner_of(req), skill_id, number_)
        id_ = version_id(skill_id, number_)
        if wants_anthropic(req):
            answer_json(resp, schemas.MessagesDeletedSkillVersion(id_, "skill_version_deleted"))
        else:
            answer_json(resp, schemas.DeletedSkillVersion(id_, "skill.version.deleted", str(number_), True))


class VersionContentResource(_Resource):
    """GET and HEAD of the zip of a version."""

    async def on_get(self, req: Request, resp: Response, skill_id: str, version: str) -> None:
        """The zip."""
        await self._send(req, resp, await self._version(req, skill_id, version))

    on_head = on_get


class _Gathered:
    """The parts of an upload."""

    def __init__(self) -> None:
        self.fields = Fields()
        self._files: list[tuple[Part, bytearray]] = []

    def take(self, part: Part, data: bytes) -> None:
        """Add data of a part. Raises `MalformedBody`."""
        if part.name in _PARTS:
            if not part.filename:
                raise MalformedBody(f"{part.name}: the part has no file name")
            if not self._files or self._files[-1][0] is not part:
                self._files.append((part, bytearray()))
            self._files[-1][1].extend(data)
        elif part.name in _FIELDS:
            self.fields.take(part, data)

    def _is_zip(self) -> bool:
        if len(self._files) != 1:
            return False
        [(part, data)] = self._files
        return (part.filename or "").lower().endswith(".zip") or data.startswith(ZIP_MAGIC)

    def most_inflated(self) -> int:
        """Bytes that a zip may take beside those of the body."""
        return min(MAX_NBYTES, len(self._files[0][1]) * _MOST_INFLATION) if self._is_zip() else 0

    def checked(self) -> SkillFiles:
        """The skill. Raises `BadSkill`, and `InvalidField` without files."""
        if not self._files:
            raise InvalidField("files", "is required, a zip or the files of a skill")
        if self._is_zip():
            return from_zip(bytes(self._files[0][1]))
        return from_parts((part.filename or "", bytes(data)) for part, data in self._files)


def _listing(req: Request) -> tuple[int, str, str]:
    """(limit, order, id behind which the page begins)."""
    after = req.get_param("after") or req.get_param("page") or ""
    return number(req, "limit", 1, MOST_LISTED, MOST_LISTED), word(req, "order", ORDERS, "asc"), after


def _ends(ids: list[str], has_more: bool) -> tuple[bool, str | None, str | None, str | None]:
    """(has_more, next_page, first_id, last_id) of a page."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return has_more, last if has_more else None, first, last


def _answer_skill(req: Request, resp: Response, skill: Skill) -> None:
    answer_json(resp, schemas.messages_skill_of(skill) if wants_anthropic(req) else schemas.skill_of(skill))


def _answer_version(req: Request, resp: Response, version: Version) -> None:
    shown = schemas.messages_version_of if wants_anthropic(req) else schemas.version_of
    answer_json(resp, shown(version))
