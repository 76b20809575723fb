"""One vocabulary: the glossary, the help texts and the JSON say the same words."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

import divergence
from divergence import Matrix, Report
from divergence.comparison.result import BESIDE
from divergence.domain import added as added_by_domains
from divergence.domain import own_domains, placed
from divergence.options.option import Options
from divergence.run.manifest import Manifest
from divergence.run.record import Record

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
TERMS = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.M)

PLAIN = frozenset(
    """
about abs absmax accumulate accumulated accumulates activations addition additions adjusted after
against agree alike all allow alone anchor answers apart architecture argument arguments arithmetic
asked assumed asymmetric at attn attributes autocast axes backend bandwidth base baseline batch
batches before begins below beside better bits bless breaks budget buffer build bytes cache call
called calls capability captured cases causal cause causes changed channel chat check checkpointing
checks checksum choice chosen chunk class clause clip codequality command common compared compiled
complete compute computed concurrency config confirm conflicting consensus constants consumer
correlation cosine cost cpu created cross csv db decay decoder default dequantized derived detail
deterministic device devices diff differ different differing differs disturbed divergence driver
dropout dry dtype duplicates dynamic each elements elsewhere embedding empty end ended
endpoint entering env
environment environments equal error escalate estimated example exit expected expert explain
explained explanation extra fallbacks farther faults few fewer filter first flags flips flushed fold
following force forced format forward forwards found frame framework fresh from functions generated
generates github grad gradient gradients graph graphs hand head headline here high higher holds
hooks html hypothesis id identical ids impl implementation in index inf injected inputs is json
judged judgement jump junit keep kernel key kind kl kurtosis kv label labels lacking largest last
layer lead leads leans learning least left length like likeliest link ln log logits logprob loss low
lower markdown mask masked match matched matches matching matrices max mean measurable measure
measured media median method metric metrics micro min minus misalignment missing mode model moments
more mult nan near needed neginf new next no noise nondeterministic nonfinite norm normal not note
notes num number numbers numel off offset on one only option options origin other out outliers over
overlap overrides own p1 p90 p99 pad pair paired parameters passed passes pattern peers per percent
perplexity phase place places plan platform png pooled posinf position positions predicted prefill
previous prob problem probs processor projections promised prompt prompts python quantile
quantization quantized quick quiet range rank ranks rate reason recipe recompilations reduce
reduction region relative remarks remote repeat repeatability repeated replaced replayed report
reports reproduced resolution rest rests result results resume revision right rms rounded rounds
rows runtime same says scale scales schema score se seconds seed seen sequence sequences settings
shape shard shards share shown size sizes skipped smallest smooth source sqnr standard state static
statistic status still stopped store stored stride substitute substitutes summary sums svg switches
symmetric target task template tensors terms test text texts threads tied times title to token
tokenizer tokens told tool top top1 top5 torch train training traits trend trust type unit unmatched
unscored unsmoothed unsupported update upper use used value values variables verbose verified verify
version versions via viewed visible warmup warnings ways weight weights what why width without
workdir worst wrapped wrong xxh3 yes zero
""".split()
)
"""Words of plain or of torch's English, which need no entry in the glossary."""

GONE = (
    "strain",
    "camp",
    "camps",
    "lender",
    "without_team",
    "one_voice",
    "reference run in float64",
    "float64 reference",
)
"""Words that were private, or had two meanings. Nothing says them any more."""


def keys() -> Iterator[tuple[str, str]]:
    """(name, where) of all keys of the JSON of reports and runs, and of all options."""
    added = [getattr(divergence, name) for domain in own_domains() for name in domain.public]
    kinds = (each for each in added if isinstance(each, type))
    answers = [each for each in kinds if not issubclass(each, Options)]
    parts = {name: placed(place) for name, place in added_by_domains("parts").items()}
    yield from ((name, "Report") for name in parts)
    answers += parts.values()
    for kind in (Report, Matrix, *answers, Manifest, Record):
        for name, record in msgspec.json.schema(kind)["$defs"].items():
            for key in record.get("properties", {}).keys() - {BESIDE}:
                yield key, f"{kind.__name__}: {name}.{key}"
    for path in (ROOT / "tests/cli/surface.json", *(ROOT / "tests/domains").glob("*/surface.json")):
        for command, options in json.loads(path.read_text(encoding="utf-8")).items():
            for name in (name for option in options for name in option["names"]):
                yield name.strip("-"), f"divergence {command} {name}"


def test_every_word_of_the_json_and_the_options_is_known():
    """It stands in the glossary, or is plain English. A new word of our own needs an entry."""
    known = {word for term in TERMS for word in re.findall(r"[a-z0-9]+", term.lower())}
    unknown = {
        word: where
        for name, where in keys()
        for word in re.split("[_-]", name.lower())
        if len(word) > 1 and not {word, word.rstrip("s")} & (known | PLAIN)
    }
    assert not unknown


def test_the_glossary_has_each_word_once_in_order():
    """One word, one meaning, and where one looks for it."""
    terms = [term.strip() for term in TERMS if term.strip() != "word"]
    assert len(terms) == len(set(terms))
    assert terms == sorted(terms, key=str.lower)


def test_no_private_word_is_left():
    """In documents, help and code."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += (ROOT / "divergence").rglob("*.py")
    gone = re.compile(rf"\b({'|'.join(GONE)})\b")
    assert not [file for file in files if gone.search(file.read_text(encoding="utf-8"))]
