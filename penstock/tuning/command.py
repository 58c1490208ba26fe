"""`penstock tune MODEL`: measures, prints the table, and writes the settings that were best.

1. Workers x threads that the cores allow, with the default batch.
2. Token budgets, with the best workers and threads.
3. Precisions, with the best workers, threads and budget.
4. The best values replace those of a settings file; all other lines of the file stay as they are, comments too.

Results within 3 % of the highest rate count as equal, and of equal results the one with the least memory is best.
Exit codes: 0 when settings were found, 1 when every trial failed, 3 for wrong settings.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc import machine, settings
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.reading import read_entries
from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import terminal
from penstock.tuning import trial
from penstock.tuning.trial import Measured

Values = Mapping[str, str | int]
"""Settings by `section.field`."""
NOISE = 0.03
CPU_TOKENS = (1024, 2048, 4096)
CUDA_TOKENS = (8192, 16384, 32768, 65536)


class Choice(msgspec.Struct, frozen=True):
    """One point of the search. `threads` 0: the GPU computes, and threads are not tried."""

    workers: int
    threads: int
    tokens: int
    precision: str

    @property
    def settings(self) -> dict[str, str | int]:
        """Settings, by `section.field`."""
        values: dict[str, str | int] = {"worker.count": self.workers}
        if self.threads:
            values["worker.torch_threads"] = self.threads
        return values | {"batch.max_tokens": self.tokens, "worker.precision": self.precision}


class Result(msgspec.Struct, frozen=True):
    """A choice and its figures; None when the server of the trial failed."""

    choice: Choice
    measured: Measured | None
    failure: str = ""


class Space(msgspec.Struct, frozen=True):
    """Values to try: (workers, threads) pairs, token budgets, precisions; the first of each is the default."""

    topologies: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    precisions: Sequence[str]

    @property
    def trials(self) -> int:
        """How many trials the search makes at most."""
        return len(self.topologies) + len(self.tokens) - 1 + len(self.precisions) - 1


def topologies(cores: int, *, quick: bool) -> list[tuple[int, int]]:
    """(workers, threads) that use all cores: one worker with all, then twice as many with half as many threads each.

    With more than two cores also those that leave one core to the frontends. A quick search skips them.
    """
    pairs: list[tuple[int, int]] = []
    workers = 1
    while workers <= cores:
        pairs.append((workers, cores // workers))
        spared = (cores - 1) // workers
        if not quick and cores > 2 and 0 < spared != cores // workers:
            pairs.append((workers, spared))
        workers *= 2
    return pairs


def search(space: Space, run: Callable[[Choice], Result]) -> Iterator[Result]:
    """Search the space; `run` makes one trial. A choice whose trial failed is never best."""
    first = Choice(*space.topologies[0], space.tokens[0], space.precisions[0])
    done = []
    for workers, threads in space.topologies:
        done.append(run(msgspec.structs.replace(first, workers=workers, threads=threads)))
        yield done[-1]
    for field, values in (("tokens", space.tokens[1:]), ("precision", space.precisions[1:])):
        leader = best(done)
        for value in values if leader is not None else ():
            assert leader is not None
            changed: dict[str, Any] = {field: value}
            done.append(run(msgspec.structs.replace(leader.choice, **changed)))
            yield done[-1]


def best(results: Sequence[Result]) -> Result | None:
    """The best result; None when all failed."""
    measured = [(result, result.measured) for result in results if result.measured is not None]
    if not measured:
        return None
    enough = max(figures.rate for _, figures in measured) * (1 - NOISE)
    return min(
        (pair for pair in measured if pair[1].rate >= enough),
        key=lambda pair: (pair[1].memory_nbytes, -pair[1].rate),
    )[0]


SECONDS, QUICK_SECONDS = 9.0, 3.0
_LONGEST_S = 3600.0
_HEAD = ("workers", "threads", "tokens", "precision", "{}/s", "p50 ms", "alone ms", "memory MB")
_BAR = 30
OPERATIONS = {"score": "pairs", "encode": "texts"}
"""Operations that can be measured, with the name of their items."""


def add_parser(commands: Any, add_flags: Any) -> None:
    """Add `tune` to the commands; `add_flags` adds what all commands understand."""
    parser = commands.add_parser(
        "tune", help="measure workers, threads, batches and precision on this machine, and write the settings"
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="fewer settings, shorter; about a minute")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of a trial (default 9, quick 3)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--write", metavar="FILE", type=Path, help="write the settings into this file without asking"
    )
    terminal.with_json(shown, "print JSON, and write nothing")
    terminal.with_examples(
        parser,
        ("tune BAAI/bge-m3 --quick", "a few settings, about a minute"),
        ("tune BAAI/bge-m3 --write settings.yaml", "writes the best settings into a file"),
    )
    add_flags(parser)


def run(options: argparse.Namespace, config: Settings, flags: Mapping[str, str]) -> int:
    """Measure, print, write. Raises `ConfigError`."""
    entry = Catalog(read_entries(config.catalog.dirs).entries.values()).find(options.model)
    operation = operation_of(entry)
    space = space_of(config, entry, quick=options.quick)
    load = trial.load_of(entry.id, operation)
    if options.seconds is not None and not 0.1 <= options.seconds <= _LONGEST_S:
        raise ConfigError(
            f"tune: --seconds {options.seconds:g}: expected a number from 0.1 to {_LONGEST_S:g}"
        )
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    file = options.config or os.environ.get("PENSTOCK_CONFIG", "")
    progress = Progress(space.trials)
    results: list[Result] = []

    def once(choice: Choice) -> Result:
        if reason := _too_large(choice, results):
            return Result(choice, None, reason)
        environment = server_environment(entry.id, file, flags, choice)
        try:
            return Result(choice, trial.measure(load, environment, choice.workers, seconds))
        except trial.TrialFailed as error:
            return Result(choice, None, error.message)

    progress.show("starting")
    for result in search(space, once):
        results.append(result)
        progress.done(_told(result, OPERATIONS[operation]))
    chosen = best([one for one in results if one.choice.precision == space.precisions[0]])
    if options.json:
        summary = {"model": entry.id, "unit": OPERATIONS[operation], "results": results}
        print(terminal.as_json(summary | {"settings": chosen.choice.settings if chosen else None}))
        return 0 if chosen else 1
    print(table(results, OPERATIONS[operation]))
    if chosen is None:
        print("penstock: no trial succeeded", file=sys.stderr)
        return 1
    _hint_at_precision(results, chosen)
    return _offer(chosen.choice, options.write, Path(file) if file else None)


def operation_of(entry: ModelEntry) -> str:
    """The operation to measure. Raises `ConfigError` for a model that neither encodes nor scores texts."""
    if "text" in entry.inputs:
        if entry.encode_outputs:
            return "encode"
        if "score" in entry.outputs:
            return "score"
    raise ConfigError(f"tune measures models that encode or score texts; {entry.id} does neither")


def space_of(config: Settings, entry: ModelEntry, *, quick: bool) -> Space:
    """Values to try on this machine. The configured precision comes first; others are only recommended."""
    gpus = machine.count_gpus() if config.worker.device != "cpu" else 0
    shapes = [(gpus, 0)] if gpus else topologies(machine.available_cores(), quick=quick)
    tokens = CUDA_TOKENS if gpus else CPU_TOKENS
    default = config.batch.max_tokens or (32768 if gpus else 2048)
    precisions = ["bfloat16" if gpus else "float32", "float32" if gpus else "bfloat16"]
    if config.worker.precision != "auto":
        precisions.sort(key=lambda name: name != config.worker.precision)
    if entry.precision:
        precisions = [entry.precision]
    return Space(
        shapes,
        [default, *(() if quick else (one for one in tokens if one != default))],
        precisions[:1] if quick else precisions,
    )


def server_environment(model: str, file: str, flags: Mapping[str, str], choice: Choice) -> dict[str, str]:
    """Environment of a server under test: the settings in use and the choice, without parts that cost time."""
    own: dict[str, str | int] = {
        "catalog.models": model,
        "catalog.preload": model,
        "catalog.watch": "false",
        "limits.request_timeout_s": 3600,
        "queue.min_tokens": 1 << 24,
        "log.level": "warning",
        "repository.dirs": "",
        "server.keys_file": "",
        "tracing.endpoint": "",
        "worker.spare": 0,
        **choice.settings,
    }
    environment = {**os.environ, **settings.to_environ(flags)}
    if file:
        environment["PENSTOCK_CONFIG"] = file
    return environment | settings.to_environ({name: str(value) for name, value in own.items()})


def _too_large(choice: Choice, results: Sequence[Result]) -> str:
    """Why the workers of a choice would not fit into memory, by the memory of earlier workers; "" if they fit."""
    each = [one.measured.memory_nbytes / one.choice.workers for one in results if one.measured is not None]
    free = machine.free_memory_nbytes()
    if each and free and max(each) * choice.workers > free:
        return f"{choice.workers} workers would take {max(each) * choice.workers / 1e6:.0f} MB"
    return ""


class Progress:
    """How far the search has come, on standard error: one bar that moves on a terminal, else a line for each trial."""

    def __init__(self, total: int) -> None:
        self._total, self._count, self._began = total, 0, time.monotonic()

    def done(self, text: str) -> None:
        """One more trial has ended."""
        self._count += 1
        self.show(text)

    def show(self, text: str) -> None:
        """Show the present state with a word about the last trial."""
        if sys.stderr.isatty():
            filled = _BAR * self._count // self._total
            bar = "#" * filled + "-" * (_BAR - filled)
            ends = "\n" if self._count == self._total else ""
            terminal.redraw(f"[{bar}] {self._count}/{self._total} {text}", ends)
        else:
            seconds = time.monotonic() - self._began
            sys.stderr.write(f"{self._count}/{self._total} after {seconds:.0f} s: {text}\n")
        sys.stderr.flush()


def _told(result: Result, unit: str) -> str:
    choice = result.choice
    name = f"{choice.workers} x {choice.threads or 'gpu'}, {choice.tokens} tokens, {choice.precision}"
    return f"{name}: " + (f"{result.measured.rate:.1f} {unit}/s" if result.measured else result.failure)


def table(results: Sequence[Result], unit: str) -> str:
    """All results, the best first, failed ones last."""
    rows = [tuple(cell.format(unit) for cell in _HEAD)]
    for one in sorted(results, key=lambda one: -(one.measured.rate if one.measured else 0.0)):
        choice, figures = one.choice, one.measured
        shown = (str(choice.workers), str(choice.threads or "-"), str(choice.tokens), choice.precision)
        if figures is None:
            rows.append((*shown, f"failed: {one.failure}", "", "", ""))
        else:
            numbers = (figures.rate, figures.p50_ms, figures.alone_ms)
            rows.append((*shown, *(f"{n:.1f}" for n in numbers), f"{figures.memory_nbytes / 1e6:.0f}"))
    widths = [
        max(len(row[at]) for row in rows if not row[4].startswith("failed")) for at in range(len(_HEAD))
    ]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _hint_at_precision(results: Sequence[Result], chosen: Result) -> None:
    other = best([one for one in results if one.choice.precision != chosen.choice.precision])
    if other and other.measured and chosen.measured and other.measured.rate > chosen.measured.rate:
        ratio, name = other.measured.rate / chosen.measured.rate, other.choice.precision
        print(
            f"{name} gives {ratio:.2f} times as many, and other numbers: see `penstock verify MODEL "
            f"--set worker.precision={name}`. Set worker.precision to choose it; tune does not."
        )


def _offer(choice: Choice, write: Path | None, used: Path | None) -> int:
    """Write into the file of `--write`, or after a yes into the file in use; without a file print the settings."""
    values = {name: value for name, value in choice.settings.items() if name != "worker.precision"}
    path = write or used
    if path is None:
        print("\nbest settings:\n" + with_values("", values), end="")
        return 0
    before = path.read_text() if path.exists() else ""
    after = with_values(before, values)
    diff = difference(path, before, after)
    print("\n" + (diff or f"{path} says so already"))
    if diff and (write is not None or _agreed(path)):
        write_settings(path, after, values)
        print(f"written to {path}")
    return 0


def _agreed(path: Path) -> bool:
    """Whether the operator wants the file changed; no without a terminal."""
    if not sys.stdin.isatty():
        print(f"not written; `--write {path}` writes without asking")
        return False
    return input(f"write this to {path}? [y/N] ").strip().lower() in ("y", "yes")


def with_values(text: str, values: Values) -> str:
    """`text` with `values` (`{"section.field": value}`) put in; sections and fields that are missing are added."""
    lines = text.splitlines()
    for name, value in values.items():
        section, _, field = name.partition(".")
        _put(lines, section, f"  {field}:", str(value))
    return "\n".join(lines) + "\n"


def _put(lines: list[str], section: str, key: str, value: str) -> None:
    """Set one field. A comment behind the old value stays."""
    start = next((at for at, line in enumerate(lines) if re.match(rf"{section}:\s*(#.*)?$", line)), None)
    if start is None:
        lines += [f"{section}:", f"{key} {value}"]
        return
    end = next((at for at in range(start + 1, len(lines)) if re.match(r"[^\s#]", lines[at])), len(lines))
    indent = next(
        (re.match(r"\s+", line) for line in lines[start + 1 : end] if re.match(r"\s+\w", line)), None
    )
    key = (indent[0] if indent else "  ") + key.strip()
    for at in range(start + 1, end):
        if lines[at].startswith(key):
            comment = re.search(r"\s+#.*$", lines[at])
            lines[at] = f"{key} {value}" + (comment[0] if comment else "")
            return
    last = max((at for at in range(start, end) if re.match(r"\s*[^\s#]", lines[at])), default=start)
    lines.insert(last + 1, f"{key} {value}")


def difference(path: Path, before: str, after: str) -> str:
    """Both texts as a unified diff; empty when they are equal."""
    names = (str(path), f"{path} (tuned)")
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names))


def write_settings(path: Path, text: str, values: Values) -> None:
    """Replace the file in one step. Raises `ConfigError` when `text` does not say `values`, or there is no room."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        loaded = msgspec.to_builtins(settings.load(draft, None, {}))
        for name, value in values.items():
            section, _, field = name.partition(".")
            if loaded[section][field] != value:
                raise ConfigError(f"{path}: {name} cannot be changed line by line; set it to {value} by hand")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
