"""Sites: where in a model a tensor was seen.

A site is ``MODULE_PATH:PORT``. The module path is torch's fully qualified name
(``model.layers.3.self_attn``; the root module is written ``.``). A module called
again within one forward adds the call: ``shared#2:out``. An operator inside a module adds
its name without the overload, and from its second call in that module on the number:
``model.layers.3.mlp/aten.mm#2:out``. A port is

* ``in``            the first tensor argument,
* ``in.NAME``       another argument by the name it has in ``forward`` (``in.N`` where it has
                    none), ``in.NAME.N`` one of a tuple of them,
* ``in.codes``      the codes that a quantised module makes of its input, less their zero point; in
                    a truth x / scale, of which they are rounded; ``in.k.codes``, ``in.v.codes`` and
                    ``in.q.codes`` those of the keys, values and queries of an attention,
* ``out``           the output, or the first tensor of a tuple or a ModelOutput,
* ``out.N``, ``out.NAME``   the others.

In a module path ``/``, ``:``, ``#``, ``%``, spaces and control characters would mean something
else or break a line; torch allows them in a module's name. They are written ``%2F``, ``%3A`` … as
in URLs (``escape_path``).

Patterns select sites: a glob (``model.layers.*.mlp:*``; ``*`` also crosses dots)
or ``re:`` and a regular expression that must match the whole site. A pattern
without a port matches every port of the module.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from divergence.errors import UsageError

CODES = "in.codes"
"""The port of the codes that a quantised module makes of its input."""
HEAD_CODES = {letter: f"in.{letter}.codes" for letter in "qkv"}
"""The ports of those that an attention makes of its queries, keys and values."""
_CODE_PORTS = frozenset({CODES, *HEAD_CODES.values()})

ROOT = "."
"""How the root module is written in a site."""

LOGPROBS = "logprobs"
"""What stands for the module's path, and alone in ``plan.sites``, in a run that holds the
log-probabilities of tokens and nothing else: a server's answers, a rollout."""
LOGPROBS_SITE, LOGPROB_IDS_SITE = f"{LOGPROBS}:out", f"{LOGPROBS}:out.ids"

BACKWARD, OPTIMIZER = "#backward", "#optimizer"
"""Behind a module's path, as if it were another call of it. Of its backward ``in`` is the gradient
of its output, ``out`` that of its input, ``out.weight`` that of a parameter. Of an optimizer's step
``in.weight`` is the gradient that it gets, ``out.weight`` the new value, ``out.weight.exp_avg`` a
moment."""
GRAD_NORM = "in.grad_norm"
"""The port of an optimizer's step that holds the norm of all gradients, before they are clipped."""

LOSS = "loss"
"""What stands for the module's path of the loss in a training step."""

PHASES = ("prefill", "backward", "optimizer", "decode")
"""Of a forward and what follows it, in order of execution. A training step has no decode steps, and
its forward is the first."""

BUILTIN_SITES = ("blocks", "modules")
"""Words that capture itself understands; they come before any preset of that name."""

MAX_PATTERNS = 1_000
"""With wildcards, in one list; names in full are not counted."""

_MAX_MATCHED = 4_000
"""Letters of a name that a regular expression is tried on: a run's may be of any length."""

_WILD = re.compile(r"[*?[]")

_SITE = re.compile(r"(?P<path>[^:\s]+):(?P<port>(?:in|out)(?:\.[^:\s]+)?)")


_RESERVED = re.compile(r"[/:#%\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


_remembered = functools.lru_cache(maxsize=1 << 14)
"""For what is asked of every record: sites are few beside them."""


def escape_path(name: str) -> str:
    """A module's torch name as a module path: ``"blocks.enc/dec"`` → ``"blocks.enc%2Fdec"``."""

    def quoted(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))

    return _RESERVED.sub(quoted, name) or ROOT


def unescape_path(path: str) -> str:
    """The torch name of a module path; the root's is empty."""
    return "" if path == ROOT else unquote(path, errors="surrogatepass")


def join_site(path: str, port: str) -> str:
    """``("model.layers.3", "out")`` → ``"model.layers.3:out"``."""
    return f"{path or ROOT}:{port}"


def split_site(site: str) -> tuple[str, str]:
    """``"model.layers.3:out"`` → ``("model.layers.3", "out")``; UsageError if it is no site."""
    match = _SITE.fullmatch(site)
    if match is None:
        raise UsageError(
            f"{site!r} is not a site",
            hint="a site is MODULE_PATH:PORT, for example model.layers.3:out or lm_head:in",
        )
    return match["path"], match["port"]


@_remembered
def module_of(site: str) -> str:
    """``"shared#2:out"``, ``"shared#2/aten.mm#3:out"`` → ``"shared"``: the module path alone."""
    return site.partition(":")[0].partition("/")[0].partition("#")[0]


def is_codes(site: str) -> bool:
    """Does it hold what a quantiser made? Of a site, or of a port alone."""
    return site.rpartition(":")[2] in _CODE_PORTS


def operator_path(path: str, operator: str, call: int) -> str:
    """``("model.layers.3.mlp", "aten.mm", 2)`` → ``"model.layers.3.mlp/aten.mm#2"``."""
    return f"{path or ROOT}/{operator}" + (f"#{call}" if call > 1 else "")


def phase_of(site: str, step: int) -> str:
    """One of PHASES."""
    if BACKWARD in site:
        return "backward"
    if OPTIMIZER in site:
        return "optimizer"
    return "decode" if step else "prefill"


@_remembered
def is_of_parameter(site: str) -> bool:
    """Is it a parameter's gradient, or what an optimizer made of it? Its rows are no tokens."""
    return OPTIMIZER in site or f"{BACKWARD}:out." in site


@_remembered
def is_scaled_with_loss(site: str) -> bool:
    """Is it a gradient on its way through the model? A factor of the loss is divided out of what
    parameters get alone."""
    return BACKWARD in site and not is_of_parameter(site)


@_remembered
def is_norm(site: str) -> bool:
    """Is it the norm of all gradients? That is one number made of many, which cannot cancel."""
    return site.endswith(f"{OPTIMIZER}:{GRAD_NORM}")


@_remembered
def is_gradient(site: str) -> bool:
    """Is it a parameter's gradient, or a mean of such: what an optimizer gets, its moments?"""
    path, _, port = site.partition(":")
    return is_of_parameter(site) and (
        path.endswith(BACKWARD) or port.count(".") != 1 or port[:2] == "in"
    )


@_remembered
def is_operator_site(site: str) -> bool:
    """Was the tensor seen at an operator, not at a module?"""
    return "/" in site.partition(":")[0]


def operator_of(site: str) -> str:
    """``"model.layers.3.mlp/aten.mm#2:out"`` → ``"aten.mm"``; empty for a module's site."""
    return site.partition(":")[0].partition("/")[2].partition("#")[0]


def _short_alone(expression: re.Pattern[str]) -> Callable[[str], object]:
    def test(site: str) -> object:
        if len(site) > _MAX_MATCHED:
            raise UsageError(
                f"a site has {len(site):,} letters, too many for re:{expression.pattern}",
                hint="name it in full, or use a glob such as 'model.layers.*.mlp:out'",
            )
        return expression.fullmatch(site)

    return test


def compile_patterns(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A predicate on sites that is true where any of the patterns matches.

    Globs take time in proportion to pattern and site. A regular expression may take any: only one
    that the user gave is matched (a run's stands for the sites that the run holds). Raises
    UsageError for one that does not compile, and for more than MAX_PATTERNS with wildcards.
    """
    names: set[str] = set()
    tests: list[Callable[[str], object]] = []
    for pattern in patterns:
        if len(tests) >= MAX_PATTERNS:
            raise UsageError(
                f"more than {MAX_PATTERNS} patterns of sites",
                hint="name the sites in full, or say more with one pattern",
            )
        if pattern.startswith("re:"):
            try:
                tests.append(_short_alone(re.compile(pattern[3:])))
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(
                    f"{pattern!r} is not a regular expression: {error}",
                    hint="quote it for the shell, or use a glob such as 'model.layers.*.mlp:out'",
                ) from error
            continue
        full = pattern if ":" in pattern else pattern + ":*"
        if _WILD.search(full) is None:
            names.add(full)
        else:  # each star takes the first match of what follows it, once and for all
            tests.append(re.compile(fnmatch.translate(full)).fullmatch)

    @functools.cache
    def matches(site: str) -> bool:
        return site in names or any(test(site) for test in tests)

    return matches


def natural_key(site: str) -> list[tuple[int, int, str]]:
    """Sort key under which ``layers.10`` follows ``layers.9``."""
    parts = re.split(r"([0-9]+)", site)
    # digits by length, then as text: int() refuses more than some thousand of them
    digits = [(0, len(part.lstrip("0")), part.lstrip("0")) for part in parts[1::2]]
    words = [(1, 0, part) for part in parts[::2]]
    return [words[0], *itertools.chain(*zip(digits, words[1:], strict=True))]


_MAX_NEAR, _MAX_NEAR_CHARS = 20_000, 200
"""Beyond this a suggestion takes longer than the answer; a run's names may be of any length."""


def near_names(wanted: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The ``count`` names most like ``wanted``, best first: for "did you mean"."""
    if len(wanted) > _MAX_NEAR_CHARS:
        return []
    short = itertools.islice((name for name in names if len(name) <= _MAX_NEAR_CHARS), _MAX_NEAR)
    return difflib.get_close_matches(wanted, short, n=count, cutoff=0.5)


def did_you_mean(wanted: str, names: Iterable[str], *, count: int = 3, then: str = "") -> str:
    """``did you mean a or b?``, and ``then`` behind it; ``then`` alone where no name is like it."""
    near = near_names(wanted, names, count=count)
    return f"did you mean {' or '.join(near)}? {then}".rstrip() if near else then


def one_or_more(value: Any) -> list[Any]:
    """A name (or a run) alone as a list of one: ``sites="blocks"`` is no list of letters."""
    single = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
    return [value] if single else list(value)


def starred(path: str) -> str:
    """``model.layers.3.mlp`` → ``model.layers.*.mlp``: what modules of every block share."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
