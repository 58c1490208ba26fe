"""Donut: the fields of a document, its kind, or the answer to a question about it, read from the picture alone.

The model continues the prompt of its task with tagged text, and transformers' DonutProcessor turns that text into a
tree. Each text in the tree becomes an entity whose label is its path ("menu[0].price"); `data` holds the tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import ExtractCall
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.image_extracting import refuse_endless
from workers.adapters.shared.image_writing import ImageWriter, Page

_QUESTION = "<s_docvqa>"
_ASKED = "<s_question>{instruction}</s_question><s_answer>"
_PRETRAINING = ("<s_iitcdip>", "<s_synthdog>")
_FIRST_TAG = re.compile(r"<.*?>")


class DonutAdapter(ImageWriter):
    """A Swin encoder and an MBart decoder with task prompts."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="donut",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    model_class = "VisionEncoderDecoderModel"
    default_tokens = 512

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor."""
        super().__init__(model, processor)
        self._added = processor.tokenizer.get_added_vocab()
        self.default_task = self._own_task()
        encoder = model.config.encoder
        self._patch = int(encoder.patch_size) * 2 ** (len(encoder.depths) - 1)

    def _own_task(self) -> str:
        """The task that the model was trained for, "" where several are possible.

        The start token of the checkpoint, if that is a tag; else the only tag without a closing tag, as fields have
        closing tags and tasks have none.
        """
        generation = getattr(self._model, "generation_config", None)
        for config in (generation, self._model.config, self._model.config.decoder):
            start = getattr(config, "decoder_start_token_id", None)
            own = next((tag for tag, number in self._added.items() if number == start), "")
            if own.startswith("<s_"):
                return own
        tags = [tag for tag in self._added if tag.startswith("<s_") and tag not in _PRETRAINING]
        tasks = [tag for tag in tags if f"</{tag[1:]}" not in self._added]
        return tasks[0] if len(tasks) == 1 else ""

    @property
    def max_sequence_length(self) -> int:
        """Positions of the decoder, for the prompt and the written text."""
        return int(self._model.config.decoder.max_position_embeddings)

    def prompt_of(self, task: str, call: ExtractCall) -> tuple[str, tuple[int, ...]]:
        """The task with the instruction in its place."""
        if task == _QUESTION:
            task += _ASKED
        asks = "{instruction}" in task
        if asks != bool(call.instruction and call.instruction.strip()):
            needed = "a question" if asks else "none"
            raise InvalidInput(f"params.instruction: the task {task[:64]!r} needs {needed}")
        first = _FIRST_TAG.match(task)
        if first is None or first.group() not in self._added:
            known = ", ".join(sorted(name for name in self._added if name.startswith("<s_"))[:40])
            raise InvalidInput(
                f"params.options.task: {task[:64]!r} does not begin with a tag of this model, which knows {known}"
            )
        refuse_endless(call.instruction, self.max_sequence_length)
        prompt = task.replace("{instruction}", call.instruction or "")
        return task, tuple(self._processor.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def room_for(self, prompt: Sequence[int]) -> int:
        """The decoder's positions after the prompt, and one token more, as the last token needs no position."""
        return self.max_sequence_length - len(prompt) + 1

    def tokens_read(self, pixels: np.ndarray) -> int:
        """Patches of the encoder's last stage."""
        return max(1, pixels.shape[1] * pixels.shape[2] // self._patch**2)

    def model_inputs(self, prompts: torch.Tensor) -> Mapping[str, Any]:
        """Prompts for the decoder; the unknown token is never written."""
        tokenizer = self._processor.tokenizer
        return {
            "decoder_input_ids": prompts,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bad_words_ids": [[tokenizer.unk_token_id]],
        }

    def read(self, ids: list[int], page: Page) -> Extraction:
        """The tree, and its texts as entities."""
        tokenizer = self._processor.tokenizer
        text = tokenizer.decode(ids, skip_special_tokens=False)
        for mark in (tokenizer.eos_token, tokenizer.pad_token):
            text = text.replace(mark, "")
        tree = self._processor.token2json(_FIRST_TAG.sub("", text, count=1).strip(), added_vocab=self._added)
        entities = [Entity(leaf, path) for path, leaf in _leaves(tree, "") if leaf]
        return Extraction(entities=entities, data=tree if isinstance(tree, dict) else {"items": tree})


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every text in the tree, in order."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, str(tree)
