"""Templates that want out of the sandbox, or want the machine's time and memory. Each gets a BadTemplate, soon."""

import random
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import BadTemplate
from potluck.core.tokenizer_spec import CONTROL, NORMAL, TokenizerSpec
from potluck.text.chat_template import ChatTemplate
from tests.support import chat_templates

SPEC = TokenizerSpec(
    algorithm="byte_bpe", tokens=("a", "<s>", "</s>"), kinds=(NORMAL, CONTROL, CONTROL), bos_id=1, eos_ids=(2,)
)
MESSAGES = [{"role": "user", "content": "hi", "parts": [1, 2, {"k": "v"}]}]
LIMIT_S = 6.0  # of processor time, as the budget counts: its 2 s, and the last operation

# None of these may print anything of Python's insides.
ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ()['__class__']['__base__']['__subclasses__']() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ [].__class__.__base__.__subclasses__()[0] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ ['']|groupby('__class__') }}",
    "{{ ['']|sort(attribute='__class__.__name__') }}",
    "{{ ['']|join(attribute='__class__') }}",
    "{{ ['']|map(attribute='__class__.__mro__')|first }}",
    "{{ ['']|selectattr('__class__')|list|first.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ lipsum() }}",
    "{{ range.__globals__ }}",
    "{{ dict.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.func }}",
    "{{ strftime_now.func.__globals__ }}",
    "{{ strftime_now.args[0] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self }}",
    "{{ config }}{{ request.application }}{{ request.__class__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__init__.__globals__}'.format(x=raise_exception) }}",
    "{{ '{x.__init__.__globals__}'.format_map({'x': namespace}) }}",
    "{{ ('{0.__class__}')['format']('') }}",
    "{{ ['{0.__class__}']|map(attribute='format')|first }}",
    "{{ '%s' % raise_exception }}",
    "{{ raise_exception }}",
    "{{ range }}",
    "{{ ''.join }}",
    "{{ [''.join] }}",
    "{{ ''.join|string }}",
    "{{ ''.join ~ '' }}",
    "{{ messages.append(1) }}",
    "{{ messages.extend([1]) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ messages.sort() }}",
    "{% set messages[0].role = 'x' %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(__init__=1) %}{{ ns.__init__ }}",
    "{{ namespace(a=1).__dict__ }}",
    "{{ namespace()._Namespace__attrs }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in [1] %}{{ loop._iterable }}{% endfor %}",
    "{% for x in [1] %}{{ loop }}{% endfor %}",
    "{{ (messages|map('upper')).gi_frame }}",
    "{{ undefined.__class__ }}",
    "{{ undefined._undefined_exception }}",
    "{{ messages[0].items().__class__ }}",
    "{{ messages[0].items().mapping.__class__ }}",
    "{{ messages[0].keys().mapping }}",
    "{{ (1).__class__ }}{{ 1.5.__class__ }}{{ true.__class__ }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.encode().decode() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ 'a'.maketrans }}",
    "{{ {}.fromkeys([1]) }}",
    "{{ (1).real }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import path %}",
    "{% extends 'x' %}",
    "{% block b %}{{ super() }}{% endblock %}",
    "{{ gettext('x') }}",
    "{% debug %}",
    "{% do messages %}",
    "{{ ''|pprint }}",
    "{{ messages|xmlattr }}",
    "{{ context }}{{ environment.globals }}{{ context.environment }}",
]

# None of these may take long, or take much memory.
BOMBS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% for a in range(100000) if false %}{% endfor %}" * 2000,
    "{% for a in range(100000) %}{% set x = range(100000)|list %}{% endfor %}",
    "{% for a in range(100000) %}" + "text " * 20_000 + "{% endfor %}",
    "{% set x %}{% for a in range(100000) %}" + "text " * 20_000 + "{% endfor %}{% endset %}",
    "{% macro m() %}{% for a in range(100000) %}" + "text " * 20_000 + "{% endfor %}{% endmacro %}{{ m() }}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [1] * 1000000000 }}",
    "{{ ('a' * 1000000) * 1000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 2 ** 1000000000 }}",
    "{{ 10 ** 1000000 }}",
    "{{ 9999999999999 * 9999999999999 * 9999999999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1.0 }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{:>1000000000}'.format('a') }}",
    "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "{{ '{0!r:1000000000}'.format('a') }}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = ns.s|replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = ns.s.join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = ns.s|join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "{% set ns = namespace(s='<') %}{% for i in range(100) %}{% set ns.s = ns.s|e|replace('&', '<<') %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l == ns.l }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}"
    "{{ ns.l|tojson }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l, ns.l].copy() %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(n=namespace()) %}{% for i in range(100) %}{% set m = namespace(a=ns.n, b=ns.n) %}"
    "{% set ns.n = m %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(n=namespace()) %}{% for i in range(100) %}{% set m = namespace(a=ns.n, b=ns.n) %}"
    "{% set ns.n = m %}{% endfor %}{{ 'x'.replace(ns.n, ns.n) }}",
    "{% set ns = namespace() %}{% set ns.self = ns %}{{ ns ~ ns }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + ['x' * 100000 ~ i] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n else 'x' }}{% endmacro %}{{ m(200) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a'.center(1000000000) }}{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.rjust(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'a\nb'|indent(1000000000) }}",
    "{{ ('\n' * 100000)|indent('x' * 100000) }}",
    "{{ ('\n' * 1000000)|indent(999, blank=true) }}",
    "{{ ('\r' * 8000000)|indent(999, blank=true) }}",
    "{{ ('a\x1c' * 4000000)|indent(999) }}",
    "{{ ('abcdefg\u2028' * 1000000)|indent(1) }}",
    "{{ [1]|batch(1000000000, 1)|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ 15|round(-1000000000) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 1000000) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ messages|tojson(indent='x' * 1000000) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now('%c' * 1000000) }}",
    "{{ ('f' * 4000000)|int(base=16) * 3 }}",
    "{% set s = 'a' * 4000000 %}{{ s.rfind('ab' ~ s) }}",
    "{% set s = 'a' * 4000000 %}{{ s.rsplit(maxsplit=3, sep='ab' ~ s) }}",
    "{% set s = 'a' * 4000000 %}{{ s.strip('b' * 4000000 ~ 'a') }}",
    "{% set s = 'a' * 4000000 %}{{ s|trim('b' * 4000000 ~ 'a') }}",
    "{% set s = 'a' * 8000000 %}" + "{% if 'b' in s %}{% endif %}" * 4000,
    "{% set s = 'a' * 4000000 %}{% for i in range(100000) %}{{ s == s ~ '' }}{% endfor %}",
    "{% set s = 'ab ' * 1000000 %}{% for i in range(100000) %}{% set x = s.split() %}{% endfor %}",
    "{% set s = 'ab ' * 1000000 %}{% for i in range(100000) %}{% set x = s.upper() %}{% endfor %}",
    "{% set s = 'ab ' * 1000000 %}{% for i in range(100000) %}{% set x = s[::-1] %}{% endfor %}",
    "{% set s = 'ab ' * 1000000 %}{% for i in range(100000) %}{% set x = s|title %}{% endfor %}",
    "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set x = l|sort|unique|list %}{% endfor %}",
    "{% set l = range(100000)|list %}{% for i in l %}{% for j in l if i == j %}{% endfor %}{% endfor %}",
    "{% set l = range(100000)|list %}{% for i in l %}{{ l.index(99999) }}{% endfor %}",
    "{% set l = range(100000)|list %}{% for i in l %}{{ 100000 in l }}{% endfor %}",
    "{% set l = range(100000)|list %}{% for i in l %}{% set x = l|map('string')|list %}{% endfor %}",
    "{% set l = [['x' * 1000] * 1000] * 1000 %}{{ l|string|length }}",
    "{{ [[[[['x' * 1000] * 100] * 100] * 100] * 100] * 100 }}",
    "{{ (messages * 100000)|tojson|tojson|tojson|tojson }}",
    "{{ range(100000)|map('string')|join('x' * 1000) }}",
    "{% set s %}{% filter upper %}{% for i in range(100000) %}"
    + "x" * 100_000
    + "{% endfor %}{% endfilter %}{% endset %}",
    "{% call(x) (messages) %}{% endcall %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "1+" * 20_000 + "1 }}",
    "{{ " + "not " * 20_000 + "1 }}",
    "{{ " + "-" * 20_000 + "1 }}",
    "{{ x" + ".a" * 20_000 + " }}",
    "{{ x" + "|e" * 20_000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ 'x' }}" * 200_000,
]


def render(source: str) -> str:
    return ChatTemplate(source, SPEC).render(MESSAGES)


@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out(source: str) -> None:
    try:
        text = render(source)
    except BadTemplate:
        return
    assert text in ("", "[]", "[Undefined]", "[(Undefined, [''])]"), text


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_nothing_hangs_or_fills_the_memory(number: int) -> None:
    before_s, before_bytes = time.thread_time(), _peak_bytes()
    with pytest.raises(BadTemplate):
        render(BOMBS[number])
    assert time.thread_time() - before_s < LIMIT_S
    assert _peak_bytes() - before_bytes < 800 << 20


def test_the_messages_are_never_changed() -> None:
    before = repr(MESSAGES)
    for source in ESCAPES:
        try:
            render(source)
        except BadTemplate:
            continue
    assert repr(MESSAGES) == before


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("{}%#-|()[]'\" \n.~+*/=_,:abcxy01") | st.characters(), max_size=60), st.integers(0, 1 << 30)
)
def test_broken_templates_fail_in_the_one_way(noise: str, seed: int) -> None:
    chosen = random.Random(seed)
    source = chosen.choice(list(chat_templates.ALL.values()))
    cut, end = sorted(chosen.randrange(len(source)) for _ in range(2))
    try:
        render(source[:cut] + noise + source[end:])
    except BadTemplate:
        return


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
