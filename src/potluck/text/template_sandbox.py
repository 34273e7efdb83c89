"""A jinja environment for templates written by strangers: no way out of it, and no way to hang or fill the machine.

jinja's own sandbox closes the way out; on top, only a list of methods and filters is there, and every loop, call and
operation is counted (Budget). Loops and literals are reached by rewriting the parsed template. Knows no chat.
"""

import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from jinja2 import Undefined, nodes, pass_context, pass_environment
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from potluck.core.errors import BadTemplate
from potluck.text.template_budget import (
    Budget,
    check_brace_format,
    check_indenting,
    check_joining,
    check_pattern,
    check_percent_format,
    check_power,
    check_product,
    check_replacement,
    check_width,
    weigh,
)

_STRING_METHODS = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "replace", "join"),
        *("startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"),
        *("lower", "upper", "title", "capitalize", "casefold", "swapcase", "isdigit", "isalpha", "isalnum", "isspace"),
        *("isupper", "islower", "isnumeric", "isdecimal", "istitle", "isascii", "isidentifier", "format"),
    }
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STRING_METHODS),
    (dict, frozenset({"items", "keys", "values", "get", "copy"})),
    (list, frozenset({"index", "count", "copy"})),
    (tuple, frozenset({"index", "count"})),
    (int, frozenset()),
    (float, frozenset({"is_integer"})),
    (bytes, frozenset()),
)
# Of jinja's filters, those that cannot make more than they are given. `attr`, `batch`, `center`, `pprint`, `slice`,
# `sum`, `urlize`, `wordcount`, `wordwrap` and `xmlattr` are missing on purpose.
_PLAIN_FILTERS = (
    *("abs", "capitalize", "dictsort", "float", "groupby", "int", "items", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "reverse", "select", "selectattr", "sort", "string", "title", "truncate"),
    *("unique", "upper"),
)
_CHEAP_FILTERS = ("count", "d", "default", "first", "last", "length")  # look at one entry, and make nothing
# Names that no template can write as a filter, since they are not identifiers.
_MADE, _JOINED, _COUNTED, _STEPPED, _CHARGED = "made()", "joined()", "counted()", "stepped()", "charged()"
_DATE_FORMAT = re.compile(r"(?:[^%]|%[-_^#]?[a-zA-Z%]){0,256}")
_DATA = (Undefined,)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs one template at a time: `budget` belongs to the rendering that is going on."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(  # prompts are not HTML, so nothing is escaped
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[loopcontrols, _GenerationTag],
            finalize=_printed,
            optimized=False,  # folding constants would run filters while compiling, outside any budget
        )
        self.budget = Budget()
        self.filters = self._filters()
        self.tests = {name: self._counted(cast(Callable[..., object], test)) for name, test in TESTS.items()}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's own, of at most 100,000 numbers
            "namespace": _SafeNamespace,
            "dict": _new_dict,
            "raise_exception": _raise_exception,
            "strftime_now": functools.partial(_strftime, now),
        }

    def compiled(self, source: str) -> Template:
        """The template, rewritten so that it can be counted. Raises what jinja raises, and BadTemplate."""
        tree = _CountingRewriter().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def made(self, value: object) -> object:
        """Counts a new value; what would be made bit by bit later is made now, so that it can be counted."""
        if isinstance(value, Iterator):
            value = list(self.counted(value))
        self.budget.spend(weigh(value, _DATA) if isinstance(value, str | list | tuple | dict | int) else 1)
        return value

    def counted(self, values: Iterable[object]) -> Iterator[object]:
        for value in values:
            self.budget.step()
            yield value

    def joined(self, *parts: object) -> object:
        for part in parts:
            self.budget.step(weigh(part, _DATA))
        return self.made("".join(map(str, parts)))

    def stepped(self, value: object) -> object:
        self.budget.step()
        return value

    def charged(self, units: int) -> str:
        self.budget.spend(units)
        return ""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return next((attr in allowed for kind, allowed in _METHODS if isinstance(obj, kind)), True)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template: str = value.__self__  # type: ignore[attr-defined]

        def checked(*args: object, **kwargs: object) -> str:
            check_brace_format(template, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:  # noqa: N805
        __self.budget.step()
        _check_call(__obj, (*args, *kwargs.values()))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        self.budget.step()
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_percent_format(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def _filters(self) -> dict[str, Callable[..., object]]:
        filters: dict[str, Callable[..., object]] = {name: self._guarded(FILTERS[name]) for name in _PLAIN_FILTERS}
        filters |= {name: self._counted(FILTERS[name]) for name in _CHEAP_FILTERS}
        filters |= {name: self._guarded(function) for name, function in _OWN_FILTERS.items()}
        filters |= {_MADE: self.made, _JOINED: self.joined, _COUNTED: self.counted}
        return filters | {_STEPPED: self.stepped, _CHARGED: self.charged}

    def _guarded(self, function: Callable[..., object]) -> Callable[..., object]:
        # jinja hands some filters a context or an environment first; that is no value of the template's.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*args: object, **kwargs: object) -> object:
            for value in (*args[first:], *kwargs.values()):
                self.budget.step(weigh(value, _DATA))
            return self.made(function(*args, **kwargs))

        return guarded

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            self.budget.step()
            return function(*args, **kwargs)

        return counted


@pass_context  # asking for the context keeps jinja from printing constants while compiling
def _printed(context: Context, value: object) -> object:
    environment = context.environment
    assert isinstance(environment, TemplateSandbox)
    environment.budget.spend(weigh(value, _DATA))
    return value


def _check_call(function: object, args: tuple[object, ...]) -> None:
    """Before a method that could make much out of little."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str):
        return
    match (name, *args):
        case ("replace", str(old), str(new), *_):
            check_replacement(owner, old, new)
        case ("join", Iterable() as entries, *_):  # jinja adds arguments of its own
            weigh(entries, _DATA)
            check_joining(owner, list(entries))
        case ("strip" | "lstrip" | "rstrip" | "rfind" | "rindex" | "rsplit" | "rpartition", *patterns):
            for pattern in patterns:
                check_pattern(pattern)


class _SafeNamespace(Namespace):
    """jinja's, without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:  # a template may pass self=
        attributes = _new_dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be a name in a namespace")


def _new_dict(*args: Any, **kwargs: object) -> dict[Any, object]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message) if isinstance(message, str) else "the template refused, without saying why")


def _strftime(now: Callable[[], datetime], template: object) -> str:
    # A number after the percent sign is a width to the C library, and as bad as any other.
    if not isinstance(template, str) or not _DATE_FORMAT.fullmatch(template):
        raise BadTemplate("the chat template asks for the date in a format that is not allowed")
    return now().strftime(template)


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    check_replacement(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _join(environment: TemplateSandbox, value: Iterable[object], d: object = "", attribute: str | None = None) -> str:
    parts: list[object] = list(value)
    if attribute is not None:
        parts = list(map(make_attrgetter(environment, attribute), parts))
    check_joining(str(d), parts)
    return str(d).join(map(str, parts))


def _trim(text: object, chars: str | None = None) -> str:
    check_pattern(chars)
    return str(text).strip(chars)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_width(width)
    check_indenting(text, len(width) if isinstance(width, str) else width)
    return str(FILTERS["indent"](text, width, first, blank))


def _percent(template: object, *args: object, **kwargs: object) -> str:
    values = kwargs or args
    check_percent_format(str(template), values)
    return str(template) % values


def _round(value: float, precision: int = 0, method: str = "common") -> object:
    check_width(precision)
    if abs(precision) > 20:
        raise BadTemplate("the chat template rounds to more than 20 digits")
    return FILTERS["round"](value, precision, method)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own, which escapes for HTML; the options are those that templates expect from transformers.
    check_width(indent)
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 8:
        raise BadTemplate("the chat template indents JSON by more than 8 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _escape(value: object) -> str:
    return html.escape(str(value))


def _safe(value: object) -> object:
    return value  # nothing is escaped, so nothing need be exempt


_OWN_FILTERS: dict[str, Callable[..., object]] = {
    "e": _escape,
    "escape": _escape,
    "format": _percent,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": _safe,
    "tojson": _to_json,
    "trim": _trim,
}


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; to us it is its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _CountingRewriter(NodeTransformer):
    """Puts the sandbox's own filters round whatever jinja would run without asking its environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.recursive:
            raise BadTemplate("recursive loops are not supported in chat templates")
        self.generic_visit(node)
        node.iter = _filtered(_COUNTED, node.iter)
        text_units = sum(len(text.data) for text in _own_text(node.body))
        charge = nodes.ExprStmt(
            _filtered(_CHARGED, nodes.Const(1 + text_units, lineno=node.lineno)), lineno=node.lineno
        )
        node.body.insert(0, charge)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(_JOINED, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(_STEPPED, node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(_MADE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(_MADE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(_MADE, node) if node.ctx == "load" else node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise BadTemplate(f"{type(node).__name__.lower()} is not supported in chat templates")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse  # noqa: N815


def _filtered(name: str, first: nodes.Node, *rest: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(first, name, list(rest), [], None, None, lineno=first.lineno)


def _own_text(body: list[nodes.Node]) -> Iterator[nodes.TemplateData]:
    """The plain text of a loop's body, without that of loops inside it, which are charged for themselves."""
    for node in body:
        if isinstance(node, nodes.TemplateData):
            yield node
        elif not isinstance(node, nodes.For):
            yield from _own_text(list(node.iter_child_nodes()))
