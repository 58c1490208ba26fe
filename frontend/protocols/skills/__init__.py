"""Skills of clients with their versions, in the forms of OpenAI and Anthropic.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from falcon.asgi import Request

from frontend.generation.protocol import BOTH_FORMS, TextProtocol, stored
from frontend.protocols.skills import schemas
from frontend.protocols.skills.resources import (
    SOURCES,
    ZIP,
    SkillContentResource,
    SkillResource,
    SkillsResource,
    VersionContentResource,
    VersionResource,
    VersionsResource,
    wants_anthropic,
)
from frontend.route_rows import Parameter

PROTOCOL = "skills"
_ROOT = "/v1/skills"
_ONE = f"{_ROOT}/{{skill_id}}"
_VERSIONS = f"{_ONE}/versions"
_VERSION = f"{_VERSIONS}/{{version}}"
_LISTING = (
    Parameter("after", "query", "Id of the last entry of the page before."),
    Parameter("page", "query", "`after`, by the name that Anthropic gives it."),
    Parameter(
        "limit",
        "query",
        "Most entries of a page.",
        {"type": "integer", "minimum": 1, "maximum": schemas.MOST_LISTED},
    ),
    Parameter("order", "query", "Oldest or newest first.", {"type": "string", "enum": ["asc", "desc"]}),
)
_SOURCE = Parameter(
    "source",
    "query",
    "Where skills come from; switches to the form of Anthropic.",
    {"type": "string", "enum": list(SOURCES)},
)
_UPLOAD: dict[str, Any] = {
    "statuses": (408, 413, 415, 504, 507),
    "request_media": ("multipart/form-data",),
}
_ZIP: dict[str, Any] = {"media": (ZIP,)}
_SKILL_FORMS = (schemas.SkillObject, schemas.MessagesSkill)
_VERSION_FORMS = (schemas.SkillVersion, schemas.MessagesSkillVersion)
_route = partial(stored, tag="skills", faults=BOTH_FORMS)

ROUTES = (
    _route(
        "post", _ROOT, SkillsResource, "Store a skill.", _SKILL_FORMS, body=schemas.SkillUpload, **_UPLOAD
    ),
    _route(
        "get",
        _ROOT,
        SkillsResource,
        "The skills of the caller, a page at a time.",
        (schemas.SkillList, schemas.MessagesSkillList),
        parameters=(*_LISTING, _SOURCE),
    ),
    _route("get", _ONE, SkillResource, "A skill.", _SKILL_FORMS),
    _route(
        "post",
        _ONE,
        SkillResource,
        "Choose the default version of a skill.",
        _SKILL_FORMS,
        body=schemas.SkillChange,
        request_media=("application/json",),
        statuses=(408, 413, 415, 504),
        example={"default_version": "2"},
    ),
    _route(
        "delete",
        _ONE,
        SkillResource,
        "Delete a skill with its versions.",
        (schemas.DeletedSkill, schemas.MessagesDeletedSkill),
    ),
    _route("get", f"{_ONE}/content", SkillContentResource, "The zip of the default version.", None, **_ZIP),
    _route(
        "post",
        _VERSIONS,
        VersionsResource,
        "Store a new version of a skill.",
        _VERSION_FORMS,
        body=schemas.VersionUpload,
        **_UPLOAD,
    ),
    _route(
        "get",
        _VERSIONS,
        VersionsResource,
        "The versions of a skill, a page at a time.",
        (schemas.SkillVersionList, schemas.MessagesSkillVersionList),
        parameters=_LISTING,
    ),
    _route("get", _VERSION, VersionResource, "A version of a skill.", _VERSION_FORMS),
    _route(
        "delete",
        _VERSION,
        VersionResource,
        "Delete a version; the last one with its skill.",
        (schemas.DeletedSkillVersion, schemas.MessagesDeletedSkillVersion),
    ),
    _route("get", f"{_VERSION}/content", VersionContentResource, "The zip of a version.", None, **_ZIP),
)


class SkillsProtocol(TextProtocol):
    """Routes of skills. Errors have the form of Anthropic where answers have that form."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES)

    def is_anthropic(self, req: Request | None) -> bool:
        """Whether answers have that form."""
        return wants_anthropic(req)
