"""The page of facts: what codes and values are, and the tables that hold them all.

python tests/facts_page.py       rewrites docs/facts.md
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "facts.md"

HEAD = """\
# Facts: what an answer says, as codes and values

<!-- printed by `python tests/facts_page.py` from the tables themselves; do not edit -->

An answer holds facts: a code, and values by name. The sentence is made of them at the very end,
and is the same on the screen, on a page, in Markdown, JUnit and JSON. A program reads the code
and the values, which stand beside each sentence in the JSON:

    {"code": "blocks.token_ratio", "values": {"site": "...", "ratio": 28.8, "limit": 12.0,
     "token": 3}, "text": "..."}

Values have one meaning wherever they stand (a value may be a fact, or a list of facts, itself):

- `ratio`, `limit`, `control`, `typical`, `times`, `least`: multiples of the floor
- `rel_l2`, `error`, `own`, `other_error`: relative, L2 of a difference over the reference's
- `share`, `usage`, `limit_usage`, `tail`: between 0 and 1; of a limit, 1 is the limit
- `mean`, `nats`, `margin`, `kl_lower`, `shift` of log-probabilities: nats
- `num_...`, `total`: a count; `..._bytes`: bytes
- `side`, `by`, `other`: `reference` (A), `candidate` (B), `both` or `neither`
- `sample`, `step`, `token`, `rank`: numbers from 0 (step 0 is the prefill)
- `site`, `module`, `operator`, `parameter`: names as in the run
- `p_value`, `z`: a probability; standard deviations

Each table below is code → sentence, whose fields are the values. What stands before a code's dot
names its table; all others are in that of `comparison`.

"""


def tables() -> Iterator[tuple[str, Path, Mapping[str, str]]]:
    """(prefix, file, table) of each package that makes facts; the core has no prefix."""
    from divergence.domain import own_domains

    prefixes = {at: name for domain in own_domains() for name, at in domain.sentences.items()}
    for path in sorted((ROOT / "divergence").rglob("sentences.py")):
        file = path.relative_to(ROOT)
        place = ".".join(file.with_suffix("").parts)
        name = prefixes.get(place, path.parent.name)
        prefix = "" if name == "comparison" else f"{name}."
        yield prefix, file, importlib.import_module(place).SENTENCES


def page() -> str:
    rows = [
        f"- [{prefix.removesuffix('.') or 'comparison'}](../{file})"
        for prefix, file, _ in sorted(tables(), key=lambda row: row[0])
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
