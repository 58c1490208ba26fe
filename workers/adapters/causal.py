"""Language models that continue a text: chat templates, formats of answers, and the engine that generates.

1. `load` proves that packed steps suit the model and makes the engine (`workers.generation.building`).
2. `prepare` renders the messages, tokenizes, holds the prompt against the context, and compiles the grammar.
3. The strategy `workers.strategies.generation` runs the engine.

Any model that transformers' `AutoModelForCausalLM` loads is served, and GGUF files of some architectures. So is a model
that `AutoModelForImageTextToText` loads: the model sees where a family of `workers.generation.pictures` reads pictures,
and where transformers' own processor does, which costs the packed steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar

from ipc.errors import InputTooLong, InvalidInput
from ipc.wire.messages import Call, GenerateCall, InputItem
from workers.adapters.base import Adapter, AdapterSpec, Held, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes, precision_of
from workers.adapters.shared.causal_files import CausalFiles
from workers.adapters.shared.checkpoint import stored_limit, text_limit
from workers.adapters.shared.lora import TextLoras
from workers.device import stepping
from workers.generation.building import CACHE_SETTING, build
from workers.generation.engine import Engine
from workers.generation.formats.table import Format, detect
from workers.generation.grammar import Grammars, MaskFiller
from workers.generation.pictures.family import Picture
from workers.generation.pictures.reading import SeenPrompt
from workers.generation.proof import Earlier
from workers.generation.request import GenerationRequest, Phases
from workers.generation.sampling import BatchedSampler, check_bias
from workers.generation.templates import ChatTemplate, Prompt
from workers.generation.text import ChoiceOutput, Vocabulary
from workers.generation.tool_texts import NONE, SYSTEM_TEXT, TEMPLATE


class CausalAdapter(Adapter):
    """One causal language model."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="causal",
        operations=("generate",),
        inputs=("text",),
        outputs=("chat",),
        lora=True,
        gguf=True,
        quantizes=True,
    )
    engine: Engine

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        template: ChatTemplate,
        answers: Format,
        grammars: Grammars,
        vocabulary: Vocabulary,
        context_tokens: int,
        described: Held,
    ) -> None:
        """`context_tokens` is the longest sequence, prompt and answer together; `described` says what was loaded."""
        self._described = described
        self.engine, self.loras = engine, TextLoras(engine.model)
        engine.loras = self.loras
        self._template, self._answers, self._grammars = template, answers, grammars
        self._context_tokens = min(context_tokens, engine.capacity)
        self._model_tokens = context_tokens
        self.tokenizer, self._vocabulary = tokenizer, vocabulary
        self._begin_id = tokenizer.bos_token_id
        self._end_ids = end_ids(engine.model, tokenizer)
        self._vocabulary_size = vocabulary_size(engine.model)

    @classmethod
    def load(cls, context: LoadContext) -> CausalAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for options that do not fit the model and for a template that shows no user, and MemoryError
        without room for a cache.
        """
        files = CausalFiles(context)
        tokenizer = files.tokenizer()
        family = files.family(tokenizer)
        template = files.template(tokenizer, family)
        template.check()
        reader = None if family is None else files.reader(family, template)
        answers = detect(
            tokenizer,
            template.text,
            str(context.options.get("tool_format", "")),
            str(context.options.get("reasoning", "")),
            knows_tools=template.shows.functions or template.shows.calls,
        )
        model = files.model()
        limit = text_limit(model, context.max_sequence_length, stored_limit(tokenizer))
        vocabulary = Vocabulary(tokenizer, answers.marks)
        size = vocabulary_size(model)
        grammars = Grammars(tokenizer, size, sorted(end_ids(model, tokenizer)), answers)
        engine = build(
            model,
            limit,
            context.generation,
            context.free_bytes(),
            BatchedSampler(vocabulary.raw, partial(tokenizer.encode, add_special_tokens=False)),
            MaskFiller(grammars.words, size),
            partial(ChoiceOutput, vocabulary, in_pieces=context.generation.stream_arguments),
            Earlier(context.proof, context.identity, partial(context.progress, "proof of packed steps")),
            reader,
        )
        return cls(engine, tokenizer, template, answers, grammars, vocabulary, limit, files.described)

    @property
    def tools_shown(self) -> str:
        """How the model is shown functions."""
        if self._template.shows.functions:
            return TEMPLATE
        return SYSTEM_TEXT if self._template.exists and self._answers.wrapper is not None else NONE

    @property
    def held(self) -> Held:
        """Weights, and the cache; a model without packed steps has a cache of its own for each request."""
        engine = self.engine
        cache = engine.cache_nbytes
        return self._described._replace(
            precision=precision_of(engine.model),
            weight_bytes=parameter_bytes(engine.model),
            cache_bytes=cache,
            cache_tokens=engine.capacity if cache else 0,
            template=self._template.told,
        )

    @property
    def limited_by(self) -> str:
        """The setting of the cache, where the cache is smaller than the model's context."""
        return CACHE_SETTING if self._context_tokens < self._model_tokens else ""

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        return self._context_tokens

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    @property
    def sees(self) -> bool:
        """Whether the model reads pictures of messages."""
        return self.engine.reader is not None

    @property
    def image_tokens(self) -> int:
        """Tokens of a picture of a usual size; 0 for a model that does not see."""
        reader = self.engine.reader
        return 0 if reader is None else reader.usual_tokens

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights, buffers, the cache of keys and values, and features of pictures at most."""
        return parameter_bytes(self.engine.model) + self.engine.cache_nbytes

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """The request for the engine. Raises `InvalidInput` and `InputTooLong` with the field and the limit.

        Raises `Deserted` between two pictures of a request that nobody waits for any more.
        """
        assert isinstance(call, GenerateCall)
        check_bias(call.sampling.logit_bias, self._vocabulary_size)
        prompt, pictures = self._prompt(call)
        ids, longest = prompt.ids, self._context_tokens - (call.ending.max_tokens != 0)
        if len(ids) > longest:
            if call.truncate and not pictures:
                ids = ids[len(ids) - max(1, self._context_tokens - (call.ending.max_tokens or 1)) :]
            elif not call.counts_only:
                raise self._too_long(len(ids), has_pictures=bool(pictures))
        room = max(0, self._context_tokens - len(ids))
        max_tokens = room if call.ending.max_tokens is None else min(room, call.ending.max_tokens)
        stop_ids = frozenset(call.ending.stop_ids)
        if not call.ending.ignore_eos:
            stop_ids |= self._end_ids
        held = call.grammar is not None
        parse = partial(self._answers.parser, prompt.text, call.tools, said=prompt.said, held=held)
        parser = parse if call.splits else None
        matcher = (
            None if call.counts_only else self._grammars.factory(call, prompt.text, max_tokens, prompt.said)
        )
        shown = self._vocabulary.prompt_text(ids, call.text) if call.tells_prompt else None
        seen: list[Picture] = []
        decode_ns = 0
        if pictures and not call.counts_only:
            began_ns = time.monotonic_ns()
            seen = self._all_seen(pictures, call.space)
            decode_ns = time.monotonic_ns() - began_ns
        request = GenerationRequest(
            None,
            ids,
            call,
            max_tokens,
            stop_ids,
            parser,
            matcher,
            shown,
            pictures=seen,
            phases=Phases(decode_ns),
        )
        return [Prepared(request, len(ids))]

    def _too_long(self, tokens: int, *, has_pictures: bool) -> InputTooLong:
        bound = f"the context of the model is {self._context_tokens}"
        if self.limited_by:
            bound = (
                f"the cache of keys and values holds {self._context_tokens} ({self.limited_by}; the context "
                f"of the model is {self._model_tokens})"
            )
        advice = (
            "send fewer or smaller images, as a prompt with images is not cut"
            if has_pictures
            else "set truncate_sequence to cut the beginning of the prompt"
        )
        return InputTooLong(
            f"the prompt has {tokens} tokens, {bound} and the answer needs one at least; {advice}"
        )

    def _all_seen(self, pictures: Sequence[Picture], space: str) -> list[Picture]:
        """The pictures of a prompt. Raises `Deserted` before the next picture once nobody waits for the request."""
        steps, seen = stepping.current(), list[Picture]()
        for picture in pictures:
            if steps.deserted:
                raise stepping.Deserted("the request ended before all of its images were decoded")
            seen.append(self._seen(picture, space))
        return seen

    def _seen(self, picture: Picture, space: str) -> Picture:
        """A picture with inputs, or one whose features are stored: those of the same space, as blocks are."""
        own = blake2b(space.encode() + picture.digest, digest_size=len(picture.digest)).digest()
        return self.engine.processed(replace(picture, digest=own))

    def prompt_ids(self, call: GenerateCall) -> list[int]:
        """Token ids of a prompt, of any length."""
        prompt, _ = self._prompt(call)
        return prompt.ids

    def _prompt(self, call: GenerateCall) -> SeenPrompt:
        """Token ids and text of the prompt, and its pictures without inputs."""
        if call.messages is not None:
            functions = call.tools.functions if call.tools is not None else None
            given = functions, call.variables, self._answers.wrapper
            reader = self.engine.reader
            if not call.images:
                texts = self._template.prompt if reader is None else reader.texts
                return SeenPrompt(texts(call.messages, *given), ())
            if reader is None:
                raise InvalidInput("messages: the model takes text only, no images", param="messages")
            return reader.prompt(call.messages, call.images, *given)
        return SeenPrompt(self._plain(call), ())

    def _plain(self, call: GenerateCall) -> Prompt:
        """Token ids and text of a prompt without messages."""
        if call.ids is not None:
            for place, token in enumerate(call.ids):
                if not 0 <= token < self._vocabulary_size:
                    text = f"is no token id, the model has {self._vocabulary_size}"
                    raise InvalidInput(f"prompt[{place}]: {token} {text}", param=f"prompt[{place}]")
        text = call.text or ""
        ids = list(call.ids) if call.ids is not None else self._template.plain(text)
        if not ids:
            if self._begin_id is None:
                text = "prompt: no token, and the model has no token that begins a text"
                raise InvalidInput(text, param="prompt")
            ids = [self._begin_id]
        return Prompt(ids, text)

    def collate(self, prepared: Sequence[Prepared]) -> list[GenerationRequest]:
        """The requests; the engine lays their tokens out."""
        return [item.payload for item in prepared]


def vocabulary_size(model: Any) -> int:
    """The number of logits."""
    return int(model.config.get_text_config().vocab_size)


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, by the model's generation settings, its configuration and the tokenizer."""
    ids: set[int] = set()
    for named in (model.generation_config, model.config.get_text_config(), tokenizer):
        ends = getattr(named, "eos_token_id", None)
        ids.update([ends] if isinstance(ends, int) else ends or ())
    return frozenset(ids)
