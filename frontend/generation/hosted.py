"""What a request asks of tools that run on this server, and what the server offers.

1. `Offer` says what the server runs. Without an offer every tool is refused with the flag that would turn the tool on.
2. `Hosted` collects while a request is read: features of its tools, files of its messages, skills.
3. `Hosted.plan` makes the `AgentPlan` of the request, or None where nothing of the request runs here.

Permissions are auto, ask and deny. The strictest of server and request holds.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from frontend.generation.errors import InvalidField
from frontend.generation.searching import SearchOptions, options_of
from ipc.wire.tools import RemoteTool

CODE, SHELL, SEARCH, FILES = "code", "shell", "search", "files"
"""Features: code execution, a shell, web search, reading of files."""
NEEDS = {CODE: "code execution", SHELL: "a shell", SEARCH: "web search"}
FLAGS = {CODE: "--enable-code-execution", SHELL: "--enable-shell", SEARCH: "--enable-search"}
REMOTE = (
    "MCP servers are named by the operator (agent.mcp_config), and their tools join requests by themselves"
)
PERMISSIONS = ("auto", "ask", "deny")
"""From the laxest to the strictest."""
MAX_REQUESTED = 64
MAX_INPUTS = 64
MAX_URLS = 8
"""Files of a request that the server fetches."""
MAX_URL = 4096
MAX_SKILLS = 16
MAX_SESSION = 256
MAX_ID = 256
MAX_NAME = 255
MAX_DESCRIPTION = 1024


@dataclass(frozen=True, slots=True)
class Offer:
    """What this server runs for requests, under which permission and for how many rounds; times are in seconds.

    `takes_files`: files of messages are inputs of a run, each with at most `max_file_nbytes`. `has_network`: tools
    reach more than themselves. `dispatches`: functions of clients run at the operator's dispatch URL.
    `fetches_files`: messages may name files by URL. `remote` are the tools of MCP servers that are connected now.
    """

    features: frozenset[str] = frozenset()
    takes_files: bool = False
    permission: str = "auto"
    max_rounds: int = 256
    code_timeout_s: float = 60.0
    shell_timeout_s: float = 600.0
    has_network: bool = False
    max_file_nbytes: int = 64 << 20
    dispatches: bool = False
    fetches_files: bool = False
    remote: Mapping[str, RemoteTool] = field(default_factory=dict)

    @property
    def takes_functions(self) -> bool:
        """Whether requests with functions of the client become runs."""
        return self.dispatches or bool(self.remote)


NOTHING = Offer()


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that a message brings: the id of a stored file, a URL, or a name and bytes. `field` is its path.

    A file that is not `required` may have expired. The name of a file by URL may be empty.
    """

    field: str
    file_id: str = ""
    url: str = ""
    name: str = ""
    data: bytes = b""
    required: bool = True


@dataclass(frozen=True, slots=True)
class SkillUse:
    """A skill of the request; `version` None is the default one."""

    field: str
    skill_id: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """How a request runs with tools of this server.

    `requested` are the files that the client expects, each with `name` and, where given, `format` and `description`.
    `container` is the container of the files that are made. `session_id` is empty where the request names none.
    `search` is how the request searches the web; with `tells_sources` events have the pages that searches found.
    `dispatched` names the functions of the client that run at the dispatch URL.
    """

    offer: Offer
    features: frozenset[str]
    permission: str
    max_rounds: int
    session_id: str = ""
    requested: tuple[dict[str, Any], ...] = ()
    inputs: tuple[InputFile, ...] = ()
    skills: tuple[SkillUse, ...] = ()
    container: str = ""
    search: SearchOptions | None = None
    tells_sources: bool = False
    dispatched: tuple[str, ...] = ()


def refused(feature: str, what: str, where: str) -> InvalidField:
    """The error of `what`, which needs a feature that is off."""
    return InvalidField(
        where,
        f"{what} needs {NEEDS[feature]}, which is not offered by this server: "
        f"start the server with {FLAGS[feature]} or --agent",
    )


@dataclass(slots=True)
class Hosted:
    """What a request asks for, while the request is read.

    `takes_urls`: files may have a URL in this protocol. `tells_sources` is as in `AgentPlan`.
    """

    offer: Offer = NOTHING
    takes_urls: bool = True
    tells_sources: bool = False
    search: SearchOptions | None = None
    features: set[str] = field(default_factory=set)
    inputs: list[InputFile] = field(default_factory=list)
    skills: list[SkillUse] = field(default_factory=list)

    def copied(self) -> Hosted:
        """The same, which more can be added to."""
        return replace(self, features=set(self.features), inputs=list(self.inputs), skills=list(self.skills))

    def use(self, feature: str, what: str, where: str) -> None:
        """The request asks for a feature. Raises `InvalidField` where the feature is off."""
        if feature not in self.offer.features:
            raise refused(feature, what, where)
        self.features.add(feature)

    def use_code(self, tool: Mapping[str, Any], where: str) -> None:
        """The tool `code_interpreter`. Raises `InvalidField` for a container of its own."""
        self.use(CODE, "'code_interpreter'", f"{where}.type")
        container = tool.get("container")
        if container is None:
            return
        place = f"{where}.container"
        if not isinstance(container, dict) or container.get("type") != "auto":
            raise InvalidField(place, 'expected {"type": "auto"}: containers belong to responses')
        for name in ("file_ids", "memory_limit"):
            if container.get(name):
                raise InvalidField(f"{place}.{name}", "is not offered: send files with the messages")

    def use_search(self, given: Any, what: str, where: str, field: str) -> None:
        """A web search with the options of the object `given`, whose path is `where`. Raises `InvalidField`.

        `field` is the path of what asks for the search. A request without access to the web has no search.
        """
        options = options_of(given, where)
        if options is None:
            return
        self.use(SEARCH, what, field)
        if self.search is not None:
            raise InvalidField(field, "web search is asked for twice")
        self.search = options

    def use_shell(self, tool: Mapping[str, Any], where: str) -> None:
        """The tool `shell` with its environment: skills, files, a network that may only be tighter."""
        self.use(SHELL, "'shell'", f"{where}.type")
        environment, place = tool.get("environment"), f"{where}.environment"
        if environment is None:
            return
        kind = environment.get("type") if isinstance(environment, dict) else None
        if kind not in ("container_auto", None) or not isinstance(environment, dict):
            raise InvalidField(
                f"{place}.type", "expected 'container_auto': other environments are not offered"
            )
        network = environment.get("network_policy")
        if network is not None and (not isinstance(network, dict) or network.get("type") != "disabled"):
            raise InvalidField(
                f"{place}.network_policy", "a request may only take the network away: 'disabled'"
            )
        if network is not None and self.offer.has_network:
            text = "'disabled' is not offered: tools of this server reach the network (agent.sandbox_network)"
            raise InvalidField(f"{place}.network_policy", text)
        for index, file_id in enumerate(_list(environment.get("file_ids"), f"{place}.file_ids")):
            self.add_file({"file_id": file_id}, f"{place}.file_ids[{index}]")
        for index, skill in enumerate(_list(environment.get("skills"), f"{place}.skills")):
            at = f"{place}.skills[{index}]"
            if not isinstance(skill, dict) or skill.get("type") != "skill_reference":
                raise InvalidField(f"{at}.type", "expected 'skill_reference': other skills are not offered")
            self.add_skill(skill.get("skill_id"), skill.get("version"), at)

    def add_file(self, part: Mapping[str, Any], where: str, *, required: bool = True) -> None:
        """A part with `file_id`, with `filename` and `file_data`, or with `file_url`. Raises `InvalidField`."""
        self._require_room(where)
        file_id, data = part.get("file_id"), part.get("file_data")
        if (url := part.get("file_url")) is not None:
            if not self.takes_urls:
                raise InvalidField(f"{where}.file_url", "is taken by POST /v1/responses only: send file_data")
            if file_id is not None or data is not None:
                raise InvalidField(where, "expected only one of file_url, file_id and file_data")
            names = f"{where}.filename", f"{where}.file_url"
            self.add_url(url, part.get("filename"), *names, required=required)
            return
        if (file_id is None) == (data is None):
            raise InvalidField(where, "expected either file_id, or filename and file_data")
        if file_id is not None:
            self.inputs.append(
                InputFile(f"{where}.file_id", _text(file_id, f"{where}.file_id", MAX_ID), required=required)
            )
            return
        names = f"{where}.filename", f"{where}.file_data"
        self.add_data(part.get("filename"), data, *names, required=required)

    def add_data(self, name: Any, data: Any, name_at: str, data_at: str, *, required: bool = True) -> None:
        """A file as base64, with the paths of its name and of its data. Raises `InvalidField`."""
        self._require_room(data_at)
        text = _text(name, name_at, MAX_NAME)
        content = decoded(data, data_at, self.offer.max_file_nbytes)
        self.inputs.append(InputFile(data_at, name=text, data=content, required=required))

    def add_url(self, url: Any, name: Any, name_at: str, where: str, *, required: bool = True) -> None:
        """A file that the server fetches; `where` is the path of its URL. Raises `InvalidField`."""
        self._require_room(where)
        if not self.offer.fetches_files:
            text = "this server fetches no files: send the file, or start the server with --fetch-file-urls"
            raise InvalidField(where, text)
        if sum(bool(each.url) for each in self.inputs) == MAX_URLS:
            raise InvalidField(where, f"more than {MAX_URLS} files by URL")
        given = "" if name is None else _text(name, name_at, MAX_NAME)
        self.inputs.append(InputFile(where, url=_text(url, where, MAX_URL), name=given, required=required))

    def take(self, part: Any, where: str, *, required: bool) -> bool:
        """Whether a part of a message is a file that runs may have, which becomes an input. Raises `InvalidField`."""
        file = _file_in(part, where) if self.offer.takes_files else None
        if file is None:
            return False
        self.add_file(*file, required=required)
        return True

    def add_text(self, name: Any, text: str, name_at: str, where: str) -> None:
        """A text as a file, with the paths of its name and of the text. Raises `InvalidField`."""
        self._require_room(where)
        data = text.encode()
        _check_size(len(data), where, self.offer.max_file_nbytes)
        self.inputs.append(InputFile(where, name=_text(name, name_at, MAX_NAME), data=data))

    def _require_room(self, where: str) -> None:
        if len(self.inputs) == MAX_INPUTS:
            raise InvalidField(where, f"more than {MAX_INPUTS} files")

    def add_skill(self, skill_id: Any, version: Any, where: str) -> None:
        """A skill by reference; `version` is absent, `latest`, or a number, also as text. Raises `InvalidField`."""
        if len(self.skills) == MAX_SKILLS:
            raise InvalidField(where, f"more than {MAX_SKILLS} skills")
        number = None if version in (None, "latest") else _version(version, f"{where}.version")
        self.skills.append(
            SkillUse(f"{where}.skill_id", _text(skill_id, f"{where}.skill_id", MAX_ID), number)
        )

    def plan(
        self,
        *,
        permission: str | None,
        max_rounds: int | None,
        session_id: str | None,
        requested: list[Any] | None,
        streams: bool,
        functions: Sequence[str],
    ) -> AgentPlan | None:
        """The plan of the request; None where nothing of the request runs here. Raises `InvalidField`.

        The arguments are fields of the request, and the names of its functions. A permission of `ask` needs a stream.
        """
        if max_rounds is not None and not (0 <= max_rounds < 1 << 31):
            raise InvalidField("max_tool_rounds", "expected a whole number from 0")
        rounds = self.offer.max_rounds if max_rounds is None else max_rounds
        if self.inputs:
            self.features.add(FILES)
        dispatched = tuple(functions) if self.offer.dispatches and rounds else ()
        joins = bool(functions) and rounds > 0 and self.offer.takes_functions
        runs = bool(self.features or max_rounds or joins)
        if max_rounds and not (self.offer.features or self.inputs or self.offer.takes_functions):
            text = "this server runs no tools: use 0, and run the calls in the client, or start the server with --agent"
            raise InvalidField("max_tool_rounds", text)
        files = _requested(requested)
        if files and not runs:
            raise InvalidField("files", "no tool that could write files is on in this request")
        holds = max(permission or "auto", self.offer.permission, key=PERMISSIONS.index)
        if holds == "ask" and (runs or permission == "ask") and not streams:
            raise InvalidField("agent_permission", "'ask' needs stream: true")
        if not runs:
            return None
        if session_id is not None and not 1 <= len(session_id) <= MAX_SESSION:
            raise InvalidField(
                "session_id", f"{len(session_id)} characters given, 1 to {MAX_SESSION} are needed"
            )
        return AgentPlan(
            self.offer,
            frozenset(self.features),
            holds,
            rounds,
            session_id or "",
            tuple(files),
            tuple(self.inputs),
            tuple(self.skills),
            search=self.search,
            tells_sources=self.tells_sources,
            dispatched=dispatched,
        )


def in_container(plan: AgentPlan | None, container: str) -> AgentPlan | None:
    """The plan with the container of the files that are made."""
    return None if plan is None else replace(plan, container=container)


def decoded(data: Any, where: str, most: int) -> bytes:
    """The bytes of base64, or of a data URL, at most `most`. Raises `InvalidField`."""
    text = _text(data, where, None)
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidField(where, "expected base64 in the data URL")
    _check_size(len(text) // 4 * 3 - text[-2:].count("="), where, most)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(where, "expected base64, or a data URL with base64") from None


def _check_size(nbytes: int, where: str, most: int) -> None:
    if nbytes > most:
        raise InvalidField(where, f"{nbytes} bytes, the limit is {most} (state.max_file_bytes)")


def _file_in(part: Any, where: str) -> tuple[dict[str, Any], str] | None:
    """The fields of a file and their path, if a part is a file."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_file":
        return part, where
    if kind != "file":
        return None
    inner = part.get("file")
    if not isinstance(inner, dict):
        raise InvalidField(f"{where}.file", "expected an object")
    return inner, f"{where}.file"


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise InvalidField(where, "expected a list")
    return value or []


def _text(value: Any, where: str, most: int | None) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(where, "expected a string that is not empty")
    if most is not None and len(value) > most:
        raise InvalidField(where, f"{len(value)} characters, the limit is {most}")
    if most is not None and "\0" in value:
        raise InvalidField(where, "holds a NUL character")
    return value


def _version(value: Any, where: str) -> int:
    number = (
        int(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
        else value
    )
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 1 << 31:
        raise InvalidField(where, "expected 'latest' or a number from 1")
    return number


def _requested(given: list[Any] | None) -> list[dict[str, Any]]:
    """The files that the client expects. Raises `InvalidField`."""
    if len(given or ()) > MAX_REQUESTED:
        raise InvalidField("files", f"{len(given or ())} given, the limit is {MAX_REQUESTED}")
    files = []
    for index, each in enumerate(given or ()):
        where = f"files[{index}]"
        if not isinstance(each, dict):
            raise InvalidField(where, "expected an object with a name")
        file = {"name": _text(each.get("name"), f"{where}.name", MAX_NAME)}
        for name, most in (("format", 64), ("description", MAX_DESCRIPTION)):
            if each.get(name) is not None:
                file[name] = _text(each[name], f"{where}.{name}", most)
        files.append(file)
    return files
