"""The page of the atlas in a real browser, from disk and without a network: it filters, sorts and
shows numbers.
"""

import json
import re
from pathlib import Path

from tests.helpers.browser import chromium, needs_chromium

pytestmark = needs_chromium
PAGE = Path(__file__).parents[2] / "docs" / "atlas.html"
ROWS = (
    "[...document.querySelectorAll('#atlas tbody tr')].map(row => [...row.cells].map(cell =>"
    " cell.textContent))"
)


def give(name: str, value: str) -> str:
    """A script that gives a control this value, as a reader does."""
    return f"""(control => {{
        control.value = '{value}';
        for (const kind of ['input', 'change']) control.dispatchEvent(new Event(kind));
    }})(document.getElementById('{name}'));"""


def test_the_atlas_filters_and_sorts(tmp_path: Path) -> None:
    number = len(
        json.loads(re.findall(r'id="data">(.*?)</script>', PAGE.read_text(encoding="utf-8"))[0])[
            "models"
        ]
    )
    with chromium(tmp_path / "profile") as page:
        page.open(PAGE.as_uri())
        page.text(f"{number} of {number} models")
        assert page.run(ROWS)[0][0] == "demo-3m" and len(page.run(ROWS)) == number

        # the fastest on an H200 first
        page.run("document.querySelectorAll('#atlas thead button')[13].click()")
        speeds = [
            float(row[13].replace(",", "").rstrip("*"))
            for row in page.run(ROWS)
            if row[13][0].isdigit()
        ]
        assert len(speeds) > 80 and speeds == sorted(speeds, reverse=True)

        page.run(give("method", "full") + give("fits", "8") + give("show", "gib"))
        sizes = [float(row[12].rstrip("*")) for row in page.run(ROWS)]
        assert 30 < len(sizes) < 90 and max(sizes) < 80  # of what fits an H100
        assert "GiB at the peak" in page.run("document.querySelector('#atlas td[title]').title")

        page.run("document.querySelector('#atlas td[title]').click()")  # a phone has no pointer
        assert "GiB at the peak" in page.run("document.getElementById('chosen').textContent")

        page.run(give("filter", "gemma"))
        assert {row[0].partition("-")[0] for row in page.run(ROWS)} == {"gemma"}
