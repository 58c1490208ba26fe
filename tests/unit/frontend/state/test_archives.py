"""Files of skills: what is taken, and zips and paths that would harm."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from typing import Any

import pytest

from frontend.state import archives
from frontend.state.archives import GUIDE, BadSkill, from_parts, from_zip, packed, unpacked

GOOD = b"---\nname: Plot\ndescription: Draws curves.\n---\n# How\n"


def _zip(*members: tuple[str | zipfile.ZipInfo, bytes], way: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members:
            archive.writestr(name, data, way)
    return target.getvalue()


def _special(name: str, kind: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o777) << 16
    return info


def test_a_zip_and_single_files_are_the_same_skill_and_come_back_from_its_own_zip() -> None:
    members = [(f"plot/{GUIDE}", GOOD), ("plot/src/a.py", b"print(1)")]
    skill = from_zip(_zip(("plot/", b""), *members))
    assert skill == from_parts(members)
    assert (skill.name, skill.description, skill.directory) == ("Plot", "Draws curves.", "plot")
    assert skill.files == {GUIDE: GOOD, "src/a.py": b"print(1)"}
    assert unpacked(packed(skill)) == skill.files
    bare = from_parts([(GUIDE, GOOD), ("lib/b.py", b"")])
    assert bare.directory == "" and unpacked(packed(bare)) == bare.files


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/etc/passwd", "not a plain relative path"),
        ("plot/../../x", "not a plain relative path"),
        ("plot//x", "not a plain relative path"),
        ("plot/./x", "not a plain relative path"),
        ("plot\\x", "not a plain relative path"),
        ("C:/x", "not a plain relative path"),
        ("plot/a\nb", "control characters"),
        ("plot/" + "x" * 256, "more than 255 bytes"),
        ("plot/" + "x/" * 300 + "y", "more than 512 bytes"),
        ("plot/" + "x/" * 20 + "y", "more than 16 folders"),
        ("plot/skill.md", "one path where case does not count"),
        ("plot/STRASSE", "one path where case does not count"),
        ("plot/src/a.py/b", "a folder that is a file too"),
        ("other/x", "expected one top folder"),
        ("x", "expected one top folder"),
    ],
)
def test_a_path_that_harms_is_refused(path: str, text: str) -> None:
    members = [(f"plot/{GUIDE}", GOOD), ("plot/src/a.py", b""), ("plot/straße", b""), (path, b"x")]
    with pytest.raises(BadSkill, match=text):
        from_parts(members)
    with pytest.raises(BadSkill, match=text):
        from_zip(_zip(*members))


def test_a_name_behind_a_nul_is_seen() -> None:
    body = _zip((f"plot/{GUIDE}", GOOD), ("plot/aXb", b"x")).replace(b"plot/aXb", b"plot/a\0b")
    with pytest.raises(BadSkill, match="control characters"):
        from_zip(body)


def test_a_file_without_a_name_is_refused() -> None:
    body = _zip((f"plot/{GUIDE}", GOOD), ("plot/aXb", b"x")).replace(b"plot/aXb", b"\0lot/aXb")
    with pytest.raises(BadSkill, match="a file of the zip has no name"):
        from_zip(body)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_special_files_are_refused(kind: int) -> None:
    with pytest.raises(BadSkill, match="a link or a special file"):
        from_zip(_zip((f"plot/{GUIDE}", GOOD), (_special("plot/x", kind), b"/etc/passwd")))


def test_bytes_are_counted_while_they_are_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_NBYTES", 1 << 20)
    body = _zip((f"plot/{GUIDE}", GOOD), ("plot/zeros", bytes(20 << 20)))
    assert len(body) < 1 << 20
    with pytest.raises(BadSkill, match="more than 1048576 bytes"):
        from_zip(body)
    several = [(f"plot/{number}", bytes(400_000)) for number in range(3)]
    with pytest.raises(BadSkill, match="more than 1048576 bytes"):
        from_zip(_zip((f"plot/{GUIDE}", GOOD), *several))
    with pytest.raises(BadSkill, match="more than 1048576 bytes"):
        from_parts([(f"plot/{GUIDE}", GOOD), *several])


def test_a_declared_size_that_lies_is_refused() -> None:
    body = bytearray(_zip((f"plot/{GUIDE}", GOOD), ("plot/zeros", bytes(1 << 20))))
    at = body.rfind(b"PK\x01\x02")
    struct.pack_into("<L", body, at + 24, 100)
    with pytest.raises(BadSkill, match="cannot be read"):
        from_zip(bytes(body))


def test_too_many_files_are_refused() -> None:
    files = [(f"plot/{number}", b"") for number in range(archives.MAX_FILES - 1)]
    assert len(from_parts([(f"plot/{GUIDE}", GOOD), *files]).files) == 500
    with pytest.raises(BadSkill, match="more than 500 files"):
        from_parts([(f"plot/{GUIDE}", GOOD), *files, ("plot/more", b"")])


def test_a_directory_that_takes_much_memory_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zipfile, "ZipFile", _never)
    body = b"PK\x03\x04" + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65_535, 65_535, 60 << 20, 0, 0)
    with pytest.raises(BadSkill, match="the directory of the zip has more than 1048576 bytes"):
        from_zip(body)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    with pytest.raises(BadSkill, match="the directory of the zip"):
        from_zip(locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 46, 0, 0))


def _never(*_: Any) -> None:
    raise AssertionError("the directory was read")


# A zip holds the time of its making, so an id of its bytes would differ from process to process.
@pytest.mark.parametrize(
    "body",
    [b"", b"PK\x03\x04", b"no zip at all", _zip(("a", b"x"))[:-5]],
    ids=["empty", "signature", "text", "torn"],
)
def test_what_is_no_zip_is_refused(body: bytes) -> None:
    with pytest.raises(BadSkill, match="the zip cannot be read"):
        from_zip(body)


def test_rare_ways_of_compressing_and_encrypted_members_are_refused() -> None:
    with pytest.raises(BadSkill, match="encrypted, or compressed"):
        from_zip(_zip((f"plot/{GUIDE}", GOOD), way=zipfile.ZIP_LZMA))
    body = bytearray(_zip((f"plot/{GUIDE}", GOOD)))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        body[body.find(mark) + offset] |= 1
    with pytest.raises(BadSkill, match="encrypted, or compressed"):
        from_zip(bytes(body))


@pytest.mark.parametrize(
    ("guide", "text"),
    [
        (b"", "does not begin with a line of ---"),
        (b"# Plot\n", "does not begin with a line of ---"),
        (b"---\nname: x\n", "no line of --- ends the block"),
        (b"---\n---\n", "has no fields"),
        (b"---\n- a\n---\n", "has no fields"),
        (b"---\nname: x\n---\n", "description is required"),
        (b"---\nname: ' '\ndescription: x\n---\n", "name is required"),
        (b"---\nname: 1\ndescription: x\n---\n", "name is required"),
        (b"---\nname: [x\n---\n", "is no YAML"),
        (b"---\nname: !!python/object/apply:os.system [ls]\ndescription: x\n---\n", "is no YAML"),
        (b"---\na: &a x\nname: *a\ndescription: x\n---\n", "may not have aliases"),
        (b"---\nname: x\ndescription: " + b"[" * 10_000 + b"\n---\n", "more than 16 levels"),
        (b"---\nname: " + b"9" * 10_000 + b"\ndescription: x\n---\n", "YAML|name is required"),
        (
            b"---\nname: " + b"x" * 129 + b"\ndescription: x\n---\n",
            "name has 129 characters, the limit is 128",
        ),
        (b"---\nname: x\ndescription: " + b"x" * 20_000 + b"\n---\n", "within 16384 bytes"),
        (b"---\nname: \xff\n---\n", "is not UTF-8"),
    ],
)
def test_a_guide_without_its_front_is_refused(guide: bytes, text: str) -> None:
    with pytest.raises(BadSkill, match=text):
        from_parts([(f"plot/{GUIDE}", guide)])


def test_a_skill_without_a_guide_is_refused() -> None:
    for members in ([], [("plot/a", b"")], [(f"plot/deep/{GUIDE}", GOOD)]):
        with pytest.raises(BadSkill):
            from_parts(members)


def test_a_long_guide_with_a_mark_of_byte_order_is_read() -> None:
    guide = b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + "ä".encode() * 100_000
    assert from_parts([(GUIDE, guide)]).name == "Plot"
