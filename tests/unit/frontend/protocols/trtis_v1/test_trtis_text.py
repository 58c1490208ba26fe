"""The text form of the TRTIS messages: every variant of its grammar in, one line of ASCII out."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from frontend.protocols.trtis_v1.requests import MOST_MARKS, many_lines, one_line, read_request_header
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb

PLAIN = 'batch_size: 1 input { name: "A" dims: 4 dims: 2 } output { name: "SUM" cls { count: 3 } } id: 7'


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace("dims: 4 dims: 2", "dims: [4, 2]"),
        PLAIN.replace("input {", "input: {"),
        PLAIN.replace("cls { count: 3 }", "cls < count: 3 >"),
        PLAIN.replace(" input", ", input").replace(" output", "; output"),
        PLAIN.replace('"A"', "'A'"),
        PLAIN.replace('"SUM"', '"S" "UM"'),
        PLAIN.replace('"SUM"', r'"S\125M"'),
        PLAIN.replace("id: 7", "id: 0x7"),
        PLAIN.replace("id: 7", "id: 07"),
        PLAIN + " # the end",
    ],
)
def test_every_form_of_the_grammar_means_the_same(text: str) -> None:
    assert read_request_header(text) == text_format.Parse(PLAIN, pb.InferRequestHeader())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "NV-InferRequest is missing"),
        ("batch_size: 1 batch_size: 2", "1:"),
        ("batch_size: -1", "1:"),
        ("byte_size: 4", "byte_size"),
        ("flags: FLAG_SEQUENCE_START", "1:"),
        ("batch_size: 1 input {", "1:"),
        ("batch_size: 99999999999999999999", "1:"),
        ('input { name: "\xff\xfe" }', "UTF-8"),
        ("\x00", "1:"),
        ("input { " * 5000, "1:"),
    ],
)
def test_a_header_that_cannot_be_read_is_told_with_its_place(text: str | None, told: str) -> None:
    with pytest.raises(InvalidInput, match="NV-InferRequest") as caught:
        read_request_header(text)
    assert told in caught.value.message


@pytest.mark.parametrize("piece", ["input{} ", "dims:1 ", 'name:"" ""', "1,", "cls<count:1>;"])
def test_a_header_of_too_many_fields_is_refused_before_it_is_parsed(
    piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_format, "Parse", None)
    with pytest.raises(InvalidInput, match=f"more than {MOST_MARKS} of the marks"):
        read_request_header(piece * (MOST_MARKS + 1))


def test_a_long_header_of_few_fields_is_read() -> None:
    sent = PLAIN.replace('"A"', f'"{"A" * 200_000}"')
    assert len(read_request_header(sent).input[0].name) == 200_000


def test_names_that_are_not_ascii_come_in_as_utf8_and_leave_as_escapes() -> None:
    sent = 'batch_size: 1 input { name: "入力" }'.encode().decode("latin-1")
    header = read_request_header(sent)
    assert header.input[0].name == "入力"
    line = one_line(pb.InferResponseHeader(model_name="モデル"))
    assert line.isascii() and "\n" not in line
    assert text_format.Parse(line, pb.InferResponseHeader()).model_name == "モデル"


def test_class_values_come_back_to_the_same_float() -> None:
    header = pb.InferResponseHeader(model_name="m")
    values = [0.1, 1e-30, 3.4028234e38, 16777217.0, -7.25]
    for value in values:
        header.output.add(name="o").batch_classes.add().cls.add(idx=1, value=value)
    assert text_format.Parse(many_lines(header), pb.InferResponseHeader()) == header
    assert text_format.Parse(one_line(header), pb.InferResponseHeader()) == header


def test_maps_are_printed_in_sorted_order() -> None:
    status = pb.ServerStatus()
    for name in ("zebra", "ape", "mole"):
        status.model_status[name].version_status[3].ready_state = pb.MODEL_READY
        status.model_status[name].version_status[1].ready_state = pb.MODEL_READY
    text = many_lines(status).decode()
    assert text.index("ape") < text.index("mole") < text.index("zebra")
    assert text.index("key: 1") < text.index("key: 3")
