"""Pictures of pages in a browser, for who judges how they look, and how soon they are there.

    python benchmarks/page_pictures.py PAGE.html... [-o FOLDER]

Writes NAME-wide.png, NAME-wide-dark.png, NAME-phone.png and NAME-phone-dark.png, and prints for
each page its size, the time to its first paint and the longest frame of a scroll from top to
bottom. It takes the browser of tests/report/test_page_browser.py (BROWSER_BINARY names another).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

BROWSER = Path(__file__).parents[1] / "tests" / "report" / "browser.py"
WIDTHS = {"wide": 1280, "phone": 390}
SCROLL = """(async () => {
  const frame = () => new Promise(requestAnimationFrame), times = [];
  let last = await frame();
  for (let y = 0; y < document.body.scrollHeight; y += 400) {
    scrollTo(0, y);
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  scrollTo(0, 0);
  times.sort((a, b) => a - b);
  return [times[times.length >> 1], times[times.length - 1]];
})()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("-o", dest="folder", type=Path, default=Path("."))
    wanted = parser.parse_args()
    spec = importlib.util.spec_from_file_location("browser", BROWSER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    binary = module.find()
    if binary is None:
        sys.exit("skipped: no Chromium here (BROWSER_BINARY names one)")
    wanted.folder.mkdir(parents=True, exist_ok=True)
    browser = module.Browser(binary)
    print("| page | kB | first paint ms | median frame ms | longest frame ms | widest px of 390 |")
    print("|---|---|---|---|---|---|")
    for page in wanted.pages:
        paint = frames = widest = None
        for name, width in WIDTHS.items():
            for dark in (False, True):
                browser.open(page, width=width, dark=dark, phone=name == "phone")
                if name == "wide" and not dark:
                    frames = browser.run(SCROLL)
                    paint = browser.run(
                        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
                    )
                elif name == "phone" and not dark:
                    widest = browser.run("document.documentElement.scrollWidth")
                browser.picture(wanted.folder / f"{page.stem}-{name}{'-dark' * dark}.png")
        assert frames is not None
        size = page.stat().st_size / 1000
        print(
            f"| {page.name} | {size:,.0f} | {paint:.0f} | {frames[0]:.0f} | {frames[1]:.0f} "
            f"| {widest} |"
        )
    browser.close()


if __name__ == "__main__":
    main()
