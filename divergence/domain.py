"""Domains: what stands beside the core, each in a folder of its own that nothing else names.

A domain is a package with a ``DOMAIN`` in its ``__init__``, which imports
nothing but this module: what it adds is named as text, and imported when it is used. Those that
come with divergence are the folders of ``divergence/domains``; an installed package announces its
own by an entry point:

    [project.entry-points."divergence.domains"]
    mine = "my_package.mine"
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FOLDER = "divergence.domains"
"""The folder, and the group of entry points."""


@dataclass(frozen=True)
class Subcommand:
    """A command of the command line."""

    name: str
    function: str
    """Where its function is: ``package.module:function`` (cli.signature reads its parameters)."""
    line: str
    """The first line of its help."""
    after: str | None = None
    """The command behind which ``--help`` lists it; the last ones where there is none of it."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What a command of the core has more of."""

    options: str | None = None
    """Where its ``Options`` are: parameters of the command, which gets them as ``added``."""
    help: str = ""
    """A paragraph behind those of its help."""
    examples: tuple[str, ...] = ()
    """Lines behind those of its examples."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that are no runs, and that ``compare`` takes two of all the same."""

    noun: str
    """What they hold, for errors: ``losses``."""
    recognise: str
    """Where ``recognise(path)`` is: is this such a file or folder? By names alone: nothing is
    opened. It is asked only where a path is not a run's by its name."""
    command: str
    """Where ``command(reference, candidate, exit_code=..., output=..., **added)`` is, which shows
    the answer; ``added``: the options that this domain adds to ``compare``."""


@dataclass(frozen=True)
class Claim:
    """A statement of a finding that may be the verdict."""

    rank: int
    """Smaller decides before larger; comparison.decide.CLAIMS has the core's, of which ``equal``
    (80) and ``within_rounding`` (100) answer for every pair that was measured."""
    measured: bool = True
    """Does it rest on measured differences? What is to be known beside those is told with it."""
    alone: bool = False
    """Can nothing else be judged beside it?"""


@dataclass(frozen=True)
class Suite:
    """Cases that are run in the place of a model: ``capture suite:NAME``."""

    name: str
    module: str
    """What runs them (divergence.recording.cases says what is in it)."""
    line: str
    """What they are, in a few words."""
    takes: tuple[str, ...] = ()
    """Options of ``capture`` that mean something to it, beside those that every suite takes."""
    answers: str | None = None
    """What one run of it tells without a second, as a question: ``compare RUN``."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is recorded in the place of a model, where an option of ``capture`` names it."""

    option: str
    """By its name in Python: ``endpoint``."""
    function: str
    """Where the function is that makes the run. It is given what ``capture`` was: ``model``,
    ``inputs``, ``options``, ``like``, ``out``, ``force``, ``command``, ``progress``, ``prepare``.
    """
    note: str
    """Behind the printed command that records another one of what such a run is of."""


@dataclass(frozen=True)
class SelftestStep:
    """A step of ``selftest``."""

    title: str
    function: str
    """It is given the bench (divergence.experiments.selftest) and returns what was seen."""
    slow: bool = False
    """Left out by ``--quick``."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What a domain adds. Places are texts: ``package.module``, or ``package.module:attribute``."""

    name: str
    commands: tuple[Subcommand, ...] = ()
    public: Mapping[str, str] = field(default_factory=dict)
    """Names that it adds to the package ``divergence``, each with the module that has it. What
    type checkers are to know of them stands in ``divergence/domains/public.py``."""
    sentences: Mapping[str, str] = field(default_factory=dict)
    """By the prefix of its facts' codes: the module with the table ``SENTENCES``."""
    analyses: Mapping[str, str] = field(default_factory=dict)
    """Questions that it asks of two runs which are compared site by site, by name: the package
    (divergence.comparison.analysis says what is in it)."""
    after: Mapping[str, str] = field(default_factory=dict)
    """Of an analysis of its own: the one behind which it is asked, where that is not the last."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """What its findings may claim as the verdict, by name (docs/verdicts.md has the core's)."""
    basis: tuple[str, ...] = ()
    """Names of its checks where one that failed leaves low confidence, as what is claimed stands on
    it."""
    watches: tuple[str, ...] = ()
    """Where functions are that see more of a running model than what its modules take and give:
    ``watched(model, seen, quiet)``, a context for a pass (domains.quantization.watching)."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Fields of a run's ``ModelIdentity``, by name: the function of the model, and of what its
    config.json says of quantisation."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Engines that it adds, by name: the class."""
    plain_engines: tuple[str, ...] = ()
    """Those of them that run a model's own forward once for each step, as transformers does: they
    keep no prefixes, and guess no tokens ahead."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Tables of a policy file, by name: where the Struct is (gate.policy.PolicyTable)."""
    adds: Mapping[str, Addition] = field(default_factory=dict)
    """What commands of the core have more of, by the command's name."""
    files: tuple[Files, ...] = ()
    """What else than runs can be compared."""
    plans: Mapping[str, str] = field(default_factory=dict)
    """What it adds to the answer of ``capture --dry-run``, by the key that holds it: the package,
    whose ``plan`` has a function of that name (recording.dry_run calls it) and whose ``sections``
    has one that shows its answer. Options that are for it alone it adds to ``capture``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that it adds to ``capture``, by the parameter of Python that takes them: the class,
    an ``Options`` of divergence.options.option."""
    sources: tuple[Source, ...] = ()
    readers: Mapping[str, str] = field(default_factory=dict)
    """Options of ``capture`` that name settings of another tool: the function that makes options of
    such a text."""
    judges: Mapping[str, str] = field(default_factory=dict)
    """Pairs of runs that it compares as a whole, in place of site by site, by a name: the package
    (divergence.comparison.analysis says what is in it)."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Fields that it adds to the report, by the key of the JSON: the class, a ``ReportPart`` of
    divergence.comparison.results."""
    adapter: str | None = None
    """A function of a directory that holds an adapter and no model: what has ``base_folder()``,
    ``merge_into(module)`` and ``text``, or None for what is no such directory."""
    other_weights: str | None = None
    """A function of two runs that gives the commands which tell how their weights are related."""
    arithmetic: str | None = None
    """Where the function is that tells each capture what a device's arithmetic does, in a second:
    ``ArithmeticFact``s of the manifest. It raises nothing."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Options of ``capture`` that ask for more of each group of prompts than its forwards
    (``train``): the package, whose ``options`` has ``settled(options, like)``, and whose ``step``
    has ``session_of(session, request)``: one with a ``GroupStep`` (recording.engines.engine)."""
    suites: tuple[Suite, ...] = ()
    operators: Mapping[str, str] = field(default_factory=dict)
    """Operators of its own that ``replay`` and ``repro`` run again, by the namespace in which runs
    name them: a mapping of full names to what has ``run`` and ``truth``, both plain functions."""
    selftest: tuple[SelftestStep, ...] = ()


@functools.cache
def own_domains() -> tuple[Domain, ...]:
    """Those that come with divergence, in the order of their names."""
    folder = importlib.util.find_spec(FOLDER)
    if folder is None:
        return ()
    names = sorted(
        entry.name
        for entry in pkgutil.iter_modules(folder.submodule_search_locations)
        if entry.ispkg
    )
    return tuple(importlib.import_module(f"{FOLDER}.{name}").DOMAIN for name in names)


@functools.cache
def domains() -> tuple[Domain, ...]:
    """All that are installed, those of divergence first. What cannot be imported is left out, with
    a warning: one package must not take all commands away."""
    installed = list(own_domains())
    for point in importlib.metadata.entry_points(group=FOLDER):
        try:
            installed.append(importlib.import_module(point.value).DOMAIN)
        except Exception as error:  # somebody's package: anything
            warnings.warn(
                f"the domain {point.name} is left out: {point.value} cannot be imported: {error}",
                stacklevel=2,
            )
    return tuple(installed)


def added(kind: str) -> dict[str, Any]:
    """What all domains add in one field of theirs, such as ``engines``, by name."""
    return {name: what for domain in domains() for name, what in getattr(domain, kind).items()}


def sources() -> tuple[Source, ...]:
    """Those of all domains."""
    return tuple(source for domain in domains() for source in domain.sources)


def suites() -> dict[str, Suite]:
    """Those of all domains, by name."""
    return {suite.name: suite for domain in domains() for suite in domain.suites}


def placed(place: str) -> Any:
    """What stands at ``package.module:attribute``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
