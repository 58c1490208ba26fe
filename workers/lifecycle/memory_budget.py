"""The memory that the weights of models may take on this worker, and the memory that a load took.

On CUDA the allocator measures a load: the bytes given out after the load less those before, both read on the device
thread, where no batch runs then. Loads that overlap cannot be told apart, so each counts the bytes that its adapter
states. On CPU the parameters and buffers count.

Which model has to leave the memory (`order`, `victims`):

1. Pinned models stay.
2. Models without open work go before models with work; among equals the least recently used model goes first.
3. The last loaded model stays, unless the caller says that even it may go.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ipc.settings import Settings
from workers.adapters.base import Adapter
from workers.device.devices import Device
from workers.loading.gguf_file import read_model
from workers.loading.program_files import external_files, nbytes_of
from workers.loading.quantized_files import Plan, plain_plan, read_plan, stated_config
from workers.loading.quantized_parts import QuantizedRefused
from workers.loading.stored_files import weight_files

TRIM_AFTER_BYTES = 128 << 20
TRIM_EVERY_S = 600.0
KEPT_BYTES = 1 << 30
"""The C library takes blocks up to this size from the heap, and keeps as many free bytes at its top."""
_NBYTES = {"int8": 1.01, "int4": 0.63, "fp8": 1.01}
"""Bytes of a number and of its part of the scales, by the kind of quantised layers."""
_MATRIX = 2
_FLOATS = ("embed", "embd", "wte", "wpe", ".experts.", "visual.", "vision_", "audio_tower.")
"""Parts of the names of weights that stay floats."""
_TABLES = ("embed_tokens.weight", "token_embd.weight", "wte.weight", "word_embeddings.weight")
"""Ends of the names of tables of embeddings that may be the head too."""
_SCALED_TABLES = ("gemma", "minicpm3", "biogpt", "xglm")
"""Parts of the types of models whose tables give other rows than they hold, and so stay floats."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Budget:
    """`nbytes` bounds all models together; `total_nbytes` is the memory that there is."""

    nbytes: int
    total_nbytes: int


def budget_of(settings: Settings, device: Device) -> Budget:
    """The budget by `worker.memory_budget_bytes`, else `memory_pressure_percent` of the device or of free memory."""
    if device.torch.type == "cuda":
        total = int(torch.cuda.get_device_properties(device.torch).total_memory)
    else:
        total = available_bytes() // settings.worker_count
    return Budget(
        settings.worker.memory_budget_bytes or total * settings.worker.memory_pressure_percent // 100, total
    )


def free_bytes(settings: Settings, device: Device) -> int:
    """Bytes of the device that nobody uses, within the budget; on CPU this worker's part of the host's free memory."""
    budget = budget_of(settings, device).nbytes
    if device.torch.type == "cuda":
        return min(budget, int(torch.cuda.mem_get_info(device.torch)[0]))
    return min(budget, available_bytes() // settings.worker_count)


def available_bytes() -> int:
    """Bytes of this host that can be had without swapping, within the limit of its control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def estimate(
    directory: Path,
    program: str = "",
    gguf: str = "",
    dtype: torch.dtype | None = None,
    quantization: str = "",
) -> int:
    """Bytes of the weight files, or of the files of a program: about the memory that a load will take.

    With `dtype` these are the bytes of the numbers in this type, where a GGUF file or quantised weights hold them. With
    `quantization` weights of two axes take the bytes of this kind, but for those that stay floats. A table of
    embeddings that is the head too has two forms of int8 on a CPU, where such a load has float32.
    """
    if quantization and dtype is not None:
        with suppress(QuantizedRefused):
            plan = None if gguf else read_plan(directory) or plain_plan(directory)
            weights = list(_shapes(plan, directory / gguf if gguf else None))
            shared = _shared_table(_family(plan, directory, gguf), {name for name, *_ in weights})
            nbytes = 0.0
            for name, count, axes in weights:
                if name == shared and dtype == torch.float32:
                    nbytes += count * 2 * _NBYTES["int8"]
                elif axes == _MATRIX and not _stays(name):
                    nbytes += count * _NBYTES[quantization]
                else:
                    nbytes += count * dtype.itemsize
            if nbytes:
                return int(nbytes)
    if gguf and dtype is not None:
        return read_model(directory / gguf).values * dtype.itemsize
    if program:
        path = directory / program
        return nbytes_of(path, external_files(path))
    if dtype is not None and not gguf:
        # The load tells what is wrong with weights that are not read.
        with suppress(QuantizedRefused):
            plan = read_plan(directory)
            if plan is not None:
                return plan.values * dtype.itemsize
    files = weight_files(directory, gguf)
    return sum(path.stat().st_size for path in files)


def _shapes(plan: Plan | None, gguf: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, numbers and axes of each weight of a plan, or of a GGUF file."""
    if gguf is not None:
        for name, stored in read_model(gguf).tensors.items():
            yield name, math.prod(stored.shape), len(stored.shape)
    elif plan is not None:
        for name, weight in plan.quantized.items():
            yield name, math.prod(weight.shape), _MATRIX
        for name, part in plan.plain.items():
            yield name, math.prod(part.shape), len(part.shape)


def _family(plan: Plan | None, directory: Path, gguf: str) -> str | None:
    """The type of a model in the words of its files; None for a quantised checkpoint, whose table stays floats."""
    if gguf:
        return read_model(directory / gguf).architecture
    if plan is not None and plan.scheme is not None:
        return None
    return str(stated_config(directory).get("model_type", ""))


def _shared_table(family: str | None, names: set[str]) -> str:
    """The table of embeddings that is the head too, as no head is stored; empty where floats stay."""
    has_head = any(name == "output.weight" or name.endswith("lm_head.weight") for name in names)
    if family is None or has_head or any(part in family for part in _SCALED_TABLES):
        return ""
    return next((name for name in sorted(names) if name.endswith(_TABLES)), "")


def _stays(name: str) -> bool:
    """Whether a weight stays floats by its name: tables, experts of mixtures, towers that see or hear."""
    return any(word in name for word in _FLOATS)


def device_share(device: Device) -> float:
    """Part of the device's memory that is in use, without blocks that the allocator keeps for later; 0 on CPU."""
    if device.torch.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device.torch)
    unused = torch.cuda.memory_reserved(device.torch) - torch.cuda.memory_allocated(device.torch)
    return (total - free - unused) / total


class Meter:
    """Measures loads; `run` executes a function on the device thread."""

    def __init__(self, device: Device, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._device, self._run = device, run
        self._begun = self._running = 0
        self._lock = threading.Lock()

    def begin(self) -> tuple[int, int]:
        """A load begins; hand the result to `end`."""
        with self._lock:
            self._begun += 1
            self._running += 1
            serial = self._begun if self._running == 1 else 0
        return serial, self._allocated()

    def abort(self) -> None:
        """End the measurement of a load that gave no model."""
        with self._lock:
            self._running -= 1

    def end(self, began: tuple[int, int], adapter: Adapter) -> int:
        """End the measurement; the bytes that the load has taken."""
        with self._lock:
            alone = began[0] == self._begun and self._running == 1
            self._running -= 1
        if self._device.torch.type != "cuda":
            return adapter.memory_bytes
        return max(adapter.memory_bytes, self._allocated() - began[1]) if alone else adapter.memory_bytes

    def _allocated(self) -> int:
        if self._device.torch.type != "cuda":
            return 0
        return int(self._run(lambda: torch.cuda.memory_allocated(self._device.torch)))


def keep_freed_memory() -> bool:
    """Let the C heap keep freed memory of a batch for the next batch; returns whether the C library allows that.

    PERF: results of layers are tens of megabytes. By default glibc maps such blocks anew or gives the top of the heap
    back, so that every batch pays for fresh pages: 100 thousand page faults and 5 % of the time of 96 texts of MiniLM.
    `Heap` and `give_back` still return memory to the system.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is None:
        return False
    return bool(tune(_M_MMAP_THRESHOLD, KEPT_BYTES) and tune(_M_TRIM_THRESHOLD, KEPT_BYTES))


class Heap:
    """Gives free memory of the C heap back once the process has grown by `TRIM_AFTER_BYTES`.

    Results of layers are freed after each batch. Between those blocks lie blocks that stay, such as the programs that
    oneDNN keeps for each number of rows. glibc gives nothing back below them, and takes new memory meanwhile.
    """

    def __init__(self) -> None:
        self._smallest, self._next = math.inf, 0.0

    def look(self) -> bool:
        """Whether memory was given back; called once a second, by the maintenance thread."""
        nbytes, now = private_bytes(), time.monotonic()
        self._smallest = min(self._smallest, nbytes)
        if nbytes - self._smallest < TRIM_AFTER_BYTES or now < self._next:
            return False
        _trim()
        # PERF: the next batches have to take the returned memory anew, page by page.
        self._smallest, self._next = private_bytes(), now + TRIM_EVERY_S
        return True


def private_bytes() -> int:
    """Resident bytes of this process without shared memory, such as its arena."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Return the memory of a dropped model to the device and to the system."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # NOTE: glibc keeps the pages of freed small blocks; without a trim every load and unload leaves a little behind.
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Resident(NamedTuple):
    """A loaded model: `last_used` on any clock, `busy` while requests for it are open."""

    serial: int
    nbytes: int
    last_used: float
    pinned: bool = False
    busy: bool = False


def order(residents: Sequence[Resident]) -> list[Resident]:
    """The models that may go, in the order in which they go."""
    free = [resident for resident in residents if not resident.pinned]
    return sorted(free, key=lambda resident: (resident.busy, resident.last_used, resident.serial))


def victims(residents: Sequence[Resident], excess_bytes: int, *, last_may_go: bool = False) -> list[Resident]:
    """Enough models to free `excess_bytes`, or all that may go."""
    chosen: list[Resident] = []
    most = len(residents) if last_may_go else len(residents) - 1
    for resident in order(residents):
        if excess_bytes <= 0 or len(chosen) >= most:
            break
        chosen.append(resident)
        excess_bytes -= resident.nbytes
    return chosen
