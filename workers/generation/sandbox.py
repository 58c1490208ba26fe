"""Jinja templates of strangers, bounded: a sandbox that charges a template for every step and every character.

1. `Sandbox.compile` refuses a template of more than `MAX_TEMPLATE` characters and rewrites its syntax tree: loops,
   `~` and comparisons go through filters of ours that charge the budget.
2. `Sandbox.render` gives the thread a fresh `Budget` and collects the output.
3. Loops, calls, operators and filters charge steps and characters **before** they do the work. A template that would
   exceed the budget ends with `TemplateOverrun`, never with a process out of memory.

Templates see the names that transformers gives them: `raise_exception`, `strftime_now`, `tojson`, `namespace`, `dict`,
the loop controls, and the tag `generation`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE = 256 << 10
"""Characters of a template."""
MAX_STEPS = 1_000_000
"""Loop iterations and calls of one rendering."""
MAX_CHARACTERS = 64 << 20
"""Characters that one rendering may build, intermediate texts included."""
MAX_SECONDS = 2.0
"""Processor time of one rendering."""
_MOST_WIDTH, _MOST_INDENT, _MOST_BITS = 4096, 16, 4096
_LOOK, _LISTED = 1024, 64
_WIDE = re.compile(r"\d{5,}")
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_WRITERS = ("join", "string", "tojson", "pprint", "format", "xmlattr", "urlize", "wordwrap", "sum", "indent")


class TemplateOverrun(Exception):
    """The template does more than the budget of one rendering allows."""


class Budget:
    """What one rendering may still do. `until` is processor time of the thread in seconds."""

    __slots__ = ("characters", "looked", "steps", "until")

    def __init__(self) -> None:
        self.steps = self.looked = MAX_STEPS
        self.characters = MAX_CHARACTERS
        self.until = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Charge loop iterations or calls, and look at the clock now and then."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateOverrun(f"over {MAX_STEPS} steps")
        if self.looked - self.steps >= _LOOK:
            self.looked = self.steps
            if time.thread_time() > self.until:
                raise TemplateOverrun(f"over {MAX_SECONDS:g} seconds of processor time")

    def write(self, count: int) -> None:
        """Charge characters that are about to be written."""
        self.characters -= count
        if self.characters < 0:
            raise TemplateOverrun(f"over {MAX_CHARACTERS} characters")

    def measure(self, value: Any) -> None:
        """Charge the characters that a value has as text, by a walk over its parts."""
        if isinstance(value, str):
            self.write(len(value))
        elif isinstance(value, dict):
            self.step()
            for key, part in value.items():
                self.measure(key)
                self.measure(part)
        elif isinstance(value, list | tuple):
            self.step()
            self.write(2 * len(value))
            for part in value:
                self.measure(part)
        else:
            self.write(8)


_local = threading.local()


def _budget() -> Budget:
    budget: Budget = _local.budget
    return budget


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which chat templates run."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_finalized,
        )
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded(name, function)
        self.filters.update(_counted=_counted, _joined=_joined, _measured=_measured)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise, strftime_now=_strftime, dict=_Dict(), namespace=_SafeNamespace
        )

    def compiled(self, source: str) -> jinja2.Template:
        """The template; raises `TemplateSyntaxError` or, for one that is too large or too deep, `TemplateOverrun`."""
        if len(source) > MAX_TEMPLATE:
            raise TemplateOverrun(f"{len(source)} characters, over {MAX_TEMPLATE}")
        _local.budget = Budget()  # NOTE: the compiler evaluates constants, by the same filters.
        try:
            code = self.compile(_Charging().visit(self.parse(source)))
        except RecursionError:
            raise TemplateOverrun("expressions nested too deeply") from None
        finally:
            del _local.budget
        # PERF: a rendering copies the globals, and a copy of Jinja's chain of maps costs ten times that of a dict.
        return jinja2.Template.from_code(self, code, dict(self.globals))

    def rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The text of a template within a budget of its own."""
        _local.budget = Budget()
        try:
            return "".join(template.generate(variables))
        except RecursionError:
            raise TemplateOverrun("macros call each other too deeply") from None
        finally:
            del _local.budget

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Charge a call, refuse methods of texts that widen without limit, and charge a text that comes back."""
        budget = _budget()
        budget.step(
            1 + (len(args[0]) if isinstance(__obj, LoopContext) and isinstance(args[0], Sized) else 0)
        )
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_text_method(budget, owner, __obj.__name__, [*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.write(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge what `+`, `*`, `%` and `**` are about to build."""
        budget = _budget()
        budget.step()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.write(len(left) + len(right))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.step((len(left) + len(right)) // _LISTED)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        elif operator in ("*", "**"):
            _check_product(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Charging(NodeTransformer):
    """Puts filters of ours around the parts of a template whose cost depends on data."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        texts = [data.data for data in node.find_all(nodes.TemplateData)]
        texts += [const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)]
        weight = 1 + sum(map(len, texts))
        node.iter = self._filter(
            "_counted", cast("nodes.Expr", node.iter), nodes.Const(weight, lineno=node.lineno)
        )
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return self._filter("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._filter("_measured", node.expr)
        return node

    @staticmethod
    def _filter(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, by which templates mark answers for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` of templates: makes one, and gives no attribute of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _SafeNamespace(Namespace):
    """`namespace` of templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    """Raises `SecurityError` for a name of Python's internals."""
    if str(name).startswith("_"):
        raise SecurityError(f"a template may not set {name!r}")


def _raise(message: object) -> None:
    """`raise_exception` of templates."""
    raise jinja2.TemplateError(str(message))


def _strftime(form: str) -> str:
    """`strftime_now` of templates."""
    if len(form) > _LOOK or _WIDE.search(form):
        raise TemplateOverrun("a format of dates that wide")
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as transformers has it: nothing is escaped for HTML."""
    if isinstance(indent, int) and indent > _MOST_INDENT:
        raise TemplateOverrun(f"tojson with an indent over {_MOST_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _counted(value: Any, weight: int) -> Any:
    """What a loop runs over, charged for all iterations and for the template text of its body."""
    budget = _budget()
    if not isinstance(value, Sized):
        value = list(_drawn(budget, value)) if isinstance(value, Iterable) else value
    if isinstance(value, Sized):
        budget.step(len(value))
        budget.write(len(value) * weight)
    return value


def _drawn(budget: Budget, values: Iterable[Any]) -> Iterable[Any]:
    """The values of a generator, each charged."""
    for value in values:
        budget.step()
        yield value


def _joined(parts: list[Any]) -> str:
    """The operator `~`."""
    budget = _budget()
    budget.measure(parts)
    return "".join(map(str, parts))


def _measured(value: Any) -> Any:
    """The left side of a comparison: values within values are charged, so that no comparison is exponential."""
    if isinstance(value, list | tuple | dict):
        _budget().measure(value)
    return value


def _finalized(value: Any) -> Any:
    """A value that is written into the output."""
    budget = _budget()
    budget.step()
    budget.measure(value)
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that charges for texts, and takes no huge widths."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        skipped = 2 if hasattr(function, "jinja_pass_arg") else 1
        if name in ("join", "sum") and len(args) >= skipped:
            args = (*args[: skipped - 1], list(_drawn(budget, args[skipped - 1])), *args[skipped:])
        _check_filter(budget, name, list(args[skipped - 1 :]), kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            budget.write(len(result))
        return result

    return guarded


def _check_filter(budget: Budget, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Charge a filter before it runs; `args[0]` is the value."""
    others = [*args[1:], *kwargs.values()]
    if any(isinstance(other, int) and other > _MOST_WIDTH for other in others):
        raise TemplateOverrun(f"{name} with a number over {_MOST_WIDTH}")
    if name in _WRITERS:
        budget.measure(args[0])
    if name == "format":
        _check_format(budget, str(args[0]), tuple(others))
    if name == "replace" and len(args) > 2:
        _check_text_method(budget, str(args[0]), name, args[1:])
    if name in ("join", "indent"):
        width = max((other if isinstance(other, int) else len(str(other)) for other in others), default=4)
        parts = len(args[0]) if name == "join" else str(args[0]).count("\n")
        budget.write(width * parts)


def _check_text_method(budget: Budget, text: str, method: str, args: list[Any]) -> None:
    """Charge a method of a text before it runs."""
    if method in _PADDING and any(isinstance(arg, int) and arg > _MOST_WIDTH for arg in args):
        raise TemplateOverrun(f"{method} with a number over {_MOST_WIDTH}")
    if method == "translate":
        raise TemplateOverrun("translate is not offered to templates")
    if method in ("format", "format_map"):
        _check_format(budget, text, tuple(args))
    if method == "join" and args and isinstance(args[0], Sized):
        budget.measure(args[0])
        budget.write(len(text) * len(args[0]))
    if method == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        budget.write(text.count(old) * len(new))


def _check_format(budget: Budget, form: str, values: Any) -> None:
    """Charge a text that is filled with values, and refuse widths of five digits."""
    if _WIDE.search(form):
        raise TemplateOverrun("a format that wide")
    parts = values if isinstance(values, tuple) else (values,)
    if any(isinstance(part, int) and part > _MOST_WIDTH for part in parts) and ("*" in form or "{:{" in form):
        raise TemplateOverrun("a format that wide")
    budget.write(len(form))
    budget.measure(values)


def _check_product(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Charge a repetition, and refuse numbers of thousands of digits."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(times, int) and times > 0:
            budget.write(len(value) * times)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        if bits > _MOST_BITS:
            raise TemplateOverrun(f"numbers of over {_MOST_BITS} bits")
