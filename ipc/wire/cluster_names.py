"""Names at the brokers: subjects, streams, consumers and buckets of one cluster.

A model's name may hold any printable characters, and a subject has dots between its tokens, `*` and `>` for any token.
So `token_of` writes a name as SIE's gateway does, and a digest stands for the end of a long name. Two models may share
a token: readers go by the `model_id` inside an item, never by its subject.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ipc.errors import InvalidInput

MOST_TOKEN = 160
"""Characters of a token; a longer name ends with the digest of all of its characters."""
INBOX = "_INBOX"
_REPLACED = str.maketrans({"/": "__", ".": "_dot_", "*": "_", ">": "_", " ": "_"})
_ID, _QUEUE = re.compile(r"[A-Za-z0-9_-]{1,64}"), re.compile(r"[A-Za-z0-9_-]{1,160}")


UNKNOWN = "unknown"
"""Stands for the model in subjects of dead letters about messages that name none."""
ALL_BUNDLES = "_all"
"""Stands for the bundle in the subject of changes that gateways hear; no name of a bundle."""


def is_id(text: str) -> bool:
    """Whether `text` can be the id of a gateway, a box or a life, and so one token of a subject."""
    return _ID.fullmatch(text) is not None


def token_of(model: str) -> str:
    """The token of a model in subjects. Raises `InvalidInput` for an empty name or unprintable characters."""
    if not model or not model.isprintable():
        raise InvalidInput(f"model: {model[:64]!a} has characters that no name of a model may have")
    token = model.translate(_REPLACED)
    if len(token) <= MOST_TOKEN:
        return token
    digest = hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
    return f"{token[: MOST_TOKEN - len(digest) - 1]}-{digest}"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the cluster `cluster`. A cluster without a name has the names of SIE's gateway, without a prefix."""

    cluster: str = ""

    def _subject(self, *tokens: str) -> str:
        return ".".join((self.cluster, *tokens) if self.cluster else tokens)

    def _flat(self, name: str) -> str:
        return f"{self.cluster}_{name}" if self.cluster else name

    def work(self, model: str, pool: str) -> str:
        """Subject of the queue of a pool for one model."""
        return self._subject("sie", "work", token_of(model), pool)

    def works(self, pool: str) -> str:
        """Subjects of the queue of a pool."""
        return self._subject("sie", "work", "*", pool)

    def stream(self, pool: str) -> str:
        """Stream of the queue of a pool."""
        return self._flat(f"WORK_POOL_{pool}")

    def consumer(self, bundle: str, pool: str) -> str:
        """Consumer from which bridges of a bundle pull."""
        return f"{bundle}_{pool}"

    def box_work(self, box: str, life: str) -> str:
        """Subject of items for one life of a box."""
        return self._subject("penstock", "box", box, life, "work")

    def box_word(self, box: str, life: str) -> str:
        """Subject of words for one life of a box."""
        return self._subject("penstock", "box", box, life, "word")

    def box_beat(self, box: str) -> str:
        """Subject of signs of life of a box; `*` for all boxes."""
        return self._subject("penstock", "beat", "box", box)

    def box_health(self, box: str) -> str:
        """Subject of the figures of a box; `*` for all boxes."""
        return self._subject("sie", "health", box)

    def gateway_beat(self, router: str) -> str:
        """Subject of signs of life of a gateway; `*` for all gateways."""
        return self._subject("penstock", "beat", "gateway", router)

    @property
    def models(self) -> str:
        """Bucket of the models of all boxes."""
        return self._flat("penstock_models")

    def dead(self, model: str) -> str:
        """Subject of dead letters about a model. Raises `InvalidInput` as `token_of` does."""
        return self._subject("sie", "dlq", token_of(model))

    def is_queue(self, stream: str, consumer: str) -> bool:
        """Whether a stream is the queue of a pool of this cluster, and the consumer may be one of its boxes."""
        return stream.startswith(self.stream("")) and all(map(_QUEUE.fullmatch, (stream, consumer)))

    def config_changes(self, bundle: str = ALL_BUNDLES) -> str:
        """Subject of changes of configurations for the boxes of a bundle; without one, of all changes for gateways."""
        return self._subject("sie", "config", "models", bundle)

    @property
    def dead_any(self) -> str:
        """Subjects of all dead letters."""
        return self._subject("sie", "dlq", "*")

    @property
    def dead_letters(self) -> str:
        """Stream of dead letters."""
        return self._flat("DEAD_LETTERS")

    @property
    def pools(self) -> str:
        """Bucket of the pools."""
        return self._flat("penstock_pools")

    @property
    def configs(self) -> str:
        """Bucket of the configurations of models."""
        return self._flat("penstock_configs")

    @property
    def shared(self) -> str:
        """Bucket of the inputs on which workers and boxes died."""
        return self._flat("penstock_shared")

    def agents(self, store: str) -> str:
        """Bucket of the rows of a store: responses, files, skills, sessions or approvals."""
        return self._flat(f"penstock_agents_{store}")

    @property
    def files(self) -> str:
        """Bucket of the bytes of files and of large rows."""
        return self._flat("penstock_files")

    @property
    def config_keys(self) -> str:
        """Bucket of the first answers to changes of configurations, by their Idempotency-Key."""
        return self._flat("penstock_config_keys")


def inbox(router: str) -> str:
    """Subjects of all answers to a gateway."""
    return f"{INBOX}.{router}.>"


def results(router: str) -> str:
    """Subject of results for a gateway."""
    return f"{INBOX}.{router}.results"


def words(router: str) -> str:
    """Subject of claims and other words of boxes for a gateway."""
    return f"{INBOX}.{router}.words"


def texts(router: str) -> str:
    """Subject of pieces of text for a gateway."""
    return f"{INBOX}.{router}.texts"


def parts(router: str) -> str:
    """Subject of parts of answers for a gateway."""
    return f"{INBOX}.{router}.parts"


def row_key(box: str, model: str) -> str:
    """Key of a model of a box in the bucket of models; `model` empty: the key of the box itself."""
    return box if not model else f"{box}.{hashlib.blake2b(model.encode(), digest_size=16).hexdigest()}"
