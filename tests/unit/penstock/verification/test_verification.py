"""`penstock verify`: measures of agreement, and models that agree with their reference or do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ipc.wire.extraction import Classification, Entity, Extraction
from penstock.cli import main
from penstock.verification import command, samples
from tests.harness.later import stats
from tests.tiny import models

LIMITS = (0.9999, 0.99)
INSTRUCTED = '{query_template: "Instruct: {instruction}\\nQuery:{text}", default_instruction: find passages}'
PREFIXED = '{query_template: "query: {text}", document_template: "passage: {text}"}'


def test_the_worst_token_counts_and_another_number_of_tokens_is_no_agreement() -> None:
    one = np.array([[1.0, 0.0], [0.0, 2.0]])
    turned = np.array([[3.0, 0.0], [1.0, 1.0]])
    zero = np.zeros(3)
    found = command.cosines(
        [one, one, np.array([1.0, 1.0]), zero, zero], [turned, one[:1], np.array([2.0, 2.0]), zero, zero + 1]
    )
    assert found == pytest.approx([np.sqrt(0.5), -1.0, 1.0, 1.0, 0.0])


def test_similarities_are_cosine_dot_or_the_sum_of_best_matches() -> None:
    queries, documents = [np.array([3.0, 4.0])], [np.array([1.0, 0.0]), np.array([0.0, 5.0])]
    assert command.similarities(queries, documents, "dot").tolist() == [[3.0, 20.0]]
    assert command.similarities(queries, documents, "cosine") == pytest.approx(np.array([[0.6, 0.8]]))
    tokens = [np.array([[1.0, 0.0], [0.0, 1.0]])]
    assert command.similarities(tokens, [np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])], "maxsim") == 5.0


def test_kendall_is_that_of_scipy_and_ties_do_not_count() -> None:
    generator = np.random.default_rng(7)
    ours, theirs = generator.normal(size=(1, 12)), generator.normal(size=(1, 12))
    expected = stats.kendalltau(ours[0], theirs[0]).statistic
    assert command.kendall(ours, theirs, 0.0) == pytest.approx(expected)
    close = theirs + generator.normal(size=theirs.shape) * 1e-6
    assert command.kendall(close, theirs, 1e-4) == 1.0
    assert command.kendall(ours, np.zeros((1, 12)), 0.0) == 1.0


def test_findings_that_one_side_lacks_lower_the_share() -> None:
    ours = [
        Extraction(entities=[Entity("Rome", "LOC", 0.9, 0, 4)], classifications=[Classification("a", 0.25)]),
        Extraction(entities=[Entity("Bern", "LOC", 0.8, 2, 6)]),
    ]
    theirs = [ours[0], Extraction(entities=[Entity("Bern", "LOC", 0.8, 2, 5)])]
    [same] = command.compared(command.Answers(findings=ours), command.Answers(findings=ours), None, LIMITS)  # type: ignore[arg-type]
    assert (same.fine, same.closest, same.rank, same.items) == (True, 1.0, 1.0, 3)
    [other] = command.compared(command.Answers(findings=ours), command.Answers(findings=theirs), None, LIMITS)  # type: ignore[arg-type]
    assert (other.fine, other.rank) == (False, 0.5)


def test_there_are_texts_of_every_kind() -> None:
    assert len({*samples.QUERIES, *samples.DOCUMENTS}) >= 30
    assert max(map(len, samples.DOCUMENTS)) > 2000 and min(map(len, samples.DOCUMENTS)) == 1
    assert not all(text.isascii() for text in samples.QUERIES)


def verify(tmp_path: Path, tiny: str, fields: str = "") -> int:
    """Verify the tiny model called `tiny`, with more `fields` in its catalog file."""
    models.build(tiny, tmp_path / "weights")
    catalog = tmp_path / "models"
    catalog.mkdir()
    head = "id: my/model\nsource: {kind: directory, path: ../weights}\n"
    (catalog / "model.yaml").write_text(head + fields)
    flags = ["--device", "cpu", "--set", "worker.torch_threads=1", "--json"]
    return main(["verify", "my/model", "--catalog", str(catalog), *flags])


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file from the environment."""
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("tiny", "fields"),
    [
        ("dense_cls", ""),
        ("dense_last", f"runtime: {INSTRUCTED}\n"),
        ("dense_mean", f"runtime: {PREFIXED}\n"),
    ],
)  # fmt: skip
def test_a_model_that_agrees_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: str, fields: str
) -> None:
    assert verify(tmp_path, tiny, fields) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fine"] and report["precision"] == "float32"
    assert "SentenceTransformer" in report["reference"]
    [dense] = report["outputs"]
    assert (dense["output"], dense["items"]) == ("dense", len(samples.QUERIES) + len(samples.DOCUMENTS))
    assert dense["closest"] > 0.99999 and dense["rank"] == 1.0


@pytest.mark.sample(4)
@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("tiny", "family", "outputs"),
    [
        ("bge_m3", "bge_m3", "{dense: {dims: 64}, sparse: {dims: 500}, multivector: {dims: 64}, score: {}}"),
        ("splade", "splade", "{sparse: {dims: 500}}"),
        ("colbert_stanford", "colbert", "{multivector: {dims: 128}, score: {}}"),
        ("rr_bert", "cross_encoder", "{score: {}}"),
        ("rr_qwen3", "qwen3_reranker", "{score: {}}"),
        ("qwen3_vl", "qwen3_vl_embedding", "{dense: {dims: 64}}\ninputs: [text, image]"),
        ("qwen3_vl", "qwen3_vl_reranker", "{score: {}}\ninputs: [text, image]"),
        ("ner", "ner", "{json: {}}"),
        ("classifier", "text_classification", "{json: {}}"),
        ("nli", "nli_zero_shot", "{json: {}}"),
    ],
)
def test_every_output_of_a_family_agrees_with_its_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: str, family: str, outputs: str
) -> None:
    assert verify(tmp_path, tiny, f"adapter: {family}\noutputs: {outputs}\n") == 0
    report = json.loads(capsys.readouterr().out)
    promised = {name for name in ("dense", "sparse", "multivector", "score", "json") if f"{name}:" in outputs}
    if len(promised) > 1:
        promised.discard("score")
    assert {one["output"] for one in report["outputs"]} == promised
    assert all(one["closest"] > 0.9999 and one["items"] > 3 for one in report["outputs"])


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    "fields",
    ["loadtime: {pooling: cls}\n", 'runtime: {query_template: "something else entirely: {text}"}\n'],
)
def test_a_model_that_does_not_agree_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: str
) -> None:
    # The stored prompt of dense_cls is the reference's; dense_mean's pooling is stored too.
    assert verify(tmp_path, "dense_mean" if "pooling" in fields else "dense_cls", fields) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fine"] and report["outputs"][0]["closest"] < 0.99


@pytest.mark.usefixtures("no_settings")
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert verify(tmp_path, "dense_mean") == 1
    assert "the extra verify (pip install" in capsys.readouterr().err


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("adapter: donut\noutputs: {json: {}}\n", "verify has no reference for the family 'donut'"),
        ("adapter: tests.fakes.adapter:FakeAdapter\n", "verify has no reference for the family"),
    ],
)
def test_a_family_without_a_reference_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: str, message: str
) -> None:
    assert verify(tmp_path, "dense_mean", fields) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_settings")
def test_damaged_weights_are_named_before_a_library_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "penstock.verification.references", None)
    models.build("dense_mean", tmp_path / "weights")
    file = tmp_path / "weights" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    catalog = tmp_path / "model.yaml"
    catalog.write_text(f"id: my/model\nsource: {{kind: directory, path: {tmp_path / 'weights'}}}\n")
    assert main(["verify", "my/model", "--catalog", str(tmp_path), "--device", "cpu"]) == 1
    assert "model.safetensors is damaged" in capsys.readouterr().err
