"""Damaged files of image processors: the load of a chat model that sees ends with the file and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import seeing
from tests.tiny.models import build
from tests.unit.workers.adapters.test_seeing_adapter import context
from tests.unit.workers.adapters.test_vision_adapters import load
from workers import image_settings
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared.causal_files import CausalFiles
from workers.generation.pictures.family import Family
from workers.image_settings import IMAGES, PROCESSOR, DamagedFile
from workers.loading.failure import classify

ABSENT = object()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen2_5_vl", "gemma3", "smolvlm", "mistral3", "internvl", "llava_onevision", "llama4")
    return {name: seeing.save(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture
def directory(directories: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    """The directory of the family of a test, whose files are as before behind the test."""
    found = directories[request.param]
    kept = {name: (found / name).read_bytes() for name in (IMAGES, PROCESSOR)}
    yield found
    for name, content in kept.items():
        (found / name).write_bytes(content)


def family_of(directory: Path) -> Family | None:
    files = CausalFiles(context(directory))
    return files.family(files.tokenizer())


def change(directory: Path, **values: Any) -> None:
    """Other values in the file of the image processor; `ABSENT` takes one away."""
    file = directory / IMAGES
    changed = json.loads(file.read_bytes()) | values
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not ABSENT}))


def refusal(directory: Path) -> str:
    """What clients hear of the load."""
    with pytest.raises(DamagedFile) as caught:
        family_of(directory)
    failure = classify(caught.value)
    assert failure.permanent and str(directory) not in failure.message
    return failure.message


@pytest.mark.sample(8)
@pytest.mark.parametrize("directory", ["qwen2_5_vl", "llama4"], indirect=True)
@pytest.mark.parametrize("name", [IMAGES, PROCESSOR])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is no JSON (JSONDecodeError)"),
        (b'{"size": ', "is no JSON (JSONDecodeError)"),
        (b'{"\xff": 1}', "is no JSON (UnicodeDecodeError)"),
        (b"[" * 100_000, "is no JSON (RecursionError)"),
        (b"[]", "is [], an object is needed"),
        (b"null", "is None, an object is needed"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_no_object_is_named(directory: Path, name: str, content: bytes, why: str) -> None:
    (directory / name).write_bytes(content)
    assert f"{name}: {why}" in refusal(directory)


@pytest.mark.parametrize("directory", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"patch_size": "x"},
            "patch_size is 'x', a side of 1 to 8192 pixels, or an object of sides, is needed",
        ),
        ({"patch_size": {"a": "b"}}, "patch_size is {'a': 'b'}, a side of 1 to"),
        ({"patch_size": -8}, "patch_size is -8, a side of 1 to"),
        ({"patch_size": True}, "patch_size is True, a side of 1 to"),
        ({"merge_size": 0}, "merge_size is 0, a whole number of 1 to 8192 is needed"),
        ({"temporal_patch_size": [2]}, "temporal_patch_size is [2], a whole number"),
        (
            {"max_pixels": 1 << 40},
            "max_pixels is 1099511627776, a number of pixels of 1 to 67108864 is needed",
        ),
        (
            {"size": {"shortest_edge": 1 << 27, "longest_edge": 1 << 28}},
            "size is {'shortest_edge': 134217728, 'longest_edge': 268435456}, a side of 1 to 8192 pixels, or an "
            "object of edges of 1 to 67108864 pixels in all, is needed",
        ),
        (
            {"size": {"shortest_edge": 9000, "longest_edge": 5000}},
            "size.shortest_edge is 9000, over longest_edge, 5000",
        ),
        ({"min_pixels": "many"}, "min_pixels is 'many', a number of pixels"),
        ({"rescale_factor": "1/255"}, "rescale_factor is '1/255', a number over 0 is needed"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is [0.5, 0.5], a number, or 3 for the channels, is needed"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "image_mean is [0.5, 0.5, nan], a number"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is [0.5, 0, 0.5], a number over 0"),
        ({"resample": 9}, "resample is 9, the number of a filter of Pillow, 0 to 5, is needed"),
        ({"do_resize": "yes"}, "do_resize is 'yes', true or false is needed"),
        ({"image_processor_type": 7}, "image_processor_type is 7, a text is needed"),
        ({"min_pixels": 9000, "max_pixels": 5000}, "min_pixels is 9000, over max_pixels, 5000"),
        ({"min_patches": 3, "max_patches": 2}, "min_patches is 3, over max_patches, 2"),
        ({"image_mean": "x" * 10_000}, f"image_mean is '{'x' * 59}..., a number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_no_processor_takes_is_named(directory: Path, values: dict[str, Any], why: str) -> None:
    change(directory, **values)
    assert f"{IMAGES}: {why}" in refusal(directory)


@pytest.mark.parametrize(
    ("directory", "values", "why"),
    [
        ("qwen2_5_vl", {"image_processor_type": "Foo"}, "Unrecognized image processor"),
        ("gemma3", {"size": {"depth": 3}}, "size must have one of the following set of keys"),
        ("smolvlm", {"size": {"height": 32, "width": 32}}, "size has no longest_edge"),
        ("smolvlm", {"max_image_size": {"height": 32, "width": 32}}, "KeyError: 'longest_edge'"),
        ("mistral3", {"size": {"height": 96, "width": 96}}, "size has no longest_edge"),
        ("llava_onevision", {"image_grid_pinpoints": 7}, "grid_pinpoints must be a list"),
        ("llama4", {"size": {"height": 32}}, "KeyError: 'width'"),
        ("llama4", {"size": {"height": 32, "width": 64}}, "other values for height and width"),
        ("llama4", {"image_mean": 0.5}, "IndexError: "),
    ],
    indirect=["directory"],
    ids=lambda value: str(value)[:40],
)
def test_values_that_do_not_fit_one_another_end_the_load(
    directory: Path, values: dict[str, Any], why: str
) -> None:
    change(directory, **values)
    message = refusal(directory)
    assert f"{IMAGES} does not fit the model's image processor and config.json" in message
    assert why in message


@pytest.mark.parametrize("directory", ["gemma3"], indirect=True)
def test_the_nested_settings_go_first_and_are_named_by_their_file(directory: Path) -> None:
    stored = json.loads((directory / IMAGES).read_bytes())
    change(directory, resample="unused")
    (directory / PROCESSOR).write_text(json.dumps({"image_processor": stored}))
    assert family_of(directory) is not None
    (directory / PROCESSOR).write_text(json.dumps({"image_processor": {**stored, "resample": -1}}))
    assert f"{PROCESSOR}: resample is -1, " in refusal(directory)
    (directory / PROCESSOR).write_text(json.dumps({"image_processor": [stored]}))
    assert f"{PROCESSOR}: image_processor is [" in refusal(directory)


@pytest.mark.parametrize(
    ("directory", "values"),
    [("qwen2_5_vl", {"patch_size": ABSENT}), ("gemma3", {"size": {"height": 96, "width": 96}})],
    indirect=["directory"],
)
def test_a_processor_whose_pictures_the_tower_does_not_take_ends_the_load_of_the_model(
    directory: Path, values: dict[str, Any]
) -> None:
    change(directory, **values)
    with pytest.raises(
        DamagedFile, match=f"{IMAGES} does not fit the model's image processor and config.json"
    ):
        CausalAdapter.load(context(directory))


@pytest.mark.parametrize(
    ("directory", "values"),
    [
        ("smolvlm", {"size": {"longest_edge": 1 << 31}}),
        ("smolvlm", {"max_image_size": {"longest_edge": 8193}}),
        ("mistral3", {"size": {"longest_edge": 1 << 20}}),
    ],
    indirect=["directory"],
)
def test_an_edge_that_is_a_side_has_the_bound_of_a_side(directory: Path, values: dict[str, Any]) -> None:
    change(directory, **values)
    [name] = values
    assert f"{IMAGES}: {name} is {values[name]}, a side of 1 to 8192 pixels" in refusal(directory)


@pytest.mark.parametrize("directory", ["llama4"], indirect=True)
def test_llama_4_reads_nested_settings_alone(directory: Path) -> None:
    stored = json.loads((directory / IMAGES).read_bytes())
    expected = family_of(directory)
    (directory / IMAGES).unlink()
    (directory / PROCESSOR).write_text(json.dumps({"image_processor": stored}))
    found = family_of(directory)
    assert found is not None and expected is not None and found.settings == expected.settings
    (directory / PROCESSOR).write_text(json.dumps({"image_processor": {**stored, "do_resize": False}}))
    assert family_of(directory) is None, "steps that are switched off are not built"
    (directory / PROCESSOR).unlink()
    assert family_of(directory) is None


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "tiny"),
    [
        ("clip", "clip"),
        ("siglip", "siglip"),
        ("colpali", "colpali"),
        ("colqwen2", "colqwen2"),
        ("qwen3_vl_embedding", "qwen3_vl"),
        ("detection", "detr"),
        ("owlv2", "owlv2"),
        ("grounding_dino", "grounding_dino"),
        ("donut", "donut"),
        ("florence2", "florence2"),
        ("document_qa", "layoutlmv3"),
    ],
)
def test_other_families_that_read_pictures_name_file_and_value_too(
    family: str, tiny: str, tmp_path: Path
) -> None:
    directory = build(tiny, tmp_path)
    name, stored = image_settings.read(directory)
    file = directory / name
    whole = json.loads(file.read_bytes())
    changed = {**stored, "image_mean": "grey"}
    file.write_text(json.dumps({**whole, "image_processor": changed} if name == PROCESSOR else changed))
    with pytest.raises(DamagedFile, match=f"{name}: image_mean is 'grey', a number, or 3 for the channels"):
        load(family, directory)


@pytest.mark.parametrize("size", [[768, 512], [224], 384, {"shortest_edge": 800, "longest_edge": 1333}])
def test_sizes_of_older_files_are_read(size: Any, tmp_path: Path) -> None:
    (tmp_path / IMAGES).write_text(json.dumps({"size": size}))
    assert image_settings.check(tmp_path) == IMAGES


@pytest.mark.parametrize("directory", ["gemma3"], indirect=True)
def test_crops_that_are_not_built_and_absent_files_leave_a_model_of_texts(directory: Path) -> None:
    change(directory, do_pan_and_scan=True)
    assert family_of(directory) is None
    (directory / IMAGES).unlink()
    assert family_of(directory) is None
