"""The structs that cross a process border, and nothing else.

Array-like tagged msgspec structs. `ipc.wire.codec` says which of them, and of `ipc.wire.catalogs`, `ipc.wire.stats` and
`ipc.wire.streams`, each side may send.
Durations are nanoseconds, instants are CLOCK_MONOTONIC nanoseconds, costs are tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ipc.catalog.model_config import ModelConfig
from ipc.wire.field_names import FieldNames

VERSION = 16
LANES = ("interactive", "bulk")


class Wire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all wire structs."""


MAX_CHUNKS = 4096
"""Chunks that one document may have."""


class InputItem(Wire, frozen=True):
    """One item: a text or token ids given by the caller, encoded images, and metadata that some families read.

    `spans` are the chunks of a text by their characters, where the caller gives chunks. With `first` the item is a pair
    of texts: `first` stands before `text`, in a score call in place of the query. All items of a score call have a
    `first`, or none has.
    """

    text: str | None = None
    ids: list[int] | None = None
    images: list[bytes] = []
    metadata: dict[str, Any] | None = None
    spans: list[tuple[int, int]] = []
    first: str | None = None


class Chunking(Wire, frozen=True):
    """How documents are divided: `by` "tokens", "sentences" or "spans", with so many of them a chunk, some shared."""

    by: str
    size: int = 1
    overlap: int = 0


class BlockRef(Wire, frozen=True):
    """A block of an arena: offset, data bytes, generation."""

    offset: int
    nbytes: int
    generation: int


class EncodeCall(Wire, frozen=True, tag="encode"):
    """Encode `items` into `outputs` (`dense`, `sparse`, `multivector`).

    With `chunking` the only output is `chunks`: dense vectors of parts of each item, from one pass over the whole item.
    `is_query` is the side of the model that the request states; None states no side, and the items are documents.

    In every call `options` are the model's runtime options with the request's laid over them, `overflow` says what
    happens to an item that is too long (values of `OVERFLOW_POLICIES`), `lora` names an adapter ("":
    none), and `names` is for messages.
    """

    items: list[InputItem]
    outputs: list[str]
    instruction: str | None = None
    is_query: bool | None = None
    options: dict[str, Any] = {}
    overflow: str = "truncate"
    lora: str = ""
    names: FieldNames = FieldNames()
    chunking: Chunking | None = None


class ScoreCall(Wire, frozen=True, tag="score"):
    """How well each of `items` answers `query`, or the text `first` of its own."""

    items: list[InputItem]
    query: InputItem
    instruction: str | None = None
    options: dict[str, Any] = {}
    overflow: str = "truncate"
    lora: str = ""
    names: FieldNames = FieldNames(options="options.")


class ExtractCall(Wire, frozen=True, tag="extract"):
    """What `labels` (in the caller's order) or `output_schema` ask for, found in each of `items`."""

    items: list[InputItem]
    labels: list[str] = []
    output_schema: dict[str, Any] | None = None
    instruction: str | None = None
    options: dict[str, Any] = {}
    overflow: str = "truncate"
    lora: str = ""
    names: FieldNames = FieldNames()


class Region(Wire, frozen=True):
    """Bytes of a client's own shared memory: `key` names the POSIX object (`system`) or is the hex of a CUDA handle."""

    kind: str
    key: str
    offset: int
    nbytes: int
    device: int = 0


class TensorInput(Wire, frozen=True):
    """One named input: `nbytes` raw bytes of its datatype from `start` of the payload, or the bytes of a region."""

    name: str
    datatype: str
    shape: list[int]
    start: int
    nbytes: int
    region: Region | None = None


class TensorOutput(Wire, frozen=True):
    """One wanted output. With a region the worker writes the output there, and the result has none of its bytes."""

    name: str
    region: Region | None = None


class Step(Wire, frozen=True):
    """Place of a request in a sequence; `id` is the correlation id, a number or a text."""

    id: int | str
    start: bool = False
    end: bool = False


class InferCall(Wire, frozen=True, tag="infer"):
    """Run the program over named tensors, to `outputs` in that order. The call is one item.

    `rows` is the batch size, or 1.
    The payload, all inputs that have no region, lies where `Submit` says.
    """

    names: ClassVar[FieldNames] = FieldNames(options="parameters.")
    options: ClassVar[dict[str, Any]] = {}
    overflow: ClassVar[str] = "error"
    lora: ClassVar[str] = ""
    instruction: ClassVar[str | None] = None
    inputs: list[TensorInput]
    outputs: list[TensorOutput]
    rows: int = 1
    parameters: dict[str, bool | int | float | str] = {}
    step: Step | None = None
    priority: int = 0
    items: ClassVar[list[InputItem]] = [InputItem()]


class Sampling(Wire, frozen=True):
    """How the next token is chosen. Every field has the meaning of the chat contract, section 2.5.

    `temperature` None or not above 0 is greedy, and then `top_k`, `top_p` and `min_p` have no effect. `top_k` up to 0,
    and `top_p` or `min_p` outside the open interval (0, 1), are off. DRY runs with a `dry_multiplier` only.
    `logit_bias` is by token id. `logprobs` None asks for none; a number asks for so many alternatives beside the chosen
    token. `seed` None takes a random seed; choice k of a request samples with `seed + k`.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float | None = None
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    seed: int | None = None


class Ending(Wire, frozen=True):
    """What ends a choice beside the model's own end token: `max_tokens` (None: the context), texts and token ids.

    A text of `stop` ends the choice and is not part of the answer. `ignore_eos` goes on after an end token.
    """

    max_tokens: int | None = None
    stop: list[str] = []
    stop_ids: list[int] = []
    ignore_eos: bool = False


class Grammar(Wire, frozen=True):
    """A grammar of llguidance that the text must match.

    `kind` is "json_schema", "json_object", "regex", "lark" or "llguidance"; `value` is JSON text of a schema, a regular
    expression, a Lark grammar, or JSON text of llguidance's own form. "json_object" needs no value. `field` of the
    request asks for the grammar.
    """

    kind: str
    value: str = ""
    field: str = "grammar"


class ToolUse(Wire, frozen=True):
    """The functions that the model may call. A request whose choice is "none" has none of them.

    `functions` have the nested OpenAI form, `{"type": "function", "function": {"name", "description", "parameters"}}`.
    `choice` is "auto", "required" or "named"; "named" forces `name`. `allowed` restricts the functions that may
    be called (empty: all). `strict` names the functions whose arguments must match their schema. Without `parallel` the
    model makes one call at most, and so with "named".
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    name: str = ""
    allowed: list[str] = []
    strict: list[str] = []
    parallel: bool = True

    @property
    def is_single(self) -> bool:
        """Whether an answer has one call at most."""
        return not self.parallel or self.choice == "named"

    @property
    def restricts(self) -> bool:
        """Whether a grammar must hold the answer to something: a call, certain functions, or strict arguments."""
        return self.is_forced or bool(self.strict) or bool(self.allowed)

    @property
    def is_forced(self) -> bool:
        """Whether the answer must call a function."""
        return self.choice in ("required", "named")


class GenerateCall(Wire, frozen=True, tag="generate"):
    """Generate `n` choices for one prompt: `messages` (rendered with the model's chat template), `text`, or `ids`.

    Messages have the form of transformers' chat templates: `role`, `content` (a string or None), and where they belong
    `name`, `tool_calls` (arguments as objects, or as JSON text where a number needs over 64 bits), `tool_call_id`,
    `reasoning_content`. The content of a message with pictures is a list of parts, `{"type": "text", "text"}` and
    `{"type": "image"}`; `images` are the encoded pictures of all messages, in the order of these places. `variables`
    are further variables of the template, such as `enable_thinking`; a true `continue_final_message` ends the prompt
    within the last message instead. With `truncate` a prompt that is too long loses its beginning. What a worker keeps
    of a prompt or a grammar is found by calls of the same `space` only; `salt` is the part of the space that the
    request names.
    `counts_only` asks for the number of prompt tokens and generates nothing. With `splits` reasoning and tool calls are
    told apart from the text; else all text is TEXT. With `tells_prompt` the text of the prompt comes before all
    choices, and `prompt_logprobs` adds the log probability of each of its tokens, beside so many of the likeliest.
    `lora` names the model's LoRA adapter to generate with; empty without any.
    """

    names: ClassVar[FieldNames] = FieldNames()
    options: ClassVar[dict[str, Any]] = {}
    overflow: ClassVar[str] = "error"
    instruction: ClassVar[str | None] = None
    items: ClassVar[list[InputItem]] = [InputItem()]
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    ids: list[int] | None = None
    tools: ToolUse | None = None
    variables: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    ending: Ending = Ending()
    grammar: Grammar | None = None
    n: int = 1
    truncate: bool = False
    splits: bool = True
    counts_only: bool = False
    tells_prompt: bool = False
    prompt_logprobs: int | None = None
    salt: str = ""
    space: str = ""
    images: list[bytes] = []
    lora: str = ""

    @property
    def continues_text(self) -> bool:
        """Whether the answer goes on with a text: a bare prompt, or the last message."""
        return self.messages is None or bool(self.variables.get("continue_final_message"))


class TokenizeCall(Wire, frozen=True, tag="tokenize"):
    """The tokens of each item's text, or the text of each item's token ids; with `prompt` the tokens of that prompt.

    With `special` texts get the special tokens of the model around them, and texts of ids show special tokens.
    """

    options: ClassVar[dict[str, Any]] = {}
    overflow: ClassVar[str] = "error"
    lora: ClassVar[str] = ""
    instruction: ClassVar[str | None] = None
    items: list[InputItem]
    special: bool
    names: FieldNames = FieldNames()
    prompt: GenerateCall | None = None


Call = EncodeCall | ScoreCall | ExtractCall | InferCall | GenerateCall | TokenizeCall


class Hello(Wire, frozen=True, tag="hello"):
    """A frontend registers. `tag` is a random 63-bit name of this registration."""

    version: int
    slot: str
    tag: int
    pid: int
    start_ticks: int


class Work(Wire, frozen=True):
    """What a request asks of a model, planned once in a frontend; an engine makes copies with other deadlines or items.

    `cost` is the frontend's estimate. `caller` is the public id of the API key, or empty; callers take turns by their
    `share`, a weight. `parts` above 0 asks for a stream, of which so many parts may wait. `traceparent` is empty for a
    request that is not traced. `deadline_ns` and `start_by_ns` are instants of one host: 0 until the engine whose
    workers share the host's clock has set them. `start_by_ns` above 0 ends the time in queues. `tensors`: a request of
    named tensors, whose runs the statistics of the tensor protocols count.
    """

    model: str
    call: Call
    deadline_ns: int
    cost: int
    request_id: str
    traceparent: str = ""
    lane: str = "interactive"
    caller: str = ""
    share: float = 1.0
    parts: int = 0
    start_by_ns: int = 0
    tensors: bool = False

    @property
    def waits_until_ns(self) -> int:
        """Until when the request waits for its turn on a device."""
        return min(self.start_by_ns or self.deadline_ns, self.deadline_ns)

    @property
    def step(self) -> Step | None:
        """Place of the request in its sequence; None for a request without a sequence."""
        return self.call.step if isinstance(self.call, InferCall) else None


class Written(Wire, frozen=True):
    """What earlier workers have written of a text that another worker can carry on; `choices` is empty at first.

    `choices` are the token ids of each choice, uint32 in the byte order of the host, which no entry of `Deltas` tells
    again. `ended`: whether the end of the choice was told. `seed` is that of a call without a seed. `weights` are those
    that began the text, as its first worker told (`ipc.wire.streams.Start`); no others go on with the text.
    """

    seed: int
    choices: list[bytes] = []
    ended: list[bool] = []
    weights: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether the client has the beginning of the answer."""
        return bool(self.choices)


class Submit(Wire, frozen=True, tag="submit"):
    """One request. `solo` asks for a batch of its own; text shares batches from its first token on unless `apart`.

    The payload lies in `block` of the frontend's arena or, without, travels with the message. With `written` the
    entries of a text tell the ids of its tokens.
    """

    id: int
    work: Work
    solo: bool = False
    block: BlockRef | None = None
    apart: bool = False
    written: Written | None = None


class Cancel(Wire, frozen=True, tag="cancel"):
    """The caller of request `id` has gone."""

    id: int


class Release(Wire, frozen=True, tag="release"):
    """The lease on a block ends."""

    offset: int
    generation: int


class Load(Wire, frozen=True, tag="load"):
    """Load this model, for a request that waits; `explicit`: somebody named the model, also after a failure."""

    model: str
    explicit: bool = False


class Unload(Wire, frozen=True, tag="unload"):
    """Finish the open work of this model and give its memory back."""

    model: str


class Ping(Wire, frozen=True, tag="ping"):
    """Are you there?"""

    seq: int


class Watch(Wire, frozen=True, tag="watch"):
    """Somebody at this frontend watches the worker (send `Stats`), or no longer."""

    on: bool


class Inputs(Wire, frozen=True, tag="inputs"):
    """Where the sender's arena for large inputs is; sent before every block, in case of a failed mapping."""

    path: str
    epoch: str


class Goodbye(Wire, frozen=True, tag="goodbye"):
    """The sender does not know the other side (any more)."""


class ModelStatus(Wire, frozen=True):
    """State of one model on one worker: available, loading, loaded, unloading or failed.

    `load_s`: what its last load took or this one may take. `attempts`: all loads. Error: the last load's, until one
    succeeds. `image_tokens`: about an image's cost. `loras`: loading or loaded. `revision`: of the files of its entry;
    `next`: revision of a replacement that is still loading. If set, the error describes the replacement.
    `uses`: names of options and fields that the loaded model reads; what else a request carries changes nothing.
    `max_sequences`: sequences that a loaded model generates together, 1 for a model that packed steps do not suit.
    `identity`: stands for all that decides the numbers of a loaded model (`workers.lifecycle.fingerprint`).
    `labels`: of a loaded model that has labels, in the order of its outputs for a classifier.
    `tools`: how a loaded model that generates text is shown functions. `limited_by`: the setting that keeps
    `max_sequence_length` below what a loaded model could take. `sees`: a loaded model that generates text reads
    pictures of messages. `stage`: what the load does now, empty while the load waits for its turn. `left_s`: whole
    seconds that the load is still expected to take, 0 if unknown. `precision`, `weight_bytes`, `cache_bytes`,
    `cache_tokens`: of a loaded model that generates text, what its linear layers are in memory, the bytes of all
    weights, and the cache that is left for texts. `architecture`, `parameters`, `stored`: of such a model, its type in
    its configuration, the number of its weights, and what most of these are in a GGUF file. `template`: the chat
    template of such a model, in Jinja.
    """

    name: str
    state: str
    device: str = ""
    memory_bytes: int = 0
    max_sequence_length: int = 0
    dims: dict[str, int] = {}
    progress: float = 0.0
    load_s: float = 0.0
    error_class: str = ""
    error_message: str = ""
    attempts: int = 0
    permanent: bool = False
    image_tokens: int = 0
    loras: dict[str, str] = {}
    config: ModelConfig | None = None
    revision: str = ""
    next: str = ""
    uses: list[str] = []
    max_sequences: int = 0
    identity: str = ""
    labels: list[str] = []
    tools: str = ""
    limited_by: str = ""
    sees: bool = False
    stage: str = ""
    left_s: int = 0
    precision: str = ""
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_tokens: int = 0
    architecture: str = ""
    parameters: int = 0
    stored: str = ""
    template: str = ""


class Credits(Wire, frozen=True, tag="credits"):
    """How much work this session may add at a worker, in predicted seconds of the device.

    `room_s`: for queries, below 0 for a session above its part; `bulk_room_s`: for bulk work. `wait_s`, `bulk_wait_s`:
    until the device has begun all that waits now. `rate`: cost a second that the device does. `step_s`: whole seconds
    for which the present step of the device runs. `others_s`: waiting work of other sessions. `prices`: seconds for a
    token of each model that has run or has work in the queue. `floor`: tokens of any model that the session may send
    whatever the room.
    """

    room_s: float
    wait_s: float
    rate: float
    step_s: int = 0
    bulk_room_s: float = 0.0
    bulk_wait_s: float = 0.0
    others_s: float = 0.0
    prices: dict[str, float] = {}
    floor: int = 0


class Welcome(Wire, frozen=True, tag="welcome"):
    """The worker accepts a registration and says where its arena is; `uuid` names its device.

    `thread` is one that lives as long as the worker (`ipc.processes.liveness.lasting_thread`), 0 without one.
    """

    version: int
    epoch: str
    pid: int
    start_ticks: int
    arena: str
    device: str
    threads: int
    models: list[ModelStatus]
    credits: Credits
    preloaded: bool = True
    free_bytes: int = 0
    uuid: str = ""
    thread: int = 0


class Models(Wire, frozen=True, tag="models"):
    """States of these models of this worker changed; all other states are as `Welcome` or an earlier message said.

    `gone` names models that the worker knows no more. `preloaded`: everything that is loaded at the start has been
    tried. `free_bytes`: the rest of the memory budget.
    """

    models: list[ModelStatus]
    gone: list[str] = []
    preloaded: bool = True
    free_bytes: int = 0


class TensorRef(Wire, frozen=True):
    """One named tensor inside a block or inline frame; `start` is its first byte."""

    name: str
    dtype: str
    shape: list[int]
    start: int


class TensorInfo(Wire, frozen=True):
    """One output of an infer call; its raw bytes are the uint8 tensor of that name, unless they went to a region."""

    name: str
    datatype: str
    shape: list[int]
    nbytes: int


class ItemError(Wire, frozen=True):
    """Item `index` failed while its neighbours did not."""

    index: int
    code: str
    message: str


class TextTiming(Wire, frozen=True):
    """Phases of one generated text in nanoseconds.

    `decode_ns` is the part of `Timing.prepare_ns` in which pictures were decoded. The others are parts of
    `Timing.device_ns`: the text waited for the features of its pictures, its prompt was read up to the first token, and
    the later tokens were written. The rest is the wait for a place in a step.
    """

    decode_ns: int = 0
    see_ns: int = 0
    prefill_ns: int = 0
    write_ns: int = 0


class Timing(Wire, frozen=True):
    """Phases of one request in nanoseconds, and the number of batches that held its items.

    `collate_ns` is the part of `device_ns` in which inputs were joined. `text` is there for generated text.
    """

    prepare_ns: int = 0
    queue_ns: int = 0
    device_ns: int = 0
    copy_ns: int = 0
    batches: int = 0
    collate_ns: int = 0
    text: TextTiming | None = None


class BatchTimes(Wire, frozen=True):
    """One batch that a traced request took part in, in CLOCK_MONOTONIC nanoseconds.

    `members` are the traceparents of the traced requests in it, the first `MAX_MEMBERS` of them; the counts are of all.
    """

    MAX_MEMBERS: ClassVar[int] = 128
    began_ns: int
    computed_ns: int
    copied_ns: int
    items: int
    tokens: int
    requests: int
    members: list[str]


class Trace(Wire, frozen=True):
    """The instants of a traced request in CLOCK_MONOTONIC nanoseconds; 0 for a phase that did not happen."""

    prepare_began_ns: int
    prepare_ended_ns: int
    queued_ns: int
    batches: list[BatchTimes]


class Result(Wire, frozen=True, tag="result"):
    """The answer to `id`.

    `tensors` lie in `block`, or in the message's payload when `block` is None; `loose` ones, of unforeseen size, always
    in the payload. `rows`: rows per item, where they are not one. `infos`: outputs of an infer call, in the order
    wanted. `identity`: of the model that computed.
    """

    id: int
    block: BlockRef | None
    tensors: list[TensorRef]
    tokens: list[int]
    truncated: list[int]
    errors: list[ItemError]
    timing: Timing
    loose: list[TensorRef] = []
    rows: dict[str, list[int]] = {}
    trace: Trace | None = None
    infos: list[TensorInfo] = []
    identity: str = ""


class Failure(Wire, frozen=True, tag="failure"):
    """Request `id` failed with a code of `ipc.errors`."""

    id: int
    code: str
    message: str
    retry_after_s: float | None = None
    detail: dict[str, Any] = {}


class InputFreed(Wire, frozen=True, tag="input_freed"):
    """The failed or cancelled request `id` reads its input block no more; a `Result` says so by itself."""

    id: int


class Leaving(Wire, frozen=True, tag="leaving"):
    """This worker drains: send nothing new."""


class Pong(Wire, frozen=True, tag="pong"):
    """Yes."""

    seq: int
