"""`penstock embed IN.jsonl OUT.npy`: the vectors of a file of texts, from a running server.

Exit codes: 0 all lines have vectors, 1 some have none or the run stopped, 3 wrong flags.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import target, terminal
from penstock.embedding.lines import BadInput, ChangedInput, Lines
from penstock.embedding.progress import Shown

if TYPE_CHECKING:
    from penstock.embedding.output import Output

DTYPES = ("float32", "float16", "int8", "binary")
MOST_TIMEOUT_S = 3600


def add_parser(commands: Any) -> None:
    """Add `embed` to the commands."""
    parser = commands.add_parser("embed", help="make the vectors of a file of texts with a running server")
    parser.add_argument(
        "input", metavar="IN.jsonl", help="a JSON object or string a line; - for standard input"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="OUT.npy or OUT.parquet")
    parser.add_argument(
        "--model", required=True, type=target.text, help="name of the model; MODEL:PROFILE for a profile"
    )
    parser.add_argument(
        "--field",
        default="text",
        type=target.text,
        help="field of an object that has the text (default %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--dimensions", type=int, metavar="N", help="the first N values of each vector")
    parser.add_argument("--query", action="store_true", help="texts are queries (default: documents)")
    parser.add_argument("--instruction", type=target.text, metavar="TEXT", help="instruction for the model")
    parser.add_argument(
        "--batch", type=int, default=128, metavar="N", help="texts a request (default %(default)s)"
    )
    parser.add_argument(
        "--in-flight", type=int, default=4, metavar="N", help="requests at a time (default %(default)s)"
    )
    parser.add_argument(
        "--tries", type=int, default=8, metavar="N", help="tries a request (default %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for one try (default %(default)g)"
    )
    parser.add_argument(
        "--max-errors",
        type=int,
        default=100,
        metavar="N",
        help="stop at more lines without a vector (default 100)",
    )
    parser.add_argument("--restart", action="store_true", help="forget what an interrupted run has done")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    terminal.with_json(parser, "print the numbers of lines and vectors as JSON")
    target.add_arguments(parser)
    terminal.with_examples(
        parser,
        ("embed texts.jsonl vectors.npy --model BAAI/bge-m3", "one row for each line"),
        (
            "embed texts.jsonl vectors.parquet --model BAAI/bge-m3 --field body --dtype float16",
            "the texts are in the field `body`",
        ),
        ("embed - out.npy --model BAAI/bge-m3 --key-file key < texts.jsonl", "with an API key"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Embed all lines; returns the exit code. Raises `ConfigError` for wrong flags."""
    for name in ("batch", "in_flight", "tries", "dimensions"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"embed: --{name.replace('_', '-')} {value}: expected a number from 1")
    if not 0 < options.timeout <= MOST_TIMEOUT_S:
        raise ConfigError(
            f"embed: --timeout {options.timeout:g}: expected a number above 0, at most {MOST_TIMEOUT_S}"
        )
    if options.max_errors < 0:
        raise ConfigError(f"embed: --max-errors {options.max_errors}: expected a number from 0")
    url, key = target.url_of(options, config), target.key_of(options)
    # Imported here: only this command needs the HTTP client.
    from penstock.embedding.job import Job, Stopped
    from penstock.embedding.output import Output
    from penstock.http_client import Asker, Unreachable

    with _source(options.input) as source:
        if options.input != "-" and options.output.exists() and options.output.samefile(options.input):
            raise ConfigError(f"embed: {options.output}: the file of the vectors must not be the input")
        shown = Shown("standard input" if options.input == "-" else options.input, _nbytes(source))
        output = Output(options.output, _asked(options), restart=options.restart, force=options.force)
        try:
            job = Job(options, Lines(source, options.field), output, shown)
            asyncio.run(job.run(Asker(url, key, options.in_flight, options.timeout)))
        except KeyboardInterrupt:
            return _interrupted(output, "interrupted")
        except ChangedInput as error:
            print(f"penstock: {shown.name}: {error}", file=sys.stderr)
            return 1
        except BadInput as error:
            return _interrupted(output, f"{shown.name}: {error}")
        except (Stopped, Unreachable) as error:
            return _interrupted(output, str(error))
        except OSError as error:
            return _interrupted(output, f"{error.filename or options.output}: {error.strerror or error}")
        finally:
            output.close()
    rows, failed = output.progress.rows, len(output.progress.failed)
    width, file = output.progress.width, str(options.output)
    if options.json:
        summary = {"output": file, "lines": rows, "vectors": rows - failed, "failed": failed, "values": width}
        print(terminal.as_json(summary))
    else:
        print(f"{rows - failed} vectors of {width} values in {file}")
    if failed:
        print(f"penstock: {failed} lines have no vector", file=sys.stderr)
    return 1 if failed else 0


def _interrupted(output: Output, why: str) -> int:
    rows = output.saved_rows if output.progress.width else 0
    more = f"; {rows:,} lines are done, the same command goes on" if rows else ""
    print(f"penstock: {why}{more}", file=sys.stderr)
    return 1


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that decide the vectors."""
    names = ("model", "field", "dtype", "dimensions", "query", "instruction")
    return {name: getattr(options, name) for name in names}


@contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    """The input. Raises `ConfigError` for a file that cannot be read."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = os.fdopen(os.open(name, os.O_RDONLY | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise ConfigError(f"embed: {name} cannot be read: {error.strerror}") from error
    with file:
        yield file


def _nbytes(source: BinaryIO) -> int | None:
    """Bytes of a file; None for a pipe or a terminal, whose end nobody knows."""
    status = os.fstat(source.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None
