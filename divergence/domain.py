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

from divergence.errors import UsageError, first_line

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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Says what is recorded in the place of a model, where an option of ``capture`` names it."""

    option: str
    """By its name in Python: ``endpoint``."""
    function: str
    """Where the function is that makes the run. It is given what ``capture`` was: ``model``,
    ``inputs``, ``options``, ``like``, ``out``, ``force``, ``command``, ``progress``, ``prepare``.
    """
    note: str
    """Behind the printed command that records another one of what such a run is of."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """Says what a command of the core has more of."""

    options: str | None = None
    """Where its ``Options`` are: parameters of the command, which gets them as ``added``; those of
    ``capture`` are of its ``--dry-run`` alone."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Of ``capture``: options of the capture itself, by the parameter of Python that takes them:
    the class, an ``Options`` of divergence.options.option."""
    source: Source | None = None
    """Of ``capture``: what is recorded in the place of a model."""
    files: Files | None = None
    """Of ``compare``: what else than runs can be compared."""
    help: str = ""
    """A paragraph behind those of its help."""
    examples: tuple[str, ...] = ()
    """Lines behind those of its examples."""


@dataclass(frozen=True)
class Claim:
    """A statement of a finding that may be the verdict."""

    precedence: int
    """Smaller decides before larger; comparison.decide.CLAIMS has the core's, of which ``equal``
    (80) and ``within_rounding`` (100) answer for every pair that was measured."""
    measured: bool = True
    """Does it rest on measured differences? What is to be known beside those is told with it."""
    alone: bool = False
    """Can nothing else be judged beside it?"""
    basis: tuple[str, ...] = ()
    """Names of its checks where one that failed leaves low confidence, as what is claimed stands on
    it."""


@dataclass(frozen=True)
class AnalysisPackage:
    """A question that is asked of two runs."""

    package: str
    """Where it is answered (divergence.comparison.analysis says what is in it)."""
    after: str | None = None
    """The question behind which it is asked, where that is not the last."""
    whole: bool = False
    """Are runs compared as a whole by it, in place of site by site?"""


@dataclass(frozen=True)
class EngineClass:
    """An engine that a domain adds."""

    place: str
    """Where its class is."""
    plain: bool = False
    """Does it run a model's own forward once for each step, as transformers does? Then it keeps no
    prefixes, and guesses no tokens ahead."""


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


@dataclass(frozen=True)
class SelftestStep:
    """A step of ``selftest``."""

    title: str
    function: str
    """It is given the bench (divergence.experiments.selftest) and returns what was seen."""
    slow: bool = False
    """Left out by ``--quick``."""


HOOKS = {
    "step_options": "capture(options, like): the options of a capture that makes more of each "
    "group of prompts than its forwards, checked and completed; None where that was not asked",
    "step": "capture(session, request): the session with a GroupStep, where it was asked",
    "adapter": "loading(folder): what has ``base_folder()``, ``merge_into(module)`` and ``text``, "
    "of a directory that holds an adapter and no model; None for what is no such directory",
    "watch": "a pass(model, seen, quiet): a context that sees more of a running model than what "
    "its modules take and give",
    "identity": "a manifest(model, quantization): fields of its ModelIdentity, by name. "
    "``quantization``: what the config.json says of it",
    "arithmetic": "a capture(device): ArithmeticFacts of the device, in a second; no error",
    "plan": "--dry-run(loaded, request, options, shapes, forward_bytes=...): what the domain adds "
    "to the answer, under its own name; None where that is nothing",
    "plan_sections": "--dry-run(data): the sections that show what ``plan`` added",
    "other_weights": "compare(a, b): facts that tell how other weights are related, and commands",
    "other_codes": "compare(), of runs with other codes: facts that say what tells their cost",
    "operators": "replay and repro: no function but a mapping of full names, which begin with the "
    "domain's own, to what has ``run`` and ``truth``, both plain functions",
    "selftest": "selftest: no function but a tuple of ``SelftestStep``",
}
"""What a domain may be asked beside its questions: who asks, and with which arguments."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Says what a domain adds. Places are texts: ``package.module``, or
    ``package.module:attribute``."""

    name: str
    commands: tuple[Subcommand, ...] = ()
    adds: Mapping[str, Addition] = field(default_factory=dict)
    """What commands of the core have more of, by the command's name."""
    public: Mapping[str, str] = field(default_factory=dict)
    """Names that it adds to the package ``divergence``, each with the module that has it. What
    type checkers are to know of them stands in ``divergence/domains/public.py``."""
    analyses: Mapping[str, AnalysisPackage] = field(default_factory=dict)
    """Questions that it asks of two runs, by name."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """What its findings may claim as the verdict, by name (docs/verdicts.md has the core's)."""
    sentences: Mapping[str, str] = field(default_factory=dict)
    """By the prefix of its facts' codes: the module with the table ``SENTENCES``."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Fields that it adds to the report, by the key of the JSON: the class, a ``ReportPart`` of
    divergence.comparison.result."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Tables of a policy file, by name: where the Struct is (gate.policy.PolicyTable)."""
    engines: Mapping[str, EngineClass] = field(default_factory=dict)
    """Engines that it adds, by name."""
    suites: tuple[Suite, ...] = ()
    """Suites of cases that ``capture`` runs in the place of a model."""
    hooks: Mapping[str, str] = field(default_factory=dict)
    """By their name in ``HOOKS``: where the function is."""

    def __post_init__(self) -> None:
        unknown = sorted(self.hooks.keys() - HOOKS.keys())
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no hook of a domain ({', '.join(HOOKS)})")
        compare = self.adds.get("compare", Addition())
        if compare.options is not None and compare.files is None:
            raise ValueError("compare has options for files that are no runs, and here are none")


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
    """Return what all domains add in one field of theirs, such as ``engines``, by name."""
    return {name: what for domain in domains() for name, what in getattr(domain, kind).items()}


def hook_places(name: str) -> dict[str, str]:
    """Return where the domains that have this hook have it, by their own names."""
    return {domain.name: domain.hooks[name] for domain in domains() if name in domain.hooks}


def additions(command: str) -> dict[str, Addition]:
    """Return what domains add to a command of the core, by their names."""
    return {each.name: each.adds[command] for each in domains() if command in each.adds}


def sources() -> tuple[Source, ...]:
    """Return what ``capture`` records in the place of a model, of all domains."""
    return tuple(each.source for each in additions("capture").values() if each.source is not None)


def suites() -> dict[str, Suite]:
    """Those of all domains, by name."""
    return {suite.name: suite for domain in domains() for suite in domain.suites}


def placed(place: str) -> Any:
    """Return what stands at ``package.module:attribute``. Raises UsageError where another package's
    is broken."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        if module.partition(".")[0] == "divergence":
            raise
        raise UsageError(
            f"{place}, which a domain names, cannot be imported: {first_line(error)}",
            hint="it is not of divergence: mend that package, or uninstall it",
        ) from error
