"""The vision tower of one model: makes features of pictures in turns between the steps of text, and keeps them.

1. A sequence that begins asks for the features of its pictures (`Tower.ready`). What `FeatureStore` knows by digest is
   not computed again. A sequence that lacks some lets others pass.
2. `Tower.turn` takes the pictures of waiting sequences in their order, as many as the turn has tokens for and one at
   least, and runs the tower over them as one batch. A turn has so many tokens that it takes about as long as a chunk of
   a prompt, by the weights of both.
3. The batch runs in a greenlet that stops before a layer of the tower that exceeds the turn's tokens. The next turn
   goes on there. So a large picture takes several turns, and text waits for one turn or one layer at most.
4. If a batch of several pictures fails, each of them runs alone. A picture that fails alone is the error of the
   sequences that wait for the picture (`Unseen`).

Preparing threads make the inputs of a picture whose features are not stored, unless too many inputs wait. Features may
be gone by the time that they are needed. Inputs that are missing are made by a thread of the tower, a few ahead.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import greenlet
import torch

from workers import foreign
from workers.device import oom
from workers.generation.features import FeatureStore
from workers.generation.pictures.family import Features, Picture
from workers.generation.pictures.reading import PictureReader
from workers.generation.rope import has_axes
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Unseen
from workers.generation.sight import Sight

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""A turn without another picture waits so long for inputs that a thread makes."""
_MOST_AHEAD = 2
"""Pictures whose inputs the tower's thread makes before their turn: inputs take memory."""
_TOKEN_TYPES = "token_type_ids"
"""The argument of models whose placeholders see the later ones of their picture."""

Encode = Callable[[Any, Sequence[Picture]], Sequence[Features]]


class Tower:
    """The vision tower of one model. One thread."""

    def __init__(self, model: Any, reader: PictureReader, store: FeatureStore) -> None:
        """Stands before each layer of the tower from now on, to stop there."""
        self.reader, self.store, self.pictures_seen = reader, store, 0
        self._model = model
        self._in_axes, self._both_ways = has_axes(model), looks_both_ways(model)
        self._layers = _layers(model)
        for layer in self._layers:
            layer.register_forward_pre_hook(self._pass)
        if self._layers:
            # NOTE: what stands behind the last layer fits the features to the text, and has a turn of its own.
            self._layers[-1].register_forward_hook(self._pass)
        self._weight = _weight(model)
        self._run: _Run | None = None
        """A batch that has to go on."""
        self._running: _Run | None = None
        """The batch of the present turn."""
        self._is_asked = False
        self._single: set[bytes] = set()
        """Digests of pictures from batches that failed."""
        self._threads = ThreadPoolExecutor(1, "picture-inputs")
        self._processing: dict[bytes, Future[Picture]] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of pictures in `GenerationStats`."""
        store = self.store
        return self.pictures_seen, store.nbytes, store.lookups, store.hits, store.evictions

    def forget(self) -> None:
        """Forget all pictures so far: those of a proof, which nobody has asked for."""
        self.store, self.pictures_seen = FeatureStore(self.store.limit_nbytes), 0

    def sight(self, pictures: list[Picture], block_tokens: int) -> Sight:
        """The pictures of one choice in an engine with such blocks."""
        return Sight(pictures, block_tokens, in_axes=self._in_axes, both_ways=self._both_ways)

    def ready(self, sequence: Choice) -> bool:
        """Whether a sequence holds the features of all pictures that it has to compute; asks for the others."""
        sight = sequence.sight
        assert sight is not None
        if sight.lacking:
            self._is_asked = True
            return False
        for picture in sight.beyond(sequence.computed):
            digest = picture.digest
            if digest in sight.held:
                continue
            if (features := self.store.hold(digest)) is None:
                sight.lacking.add(digest)
            else:
                sight.take(digest, features)
        if sight.lacking:
            self._is_asked = True
            sequence.request.phases.asks()
        return not sight.lacking

    def release(self, sequence: Choice) -> None:
        """A sequence needs no features any more, or not for now."""
        sight = sequence.sight
        assert sight is not None
        for digest in sight.held:
            self.store.release(digest)
        sight.close()
        sequence.request.phases.sees()

    def turn_tokens(self, prefill_tokens: int) -> int:
        """Tokens of pictures that cost as much as so many tokens of a prompt, one at least."""
        return max(1, int(prefill_tokens * self._weight))

    def turn(self, waiting: Iterable[Choice], prefill_tokens: int) -> None:
        """Make features for sequences that wait, for about as long as a chunk of so many tokens of a prompt takes.

        Raises `Unseen`.
        """
        if self._is_asked:
            lacking = [each for each in waiting if each.sight is not None and each.sight.lacking]
            lacked = {digest for each in lacking if each.sight is not None for digest in each.sight.lacking}
            self._processing = {digest: each for digest, each in self._processing.items() if digest in lacked}
            self._advance(lacking, prefill_tokens)

    @torch.inference_mode()
    def _advance(self, lacking: Sequence[Choice], prefill_tokens: int) -> None:
        # NOTE: in inference mode as a whole. A batch that ends leaves the thread in the mode in which the batch began.
        tokens = self.turn_tokens(prefill_tokens)
        run, self._run = self._run, None
        if run is not None and not run.goes_on(lacking):
            run.close()
            run = None
        run = run or self._next(lacking, tokens)
        if run is None:
            self._wait()
            self._is_asked = bool(lacking)
            return
        self._running = run
        try:
            features = run.advance(tokens)
        except BaseException as raised:
            oom.end_if_broken(raised)
            self._failed(run.pictures, lacking, foreign.error_of(raised))
        else:
            self._run = run if features is None else None
            for picture, found in zip(run.pictures, features or (), strict=features is not None):
                self._deliver(picture, found, lacking)
        finally:
            self._running = None

    def _next(self, lacking: Sequence[Choice], tokens: int) -> _Run | None:
        """The next batch: pictures of the first sequences that lack some."""
        chosen: dict[bytes, Picture] = {}
        room = tokens
        for number, picture in enumerate(self._wanted(lacking)):
            if picture.digest in chosen:
                continue
            if chosen and (room < picture.cost or picture.digest in self._single):
                break
            processed = self._processed(picture, lacking, is_first=not number)
            if processed is None:
                continue
            chosen[picture.digest] = processed
            room -= picture.cost
            if picture.digest in self._single:
                break
        if not chosen:
            return None
        wanting = [each for each in lacking if each.sight is not None and chosen.keys() & each.sight.lacking]
        return _Run(
            self._model, list(chosen.values()), wanting, self.reader.family.encode, max(1, len(self._layers))
        )

    def _wanted(self, lacking: Sequence[Choice]) -> Iterable[Picture]:
        """The pictures that sequences lack, in the order of the sequences."""
        for number, sequence in enumerate(lacking):
            # NOTE: the first sequence always goes on, or sequences that hold half of their features would wait forever.
            if number and self.store.held_nbytes >= self.store.limit_nbytes:
                return
            assert sequence.sight is not None
            for picture in list(sequence.sight.pictures):
                if picture.digest in sequence.sight.lacking:
                    yield picture

    def _processed(self, picture: Picture, lacking: Sequence[Choice], *, is_first: bool) -> Picture | None:
        """The picture with its inputs; None until a thread has made these. Raises `Unseen`."""
        if picture.inputs:
            return picture
        future = self._processing.get(picture.digest)
        if future is None:
            # NOTE: the first picture of all goes on even where others, which are not wanted yet, are ready.
            if len(self._processing) >= _MOST_AHEAD and not is_first:
                return None
            future = self._processing[picture.digest] = self._threads.submit(self.reader.processed, picture)
        if not future.done():
            return None
        del self._processing[picture.digest]
        try:
            return future.result()
        except BaseException as raised:
            oom.end_if_broken(raised)
            self._refuse({picture.digest}, lacking, foreign.error_of(raised))
            return None

    def _wait(self) -> None:
        """Give inputs that a thread makes a moment, where nothing else is to be done."""
        for future in [each for each in self._processing.values() if not each.done()][:1]:
            with suppress(TimeoutError):
                future.exception(_PATIENCE_S)

    def _deliver(self, picture: Picture, features: Features, lacking: Sequence[Choice]) -> None:
        """Give the features of a picture to all sequences that lack them."""
        digest, holders = picture.digest, 0
        self._single.discard(digest)
        self.pictures_seen += 1
        for sequence in lacking:
            if sequence.sight is not None and digest in sequence.sight.lacking:
                sequence.sight.take(digest, features)
                holders += 1
                if not sequence.sight.lacking:
                    sequence.request.phases.sees()
        self.store.put(digest, features, holders)

    def _failed(self, pictures: Sequence[Picture], lacking: Sequence[Choice], error: Exception) -> None:
        """Have each picture of a failed batch tried alone. Raises `Unseen` for a picture that was alone."""
        if oom.is_out_of_memory(error):
            oom.forget_frames(error)
            oom.release_cached()
        log.warning("the vision tower failed on %d pictures (%s)", len(pictures), type(error).__name__)
        digests = {picture.digest for picture in pictures}
        if len(digests) > 1:
            self._single |= digests
        else:
            self._single -= digests
            self._refuse(digests, lacking, error)

    @staticmethod
    def _refuse(digests: set[bytes], lacking: Sequence[Choice], error: Exception) -> None:
        unseen = [each for each in lacking if each.sight is not None and digests & each.sight.lacking]
        if unseen:
            raise Unseen(unseen, error) from error

    def _pass(self, *_: Any) -> None:
        """A layer of the tower is about to run, or the last one has."""
        if self._running is not None:
            self._running.passed()


class _Run:
    """One batch of pictures on its way through the tower, in a greenlet of its own."""

    def __init__(
        self, model: Any, pictures: Sequence[Picture], wanting: Sequence[Choice], encode: Encode, layers: int
    ) -> None:
        """`wanting` are the sequences that wait for a picture of the batch; the tower has so many layers."""
        self.pictures = pictures
        self._wanting = wanting
        self._layer_cost = sum(picture.cost for picture in pictures) / layers
        self._left = 0.0
        self._greenlet = greenlet.greenlet(lambda: encode(model, pictures))

    def goes_on(self, lacking: Sequence[Choice]) -> bool:
        """Whether some sequence still wants the batch, and none that does rests for now."""
        wanting = [each for each in self._wanting if not each.done]
        return bool(wanting) and all(each in lacking for each in wanting)

    def advance(self, tokens: int) -> Sequence[Features] | None:
        """Go on for so many tokens. The features of the pictures, or None where the batch is not at its end."""
        # NOTE: the turn of the device thread that goes on may be another one than the turn before.
        self._greenlet.parent, self._left = greenlet.getcurrent(), max(float(tokens), self._layer_cost)
        features: Sequence[Features] | None = self._greenlet.switch()
        return features

    def passed(self) -> None:
        """Stop before a layer that exceeds the tokens of the turn. A turn has one layer at least."""
        if self._left < self._layer_cost:
            self._greenlet.parent.switch(None)
        self._left -= self._layer_cost

    def close(self) -> None:
        """End the batch where it is."""
        self._greenlet.parent = greenlet.getcurrent()
        try:
            self._greenlet.throw()
        except BaseException as raised:
            # NOTE: nobody waits for the pictures any more.
            log.error("a vision tower failed when its batch was ended", exc_info=foreign.error_of(raised))


def looks_both_ways(model: Any) -> bool:
    """Whether the placeholders of a picture see each other in both directions, by the types of tokens (Gemma 3)."""
    return _TOKEN_TYPES in inspect.signature(model.forward).parameters


def _layers(model: Any) -> list[torch.nn.Module]:
    """The layers of a model outside of its text: the modules of the outermost lists."""
    text = set(model.get_decoder().modules())
    layers: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        for child in module.children():
            if child in text:
                continue
            if isinstance(child, torch.nn.ModuleList):
                layers.extend(child)
            else:
                visit(child)

    visit(model)
    return layers


def _weight(model: Any) -> float:
    """How many tokens of a picture cost as much as one of a text: by the weights that each of them meets."""
    text = {id(parameter): parameter.numel() for parameter in model.get_decoder().parameters()}
    words = model.get_output_embeddings()
    text |= {id(parameter): parameter.numel() for parameter in words.parameters()}
    tower = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in text)
    return sum(text.values()) / max(1, tower)
