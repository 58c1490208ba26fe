"""The reference of each family: classes of sentence-transformers, pipelines of transformers, formulas of model cards.

A reference has the methods `encode`, `score` and `extract` that its family needs, with the results of
`penstock.verification.ours.Ours`. The references of Qwen3-VL (`Conversations`) read one conversation at a time, without
padding; their words, pictures and pooling are those of github.com/QwenLM/Qwen3-VL-Embedding. The processor class of
transformers needs torchvision, so tokenizer, template and image processor are used one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ipc.catalog.entries import ModelEntry
from ipc.wire.extraction import Classification, Entity, Extraction
from ipc.wire.messages import InputItem
from penstock.verification.samples import opened
from penstock.verification.supported import OWN, SENTENCE_TRANSFORMERS, refuse_unsupported
from workers.adapters.shared.text_model import Prompts

_PIXELS = {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32}
_REPRESENT = "Represent the user's input."
_RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE_SEEN = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
Parts = list[dict[str, Any]]
Array = np.ndarray[Any, Any]
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"


class Opening(msgspec.Struct, frozen=True):
    """A model's files and the conditions of the comparison; `length` is in tokens, the reference runs in float32."""

    entry: ModelEntry
    directory: Path
    device: torch.device
    length: int
    trust_remote_code: bool

    @property
    def place(self) -> str:
        """The directory as text."""
        return str(self.directory)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the model classes of sentence-transformers share."""
        return {
            "device": str(self.device),
            "local_files_only": True,
            "trust_remote_code": self.trust_remote_code,
            "model_kwargs": {"dtype": torch.float32},
        }

    def prompted(self, texts: list[str], *, is_query: bool) -> list[str]:
        """The texts with the catalog's prompts, for models without stored prompts."""
        options = self.entry.runtime
        prompts = Prompts(
            named=options.get("prompts", {}),
            query_template=options.get("query_template"),
            document_template=options.get("document_template"),
            default_instruction=options.get("default_instruction"),
        )
        before, after = prompts.affixes(None, is_query)
        return [f"{before}{text}{after}" for text in texts]


class Conversations:
    """Qwen3-VL in float32 with tokenizer and image processor."""

    def __init__(self, opening: Opening) -> None:
        library: Any = transformers
        trust = {"local_files_only": True, "trust_remote_code": opening.trust_remote_code}
        kind = library.Qwen3VLForConditionalGeneration
        self._model = kind.from_pretrained(opening.place, dtype=torch.float32, **trust)
        self._model.to(opening.device).eval()
        self._tokenizer = library.AutoTokenizer.from_pretrained(opening.place, **trust)
        images: Any = AutoImageProcessor
        self._images = images.from_pretrained(opening.place, backend="pil", **_PIXELS, **trust)
        self._options = {**opening.entry.runtime, **opening.entry.loadtime}
        self._length, self._device = opening.length, opening.device
        self.name = f"transformers {transformers.__version__} {kind.__name__}"

    def last(
        self, system: str, text: str, parts: Callable[[str], Parts], images: Sequence[bytes] = ()
    ) -> torch.Tensor:
        """The vector [width] of the last token; the end of `text` is cut until the conversation fits."""
        pictures = dict(self._images(images=opened(list(images)), return_tensors="pt")) if images else {}
        starts = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        begin = len(starts)
        ids = self._ids(system, parts(text), pictures)
        while ids.shape[1] > self._length:
            begin -= ids.shape[1] - self._length
            ids = self._ids(system, parts(text[: starts[begin][0]]), pictures)
        marks = (ids == self._model.config.image_token_id).int()
        seen = {name: value.to(self._device) for name, value in pictures.items()}
        outputs = self._model.model(input_ids=ids, mm_token_type_ids=marks, **seen)
        vector: torch.Tensor = outputs.last_hidden_state[0, -1]
        return vector

    def _ids(self, system: str, parts: Parts, pictures: dict[str, Any]) -> torch.Tensor:
        """Token ids [1, t], up to where the model would answer, with a token for each part of a picture."""
        turns = [{"role": "system", "content": [_said(system)]}, {"role": "user", "content": parts}]
        written = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        mark = str(self._tokenizer.convert_ids_to_tokens(self._model.config.image_token_id))
        before, *after = str(written).split(mark)
        for grid, rest in zip(pictures.get("image_grid_thw", []), after, strict=True):
            before += mark * int(grid.prod() // self._images.merge_size**2) + rest
        ids: torch.Tensor = self._tokenizer(before, return_tensors="pt")["input_ids"]
        return ids.to(self._device)


class Embedder(Conversations):
    """The normalised vector of the last token."""

    @torch.inference_mode()
    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Any]:
        """Per item a vector [dims]."""
        system = self._options.get("default_instruction", _REPRESENT)
        return [self._one(item, system) for item in items]

    def _one(self, item: InputItem, system: str) -> np.ndarray[Any, Any]:
        pictures: Parts = [{"type": "image"} for _ in item.images]
        vector = self.last(system, item.text or "", lambda text: [*pictures, _said(text)], item.images)
        return F.normalize(vector, dim=-1).cpu().numpy()


class Reranker(Conversations):
    """The probability of "yes" against "no" as the next token."""

    @torch.inference_mode()
    def score(self, query: str, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """float32 [texts]."""
        instruction = self._options.get("default_instruction", _RETRIEVE)
        before = [
            _said(f"<Instruct>: {instruction}"),
            _said("<Query>:"),
            _said(query),
            _said("\n<Document>:"),
        ]
        words = [self._options.get("positive_token", "yes"), self._options.get("negative_token", "no")]
        answers = self._tokenizer.convert_tokens_to_ids(words)
        rows = [self.last(_JUDGE_SEEN, text, lambda kept: [*before, _said(kept)]) for text in texts]
        yes, no = self._model.lm_head(torch.stack(rows))[:, answers].float().T
        sigmoid = self._options.get("activation", "sigmoid") == "sigmoid"
        scores: np.ndarray[Any, Any] = (torch.sigmoid(yes - no) if sigmoid else yes - no).cpu().numpy()
        return scores


def _said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class _Plain:
    """A transformers model in float32, with its tokenizer or processor."""

    def __init__(self, opening: Opening, model_class: Any, reader_class: Any) -> None:
        trust = {"local_files_only": True, "trust_remote_code": opening.trust_remote_code}
        loaded = model_class.from_pretrained(opening.place, dtype=torch.float32, **trust)
        self._opening, self._device = opening, opening.device
        self._model = loaded.to(opening.device).eval()
        self._reader = reader_class.from_pretrained(opening.place, **trust)
        self.name = f"transformers {transformers.__version__} {type(loaded).__name__}"


class BgeM3(_Plain):
    """XLM-R and the two heads of BAAI/bge-m3, by the formulas of its paper (arXiv 2402.03216, section 3.2)."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening, transformers.AutoModel, transformers.AutoTokenizer)
        self._sparse, self._colbert = (self._head(name) for name in ("sparse_linear.pt", "colbert_linear.pt"))

    def _head(self, name: str) -> dict[str, torch.Tensor]:
        state = torch.load(self._opening.directory / name, map_location=self._device, weights_only=True)
        return {key: value.float() for key, value in state.items()}

    @torch.inference_mode()
    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Array]:
        """Per item: dense [1024], sparse [vocabulary], or multivector [tokens - 1, 1024]."""
        return [self._one(item.text or "", output) for item in items]

    def _one(self, text: str, output: str) -> Array:
        inputs = self._reader(text, truncation=True, max_length=self._opening.length, return_tensors="pt")
        inputs = inputs.to(self._device)
        hidden = self._model(**inputs).last_hidden_state[0]
        if output == "dense":
            return F.normalize(hidden[0], dim=-1).cpu().numpy()
        if output == "multivector":
            return F.normalize(F.linear(hidden[1:], **self._colbert), dim=-1).cpu().numpy()
        weights = F.linear(hidden, **self._sparse).relu().squeeze(-1)
        vector = torch.zeros(self._model.config.vocab_size, device=self._device)
        vector.scatter_reduce_(0, inputs["input_ids"][0], weights, "amax")
        tokenizer = self._reader
        unused = (
            tokenizer.cls_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            tokenizer.unk_token_id,
        )
        vector[[token for token in unused if token is not None]] = 0.0
        return vector.cpu().numpy()


class TwoTowers(_Plain):
    """CLIP and SigLIP: the projected features of the text and the image tower, normalised.

    SigLIP was trained on texts padded to the full length without a mask; its published tokenizers give none.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening, transformers.AutoModel, transformers.AutoProcessor)
        self._fills = opening.entry.adapter == "siglip"

    @torch.inference_mode()
    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Array]:
        """Per item a vector [dims]."""
        return [self._one(item) for item in items]

    def _one(self, item: InputItem) -> Array:
        if item.text is None:
            inputs = self._reader(images=opened(item.images[:1]), return_tensors="pt").to(self._device)
            outputs = self._model.get_image_features(**inputs)
        else:
            padding: Any = "max_length" if self._fills else True
            limits = {"padding": padding, "truncation": True, "max_length": self._opening.length}
            inputs = self._reader(text=[item.text], return_tensors="pt", **limits).to(self._device)
            if self._fills:
                inputs.pop("attention_mask", None)
            outputs = self._model.get_text_features(**inputs)
        features = outputs if torch.is_tensor(outputs) else outputs.pooler_output
        return F.normalize(features[0].float(), dim=-1).cpu().numpy()


class YesOrNo(_Plain):
    """A causal model that answers with one of two words, by the code on the card of Qwen/Qwen3-Reranker-0.6B."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening, transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
        options = {**opening.entry.runtime, **opening.entry.loadtime}
        words = (options.get("negative_token", "no"), options.get("positive_token", "yes"))
        self._answers = [self._reader.convert_tokens_to_ids(word) for word in words]
        self._before, self._after = options.get("prefix", _JUDGE), options.get("suffix", _ANSWER)
        self._pair = options.get("pair_template", _PAIR)
        self._instruction = options.get("default_instruction", _TASK)
        self._sigmoid = options.get("activation", "sigmoid") == "sigmoid"

    @torch.inference_mode()
    def score(self, query: str, texts: Sequence[str]) -> Array:
        """float32 [texts]: the probability of the positive word, or the difference of both words' logits."""
        return np.array([self._one(query, text) for text in texts], dtype=np.float32)

    def _one(self, query: str, text: str) -> float:
        pair = self._pair.replace("{instruction}", self._instruction).replace("{query}", query)
        parts = (self._before, pair.replace("{text}", text), self._after)
        ids = [self._reader.encode(part, add_special_tokens=False) for part in parts]
        room = self._opening.length - len(ids[0]) - len(ids[2])
        row = torch.tensor([[*ids[0], *ids[1][:room], *ids[2]]], device=self._device)
        no, yes = self._model(input_ids=row).logits[0, -1, self._answers].float()
        return float(torch.sigmoid(yes - no) if self._sigmoid else yes - no)


class _Pipeline:
    """One task of transformers over the model's directory."""

    task = ""

    def __init__(self, opening: Opening, **arguments: Any) -> None:
        self._options = opening.entry.runtime | opening.entry.loadtime
        pipeline: Any = transformers.pipeline
        self._run = pipeline(
            self.task,
            model=opening.place,
            device=opening.device,
            dtype=torch.float32,
            trust_remote_code=opening.trust_remote_code,
            **arguments,
        )
        self.name = f"transformers {transformers.__version__} pipeline {self.task}"


class Entities(_Pipeline):
    """Token classification with the entry's aggregation."""

    task = "token-classification"

    def __init__(self, opening: Opening) -> None:
        strategy = opening.entry.runtime.get("aggregation_strategy", "simple")
        super().__init__(opening, aggregation_strategy=strategy)

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """Entities of each text."""
        return [Extraction(entities=[_entity(found, text) for found in self._run(text)]) for text in texts]


class Classes(_Pipeline):
    """Text classification, every class scored."""

    task = "text-classification"

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """Classes of each text."""
        function = self._options.get("function_to_apply")
        chosen = {} if function in (None, "auto") else {"function_to_apply": function}
        return [_classified(self._run(text, top_k=None, **chosen)) for text in texts]


class ZeroShotClasses(_Pipeline):
    """Zero-shot classification by entailment."""

    task = "zero-shot-classification"

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """The labels of each text, scored."""
        template = self._options.get("hypothesis_template", "This example is {}.")
        several = bool(self._options.get("multi_label", False))
        answers = [
            self._run(text, candidate_labels=list(labels), hypothesis_template=template, multi_label=several)
            for text in texts
        ]
        return [
            _classified(
                [
                    {"label": label, "score": score}
                    for label, score in zip(one["labels"], one["scores"], strict=True)
                ]
            )
            for one in answers
        ]


def _entity(found: dict[str, Any], text: str) -> Entity:
    start, end = int(found["start"]), int(found["end"])
    label = str(found.get("entity_group") or found["entity"])
    return Entity(text[start:end], label, float(found["score"]), start, end)


def _classified(found: list[dict[str, Any]]) -> Extraction:
    return Extraction(
        classifications=[Classification(str(one["label"]), float(one["score"])) for one in found]
    )


class Encoder:
    """SentenceTransformer, SparseEncoder or MultiVectorEncoder on the model's directory."""

    def __init__(self, opening: Opening, kind: str) -> None:
        import sentence_transformers as package

        self._opening = opening
        self._model = getattr(package, kind)(opening.place, **opening.arguments)
        if kind != "MultiVectorEncoder":
            self._model.max_seq_length = opening.length
        self.name = f"sentence-transformers {package.__version__} {kind}"

    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Array]:
        """Per item: dense [dims], sparse [vocabulary], or multivector [tokens, dims], float32."""
        encode = self._model.encode_query if is_query else self._model.encode_document
        prompt = self._stored_prompt(is_query)
        inputs: list[Any] = [item.text for item in items if item.text is not None]
        if not inputs:
            inputs = opened([item.images[0] for item in items])
        elif prompt is None:
            inputs = self._opening.prompted(inputs, is_query=is_query)
        vectors = encode(inputs, batch_size=8, show_progress_bar=False, prompt_name=prompt)
        return [_array(one.to_dense() if output == "sparse" else one) for one in vectors]

    def _stored_prompt(self, is_query: bool) -> str | None:
        """The name of the stored prompt of a side.

        NOTE: `encode_document` of 6.2 documents these names, and overlooks the last two.
        """
        names = ("query",) if is_query else ("document", "passage", "corpus")
        return next((name for name in names if self._model.prompts.get(name)), None)


class Pairs:
    """CrossEncoder."""

    def __init__(self, opening: Opening) -> None:
        import sentence_transformers as package

        self._model = package.CrossEncoder(opening.place, max_length=opening.length, **opening.arguments)
        self.name = f"sentence-transformers {package.__version__} CrossEncoder"

    def score(self, query: str, texts: Sequence[str]) -> Array:
        """float32 [texts]."""
        scores = self._model.predict([(query, text) for text in texts], batch_size=8, show_progress_bar=False)
        return _array(scores)


def _array(values: Any) -> Array:
    host = values.float().cpu().numpy() if hasattr(values, "cpu") else values
    return np.asarray(host, dtype=np.float32)


_OWN = (BgeM3, TwoTowers, YesOrNo, Embedder, Reranker, Entities, Classes, ZeroShotClasses)


def open_reference(opening: Opening) -> Any:
    """The reference of the entry's family. Raises as `refuse_unsupported`; exceptions of the library pass."""
    family = opening.entry.adapter
    refuse_unsupported(family)
    kind = SENTENCE_TRANSFORMERS.get(family)
    if kind is None:
        return {each.__name__: each for each in _OWN}[OWN[family]](opening)
    return Pairs(opening) if kind == "CrossEncoder" else Encoder(opening, kind)
