"""Conversations with pictures on tiny models that see: requests for the engine, and the answers of transformers."""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.fakes.generating import engine_of, request_of
from tests.harness import seeing_reference
from tests.tiny import seeing
from tests.tiny.pictures import encoded, picture
from workers.generation.engine import Engine
from workers.generation.features import FeatureStore
from workers.generation.pictures import families
from workers.generation.pictures.reading import PictureReader
from workers.generation.request import GenerationRequest
from workers.generation.templates import ChatTemplate
from workers.generation.tower import Tower

TOKENS = 6
STORE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Chat:
    """The message of a user: texts, and pictures by their numbers (`drawn`)."""

    parts: tuple[str | int, ...]

    @property
    def files(self) -> list[bytes]:
        """The encoded pictures."""
        return [encoded(drawn(part)) for part in self.parts if isinstance(part, int)]

    def messages(self, images: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """The conversation; `images` stand in its parts, where there are some."""
        left = iter(images)
        parts = [_text(each) if isinstance(each, str) else _image(next(left, None)) for each in self.parts]
        return [{"role": "user", "content": parts}]


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _image(image: Any) -> dict[str, Any]:
    return {"type": "image"} if image is None else {"type": "image", "image": image}


def drawn(number: int) -> Image.Image:
    """A picture whose form differs by its number."""
    return picture(number, 60 + 12 * (number % 3), 48 + 10 * (number % 2))


class Seeing:
    """One tiny model that sees, with its tower, and the reference."""

    def __init__(self, family: str, directory: Path, device: str = "cpu") -> None:
        self.directory = seeing.save(family, directory)
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(str(directory)).eval()
        self.model.to(device).requires_grad_(False)
        self._bare: Any = transformers.AutoModelForImageTextToText.from_pretrained(str(directory)).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
        self.family = families.load(directory, self.model.config, tokenizer)
        self._bare.to(device)
        self._processor = seeing_reference.processor_of(self.family, directory)
        self.reader = PictureReader(self.family, ChatTemplate(tokenizer, reserved=self.family.words))
        self._expected: dict[tuple[Chat, int], tuple[list[int], list[float]]] = {}

    def engine(self, *, store_nbytes: int = STORE_NBYTES, **options: Any) -> Engine:
        """An engine with an empty store."""
        tower = Tower(self.model, self.reader, FeatureStore(store_nbytes))
        return engine_of(self.model, tower=tower, **options)

    def request(
        self, key: Hashable, chat: Chat, max_tokens: int = TOKENS, *, n: int = 1, processed: bool = True
    ) -> GenerationRequest:
        """A request as a preparing thread makes it; without `processed` as where the features were stored then."""
        found = self.reader.prompt(chat.messages(), chat.files)
        pictures = [self.reader.processed(one) if processed else one for one in found.pictures]
        return request_of(key, found.prompt.ids, max_tokens, n=n, pictures=pictures)

    def expected(self, chat: Chat, max_tokens: int = TOKENS) -> tuple[list[int], list[float]]:
        """Tokens of generate() and their log probabilities."""
        if (chat, max_tokens) not in self._expected:
            self._expected[chat, max_tokens] = self._generated(chat, max_tokens)
        return self._expected[chat, max_tokens]

    def _generated(self, chat: Chat, max_tokens: int) -> tuple[list[int], list[float]]:
        inputs = self._processor.apply_chat_template(
            chat.messages(Image.open(io.BytesIO(data)) for data in chat.files),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        ).to(self._bare.device)
        with torch.no_grad():
            found = self._bare.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        scores = [
            torch.log_softmax(row[0], dim=-1)[token] for row, token in zip(found.logits, tokens, strict=True)
        ]
        return tokens, [float(score) for score in scores]
