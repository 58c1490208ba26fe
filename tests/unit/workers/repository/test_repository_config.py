"""config.pbtxt and config.yaml: what is read, and what every mistake is told as."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.catalog.model_config import (
    Control,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    SequenceBatching,
    TensorConfig,
    VersionPolicy,
    Warmup,
    WarmupInput,
)
from workers.repository import configuration, entries
from workers.repository.layout import ModelRefused

IN = 'input { name: "A" data_type: TYPE_FP32 dims: [2, -1] }\n'
OUT = 'output { name: "B" data_type: TYPE_FP32 dims: 2 }\n'


def converted(text: str) -> ModelConfig:
    """The configuration that a text is for the model `m`."""
    return configuration.convert(configuration.parse_text("config.pbtxt", text.encode()), "m")


def control(body: str, name: str = "C") -> str:
    return f'sequence_batching {{ control_input {{ name: "{name}" control {{ {body} }} }} }}'


def test_every_part_of_a_configuration_is_read() -> None:
    text = """
    name: "m" platform: "pytorch_libtorch" max_batch_size: 8  # a comment
    input [ { name: "A" data_type: TYPE_BF16 dims: [3, 4, 5] format: FORMAT_NCHW reshape { shape: [60] } },
            { name: "S" data_type: TYPE_STRING dims: 1 optional: true } ]
    output < name: "B", data_type: TYPE_UINT64; dims: [-1] label_filename: 'lab' 'els.txt' >
    version_policy: { specific { versions: [3, 1] } }
    instance_group [ { count: 2 kind: KIND_GPU gpus: [0, 2] }, { kind: KIND_CPU } ]
    dynamic_batching { preferred_batch_size: [4, 0x2] max_queue_delay_microseconds: 500 preserve_ordering: true }
    metric_tags { key: "team" value: "a" } parameters { key: "p" value { string_value: "v" } }
    optimization { priority: PRIORITY_MAX }
    default_model_filename: "net.pt"
    model_transaction_policy { decoupled: true }
    model_warmup { name: "w" batch_size: 2 count: 3
      inputs { key: "A" value { data_type: TYPE_BF16 dims: [3, 4, 5] random_data: true } }
      inputs { key: "S" value { data_type: TYPE_STRING dims: 1 input_data_file: "s.bin" } } }
    """
    assert converted(text) == ModelConfig(
        "m",
        platform="pytorch_libtorch",
        backend="torchscript",
        max_batch_size=8,
        inputs=(
            TensorConfig("A", "BF16", (3, 4, 5), format="NCHW", reshape=(60,)),
            TensorConfig("S", "BYTES", (1,), optional=True),
        ),
        outputs=(TensorConfig("B", "UINT64", (-1,), label_filename="labels.txt"),),
        version_policy=VersionPolicy("specific", specific=(3, 1)),
        instance_groups=(InstanceGroup("", 2, "KIND_GPU", (0, 2)), InstanceGroup("", 1, "KIND_CPU")),
        default_model_filename="net.pt",
        dynamic_batching=DynamicBatching((2, 4), 500, True),
        decoupled=True,
        metric_tags={"team": "a"},
        parameters={"p": "v"},
        warmups=(
            Warmup(
                "w",
                {
                    "A": WarmupInput("BF16", (3, 4, 5), "random"),
                    "S": WarmupInput("BYTES", (1,), "file", "s.bin"),
                },
                2,
                3,
            ),
        ),
    )


def test_sequence_batching_is_read() -> None:
    text = """
    sequence_batching { max_sequence_idle_microseconds: 5
      control_input [ { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } },
                      { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [-1, 2] } },
                      { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } },
                      { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } } ] }
    """
    controls = (
        Control("START", "START", "INT32", (0, 1)),
        Control("READY", "READY", "FP32", (-1, 2)),
        Control("END", "END", "BOOL", (0, 1)),
        Control("ID", "CORRID", "BYTES"),
    )
    assert converted(text).sequence_batching == SequenceBatching(5, controls)
    assert converted("sequence_batching { }").sequence_batching == SequenceBatching(1_000_000, ())


def test_yaml_says_the_same_as_text() -> None:
    yaml = b"""
    max_batch_size: 8
    input: [{name: A, data_type: TYPE_FP32, dims: [2, -1]}]
    output:
      - name: B
        data_type: TYPE_FP32
        dims: [2]
    version_policy: {all: {}}
    dynamic_batching: {}
    """
    text = f"max_batch_size: 8 {IN} {OUT} version_policy {{ all {{ }} }} dynamic_batching {{ }}"
    assert configuration.convert(configuration.parse_yaml("config.yaml", yaml), "m") == converted(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('max_batch_size: 8\ninput { name: "a" data_typ: 1 }', "config.pbtxt:2:19: "),
        ("max_batch_size: 8 max_batch_size: 8", "config.pbtxt:1:35: "),
        ('max_batch_size: "x"', "config.pbtxt:1:17: "),
        ("max_batch_size: 99999999999", "config.pbtxt:1:17: "),
        ("input { name: \n", "config.pbtxt:"),
        ("dynamic_batching { } sequence_batching { }", "scheduling_choice"),
        ("input {" * 50_000, "config.pbtxt:1:8: "),
        ('name: "other"', "name: 'other' is not the name of the model's directory"),
        ("max_batch_size: -1", "max_batch_size: -1 is not within 0 and 1048576"),
        ('platform: "tensorrt_plan"', "platform: 'tensorrt_plan' is not supported; known are torch_export"),
        ('backend: "tensorflow"', "backend: 'tensorflow' is not supported"),
        ('platform: "onnxruntime_onnx" backend: "python"', "backend: 'python' contradicts platform"),
        ('input { name: "A" dims: 1 }', "input 'A': data_type: TYPE_INVALID is none of TYPE_BOOL"),
        ("input { data_type: TYPE_FP32 }", "input[0].name: '' is no name"),
        ('input { name: "a\\nb" data_type: TYPE_FP32 }', "input[0].name: 'a\\nb' is no name"),
        (IN + IN, "input[1].name: 'A' is given twice"),
        (
            'input { name: "A" data_type: TYPE_FP32 dims: -2 }',
            "input 'A': dims: -2 in [-2] is neither a size nor -1",
        ),
        (
            'output { name: "A" data_type: TYPE_FP32 dims: [4611686018427387904, 4] }',
            "output 'A': dims: shape [4611686018427387904, 4] is too large: the product of its dimensions is above",
        ),
        (f'input {{ name: "A" data_type: TYPE_FP32 dims: {[1] * 33} }}', "33 of them; the limit is 32"),
        (
            'input { name: "A" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: [5] } }',
            "input 'A': reshape [5] has another number of elements than dims [2, 3]",
        ),
        (
            'input { name: "A" data_type: TYPE_FP32 dims: [2, -1] reshape { shape: [2] } }',
            "another number of elements",
        ),
        (
            'input { name: "A" data_type: TYPE_FP32 dims: [2] format: FORMAT_NHWC }',
            "format NHWC needs 3 dims",
        ),
        (
            'input { name: "A" data_type: TYPE_FP32 is_shape_tensor: true }',
            "input 'A': is_shape_tensor: not supported",
        ),
        ("version_policy { specific { } }", "version_policy.specific.versions"),
        ("version_policy { specific { versions: -1 } }", "version_policy.specific.versions: [-1]"),
        ("version_policy { latest { } }", "version_policy.latest.num_versions: 0 serves nothing"),
        ("instance_group { count: -1 }", "instance_group[0].count: -1"),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance_group[0].gpus: [0] does not go with KIND_CPU",
        ),
        ("instance_group { gpus: -3 }", "instance_group[0].gpus: [-3]"),
        ("dynamic_batching { }", "dynamic_batching: needs max_batch_size"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }",
            "preferred_batch_size: 5 is not within 1",
        ),
        (
            "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 60000001 }",
            "max_queue_delay_microseconds: 60000001 is above 60000000",
        ),
        ("sequence_batching { oldest { } }", "sequence_batching.oldest: not supported"),
        (
            "sequence_batching { iterative_sequence: true }",
            "sequence_batching.iterative_sequence: not supported",
        ),
        (control("kind: CONTROL_SEQUENCE_START"), "control_input 'C': START needs one of int32_false_true"),
        (control("int32_false_true: [1]"), "with two values"),
        (control("int32_false_true: [0, 1] fp32_false_true: [0, 1]"), "START needs one of"),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"), "CORRID needs data_type"),
        (
            IN + control("int32_false_true: [0, 1]", "A"),
            "control_input 'A': there is another input of that name",
        ),
        ('sequence_batching { control_input { name: "C" } }', "needs a name and one control, got 0"),
        ("ensemble_scheduling { step { } }", "ensemble_scheduling: not supported"),
        ("batch_input { }", "batch_input: not supported"),
        ('cc_model_filenames { key: "7.5" value: "x" }', "cc_model_filenames: not supported"),
        ("model_warmup { batch_size: 2 }", "model_warmup[0].batch_size: 2 is above max_batch_size 0"),
        ("model_warmup { count: 1001 }", "model_warmup[0].count: 1001 is above 1000"),
        (
            'model_warmup { inputs { key: "A" value { data_type: TYPE_FP32 dims: -1 zero_data: true } } }',
            "model_warmup[0].inputs 'A': dims [-1] must all have a size",
        ),
        ('model_warmup { inputs { key: "A" value { data_type: TYPE_FP32 } } }', "give one of zero_data"),
    ],
)
def test_every_mistake_is_told_with_its_place_value_and_limit(text: str, said: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        converted(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"input: [{name: A, data_typ: 1}]", 'config.yaml: .*no field named "data_typ"'),
        (b"max_batch_size: [", "config.yaml: .*line 2, column 1"),
        (b"- 1", "config.yaml: expected a map of fields"),
        (b"max_batch_size: many", "config.yaml: Failed to parse max_batch_size"),
        (b"a: " + b"[" * 900_000, "nested too deeply"),
        (b"- " * 500_000 + b"a", "nested too deeply"),
        (b"a: &a {b: *a}", "more than 100000 values"),
        (b"a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\n"
         b"d: &d [*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\n"
         b"f: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]", "more than 100000 values"),
    ],
)  # fmt: skip
def test_yaml_mistakes_name_the_file(raw: bytes, said: str) -> None:
    with pytest.raises(ModelRefused, match=said):
        configuration.convert(configuration.parse_yaml("config.yaml", raw), "m")


def test_text_that_is_no_utf_8_is_told_with_line_and_column() -> None:
    with pytest.raises(ModelRefused, match=r"config\.pbtxt:3:3: no UTF-8"):
        configuration.parse_text("config.pbtxt", b"\n\n# \xff")


def test_labels_are_the_lines_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(b"ant\r\n\n ibis \ndog")
    assert entries.read_labels(path) == ("ant", "", "ibis", "dog")
    path.write_bytes(b"ant\n")
    assert entries.read_labels(path) == ("ant",)
    path.write_bytes(b"")
    assert entries.read_labels(path) == ()
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(ModelRefused, match=r"labels\.txt:2: no UTF-8"):
        entries.read_labels(path)
    path.write_bytes(b"\n" * 100_001)
    with pytest.raises(ModelRefused, match="the limit is 100000"):
        entries.read_labels(path)
