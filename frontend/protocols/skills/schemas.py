"""Bodies of the routes of skills, in the forms of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.fields import instant
from frontend.state.skills import Skill, Version

MOST_LISTED = 1_000
"""Skills or versions of a page."""
CUSTOM = "custom"
"""Where skills of clients come from, by the name that Anthropic gives it."""
_Id = Annotated[str, Meta(description="Id of the skill.")]
_VersionId = Annotated[str, Meta(description="Id of the version, `<skill>_v<number>`.")]
_Seconds = Annotated[int, Meta(description="When this was stored, in seconds since 1970.")]
_Instant = Annotated[str, Meta(description="When this was stored, in RFC 3339.")]
_Number = Annotated[str, Meta(description="Number of the version.")]
_Latest = Annotated[str, Meta(description="Number of the newest version.")]
_Name = Annotated[str, Meta(description="The name in SKILL.md.")]
_Description = Annotated[str, Meta(description="The description in SKILL.md.")]
_Title = Annotated[str, Meta(description="The name that the upload gave, else the one in SKILL.md.")]
_Deleted = Annotated[Literal[True], Meta(description="Whether this is gone.")]
_More = Annotated[bool, Meta(description="Whether there are more behind the last one.")]
_Next = Annotated[str | None, Meta(description="`page` of the next request; null at the end.")]
_First = Annotated[str | None, Meta(description="Id of the first of these.")]
_Last = Annotated[str | None, Meta(description="Id of the last of these.")]
_Form = Meta(description="Names the form of this object.")
_PARTS = (
    "A zip, or a file with its path as the file name. `file` and `files[]` are further names of the part."
)


class VersionUpload(msgspec.Struct):
    """The parts of an upload, in any order."""

    files: Annotated[list[str], Meta(description=_PARTS)]
    default: Annotated[bool | UnsetType, Meta(description="Make this version the default one.")] = UNSET


class SkillUpload(msgspec.Struct):
    """The parts of an upload, in any order."""

    files: Annotated[list[str], Meta(description=_PARTS)]
    display_name: Annotated[str | UnsetType, Meta(description="A name for people.")] = UNSET
    display_title: Annotated[str | UnsetType, Meta(description="`display_name` by an older name.")] = UNSET


class SkillChange(msgspec.Struct):
    """What becomes different about a skill."""

    default_version: Annotated[str | int, Meta(description="Number of the version, or `latest`.")]


class SkillObject(msgspec.Struct):
    """A skill."""

    id: _Id
    object: Annotated[Literal["skill"], _Form]
    created_at: _Seconds
    name: _Name
    description: _Description
    latest_version: _Latest
    default_version: Annotated[str, Meta(description="Number of the version that runs use by default.")]


class SkillList(msgspec.Struct):
    """A page of skills."""

    object: Annotated[Literal["list"], _Form]
    data: Annotated[list[SkillObject], Meta(description="The list.")]
    has_more: _More
    next_page: _Next
    first_id: _First
    last_id: _Last


class SkillVersion(msgspec.Struct):
    """A version of a skill."""

    id: _VersionId
    object: Annotated[Literal["skill.version"], _Form]
    skill_id: _Id
    created_at: _Seconds
    version: _Number
    name: _Name
    description: _Description


class SkillVersionList(msgspec.Struct):
    """A page of versions."""

    object: Annotated[Literal["list"], _Form]
    data: Annotated[list[SkillVersion], Meta(description="The list.")]
    has_more: _More
    next_page: _Next
    first_id: _First
    last_id: _Last


class DeletedSkill(msgspec.Struct):
    """A skill that is not stored any more."""

    id: _Id
    object: Annotated[Literal["skill.deleted"], _Form]
    deleted: _Deleted


class DeletedSkillVersion(msgspec.Struct):
    """A version that is not stored any more."""

    id: _VersionId
    object: Annotated[Literal["skill.version.deleted"], _Form]
    version: _Number
    deleted: _Deleted


class MessagesSkill(msgspec.Struct):
    """A skill, in the form of Anthropic."""

    id: _Id
    type: Annotated[Literal["skill"], _Form]
    created_at: _Instant
    updated_at: Annotated[str, Meta(description="When the skill was changed, in RFC 3339.")]
    display_title: _Title
    display_name: _Title
    latest_version: _Latest
    latest_version_id: Annotated[str, Meta(description="Id of the newest version.")]
    source: Annotated[Literal["custom"], Meta(description="Where the skill comes from.")]


class MessagesSkillList(msgspec.Struct):
    """A page of skills, in the form of Anthropic."""

    object: Annotated[Literal["list"], _Form]
    data: Annotated[list[MessagesSkill], Meta(description="The list.")]
    has_more: _More
    next_page: _Next
    first_id: _First
    last_id: _Last


class MessagesSkillVersion(msgspec.Struct):
    """A version of a skill, in the form of Anthropic."""

    id: _VersionId
    type: Annotated[Literal["skill_version"], _Form]
    skill_id: _Id
    created_at: _Instant
    name: _Name
    description: _Description
    version: _Number
    directory: Annotated[str, Meta(description="The folder of the upload; empty where there was none.")]


class MessagesSkillVersionList(msgspec.Struct):
    """A page of versions, in the form of Anthropic."""

    object: Annotated[Literal["list"], _Form]
    data: Annotated[list[MessagesSkillVersion], Meta(description="The list.")]
    has_more: _More
    next_page: _Next
    first_id: _First
    last_id: _Last


class MessagesDeletedSkill(msgspec.Struct):
    """A skill that is not stored any more, in the form of Anthropic."""

    id: _Id
    type: Annotated[Literal["skill_deleted"], _Form]


class MessagesDeletedSkillVersion(msgspec.Struct):
    """A version that is not stored any more, in the form of Anthropic."""

    id: _VersionId
    type: Annotated[Literal["skill_version_deleted"], _Form]


def version_id(skill_id: str, number: int) -> str:
    """The id of a version."""
    return f"{skill_id}_v{number}"


def skill_of(skill: Skill) -> SkillObject:
    """A skill in the form of OpenAI."""
    versions = (str(skill.latest), str(skill.default))
    return SkillObject(skill.id, "skill", int(skill.created), skill.name, skill.description, *versions)


def messages_skill_of(skill: Skill) -> MessagesSkill:
    """A skill in the form of Anthropic."""
    title = skill.title or skill.name
    return MessagesSkill(
        skill.id,
        "skill",
        instant(skill.created),
        instant(skill.updated),
        title,
        title,
        str(skill.latest),
        version_id(skill.id, skill.latest),
        "custom",
    )


def version_of(version: Version) -> SkillVersion:
    """A version in the form of OpenAI."""
    return SkillVersion(
        version_id(version.skill, version.number),
        "skill.version",
        version.skill,
        int(version.created),
        str(version.number),
        version.name,
        version.description,
    )


def messages_version_of(version: Version) -> MessagesSkillVersion:
    """A version in the form of Anthropic."""
    return MessagesSkillVersion(
        version_id(version.skill, version.number),
        "skill_version",
        version.skill,
        instant(version.created),
        version.name,
        version.description,
        str(version.number),
        version.directory,
    )
