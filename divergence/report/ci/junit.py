"""`check --junit`: one test suite, a test case for each rule, as CI servers read it.

The form is that of Jenkins' junit-10.xsd, which GitLab, Azure and others read too: at most one
``failure`` in a case, before its ``system-out``. Characters that XML 1.0 cannot hold (controls,
single surrogates, U+FFFE) are written out like all that does not print.
"""

from __future__ import annotations

from xml.etree import ElementTree

from divergence.report.ci.cases import CheckPage, RuleOutcome, screen_text

__all__ = ["junit_xml"]

_TAGS = {"failed": "failure", "stopped": "error", "skipped": "skipped"}


def junit_xml(page: CheckPage) -> str:
    """The whole file."""
    counts: dict[str, int] = {
        "tests": len(page.cases),
        "failures": sum(case.status == "failed" for case in page.cases),
        "errors": sum(case.status == "stopped" for case in page.cases),
        "skipped": sum(case.status == "skipped" for case in page.cases),
        "time": 0,
    }
    numbers: dict[str, str] = {name: str(number) for name, number in counts.items()}
    root = ElementTree.Element("testsuites", {"name": "divergence check", **numbers})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "divergence check", **numbers})
    for case in page.cases:
        _add_case(suite, case, page)
    screen = "\n".join([f"{page.golden} / {page.new}: {page.headline}", "", *screen_text(page)])
    ElementTree.SubElement(suite, "system-out").text = f"{screen}\n"
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add_case(suite: ElementTree.Element, case: RuleOutcome, page: CheckPage) -> None:
    element = ElementTree.SubElement(
        suite, "testcase", classname=f"divergence.check.{page.policy.replace(' ', '.')}",
        name=case.rule, time="0",
    )  # fmt: skip
    tag = _TAGS.get(case.status)
    if tag is None:
        return
    child = ElementTree.SubElement(element, tag, message=case.text)
    if tag != "skipped":
        child.set("type", case.rule)
        child.text = "\n".join([case.text, *(f"- {fact}" for fact in case.evidence)])
