"""transformers, imported without what a worker never uses: that is most of the time of the import.

A model class of transformers needs the modules in `NEEDED`. These also import

- scipy, for losses of detectors in training;
- torch.distributed.tensor, for models that are spread over processes: a worker has one device;
- torch._dynamo and torch.nn.attention.flex_attention, with sympy, for functions that are meant to be compiled: a
  worker compiles nothing itself, and its attention is SDPA, eager or the engine's.

`import_transformers` imports them without. transformers asks whether scipy, torch.distributed and flex attention are
there, and is told that they are not. Afterwards transformers finds scipy and flex attention again. Two things stay:

1. transformers sees no torch.distributed, as its modules must agree on that.
2. `transformers.masking_utils` has no masks for `flex_attention`, so a model cannot run with that implementation.

torch itself is unchanged: programs of models may use torch.distributed, flex attention and torch.compile. On CUDA
nothing of ours needs these modules either. Triton starts kernels, and torch.library calls operators, without a
compiler; where torch.library marks functions for the compiler, the marks below take part. The names are the same from
torch 2.11 to 2.13 and transformers 5.17 to 5.23. A name that another version lacks is left alone, and costs its time
again; so does scipy where scikit-learn is installed beside transformers 5.17.

transformers also reads all its 1,600 files at its import, twice, to learn the names in `__all__`. `_quickened` lets
each file be read once, from the place of its `__all__` on: the names are the same.

For torch._dynamo stands `_Compiler` (`without_compiler`), also while a model is built: torch asks the compiler to leave
functions alone that make weights without memory, and as long as there is no compiler they are left alone. What else is
asked of the stand-in comes from the real module, imported then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ipc.processes import starting

NEEDED = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")
_ASKED = ("is_scipy_available", "is_torch_flex_attn_available")
_SCANNING = "transformers.utils.import_utils"
"""The module of transformers that looks for `__all__` in files."""
_COMPILER = "torch._dynamo"
_TRACING, _INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
"""A module of torch._dynamo, and the context in which transformers makes masks out of functions."""
_MARKS = ("allow_in_graph", "assume_constant_result")
"""Decorators that change nothing unless the function is compiled; beside these `disable`."""
_DISABLE = "disable"
_lock = threading.RLock()


def import_transformers() -> None:
    """Import what all model classes need. Thread-safe; does nothing the second time. Raises ImportError."""
    if all(name in sys.modules for name in NEEDED):
        return
    with _lock, starting.importing(), contextlib.ExitStack() as window:
        window.enter_context(_quickened())
        importlib.import_module("transformers")
        asked = [importlib.import_module(f"transformers.utils{end}") for end in ("", ".import_utils")]
        _replace(asked, "is_torch_distributed_available", _no)
        for name in _ASKED:
            window.enter_context(replaced(asked, name, _no))
        window.enter_context(without_compiler())
        for name in NEEDED:
            importlib.import_module(name)


def _no() -> bool:
    return False


def _replace(owners: list[Any], name: str, value: Any) -> list[tuple[Any, Any]]:
    """Set an attribute of all that have it; returns these with their former values."""
    before = [(owner, vars(owner)[name]) for owner in owners if name in vars(owner)]
    for owner, _ in before:
        setattr(owner, name, value)
    return before


@contextlib.contextmanager
def replaced(owners: list[Any], name: str, value: Any) -> Iterator[None]:
    """In this block an attribute of all that have it is another."""
    before = _replace(owners, name, value)
    try:
        yield
    finally:
        for owner, former in before:
            setattr(owner, name, former)


@contextlib.contextmanager
def _quickened() -> Iterator[None]:
    """In this block transformers looks for `__all__` quickly, also if `_SCANNING` is imported in the block only."""
    replaced: list[tuple[Any, str, Any]] = []

    def quicken(module: Any) -> None:
        names = ("fetch__all__", "create_import_structure_from_path")
        if not all(name in vars(module) for name in names):
            return
        fetch, scan = (vars(module)[name] for name in names)
        replaced.extend((module, name, vars(module)[name]) for name in names)
        # PERF: fetch__all__ goes through all lines of a file, and takes the last that begins with the word.
        module.fetch__all__ = lambda text: fetch(text[text.rfind("\n__all__") + 1 :])
        scanned = functools.cache(scan)

        def scan_once(path: Any) -> Any:
            place = Path(path)
            return scanned(place.parent if place.is_file() else place)

        module.create_import_structure_from_path = scan_once

    finder: Any = _Quickening(quicken)
    if (module := sys.modules.get(_SCANNING)) is not None:
        quicken(module)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for owner, name, former in replaced:
            setattr(owner, name, former)


class _Quickening:
    """Finds `_SCANNING` as ever, and hands the module to `quicken` right behind its import."""

    def __init__(self, quicken: Callable[[Any], None]) -> None:
        self._quicken = quicken

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _SCANNING else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _QuickenedLoader(spec.loader.name, spec.loader.path)
        spec.loader.quicken = self._quicken
        return spec


class _QuickenedLoader(SourceFileLoader):
    """Loads a module and hands the module on."""

    quicken: Callable[[Any], None]

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.quicken(module)


class _Compiler(ModuleType):
    """Stands for torch._dynamo until something but a mark of a function is asked for: then the real module comes."""

    def __getattr__(self, name: str) -> Any:
        if name == _DISABLE:
            return _left_alone
        if name in _MARKS:
            return _unmarked
        _remove(self)
        return getattr(importlib.import_module(_COMPILER), name)


class _Indexing:
    """`TransformGetItemToIndex` of torch._dynamo, which is imported when the context is entered for the first time."""

    def __init__(self) -> None:
        self._real = getattr(importlib.import_module(_TRACING), _INDEXING)()

    def __enter__(self) -> Any:
        return self._real.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._real.__exit__(*error)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """The function, or a decorator that returns its function."""
    return _unmarked if function is None else function


def _left_alone(function: Callable[..., Any] | None = None, *options: Any, **named: Any) -> Any:
    """The function as torch._dynamo's `disable` gives it, which is asked once the module has been imported."""
    if function is None:
        return functools.partial(_left_alone, **named)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get(_COMPILER)
        if not disabled and compiler is not None and not isinstance(compiler, _Compiler):
            disabled.append(getattr(compiler, _DISABLE)(function, *options, **named))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    return call


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """In this block a stand-in takes the place of torch._dynamo, unless that has been imported. Thread-safe."""
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    compiler, tracing = _Compiler(_COMPILER), ModuleType(_TRACING)
    tracing.__dict__[_INDEXING] = _Indexing
    sys.modules |= {_COMPILER: compiler, _TRACING: tracing}
    torch._dynamo = compiler
    try:
        with contextlib.ExitStack() as marks:
            for mark in _MARKS:
                marks.enter_context(replaced([torch.compiler], mark, _unmarked))
            marks.enter_context(replaced([torch.compiler], _DISABLE, _left_alone))
            yield
    finally:
        _remove(compiler)


def _remove(compiler: _Compiler) -> None:
    """Take the stand-in away; torch imports the module when its attribute is asked for."""
    import torch

    with _lock:
        if sys.modules.get(_COMPILER) is compiler:
            del sys.modules[_COMPILER], sys.modules[_TRACING]
        if vars(torch).get("_dynamo") is compiler:
            del torch._dynamo
