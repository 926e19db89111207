"""The timelines of the READMEs are those that the code draws now."""

import pytest

from jaxpipe.bench.pages import HOUSE, filled, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(HOUSE.parent)))
def test_timelines_of_a_page_are_drawn_by_this_code(page):
    text = page.read_text()
    assert filled(text) == text


def test_a_stale_timeline_is_drawn_anew():
    text = (HOUSE / "schedule" / "README.md").read_text()
    assert filled(text.replace("BW3", "B3")) == text
