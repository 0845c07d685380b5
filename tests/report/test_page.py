from html.parser import HTMLParser

from lightning_mist.report import page


class Balanced(HTMLParser):
    """Says which tags were not closed in order, and collects text."""

    VOID = frozenset({"meta", "path", "use", "rect", "line"})

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.text, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    found = Balanced()
    found.feed(text)
    found.close()
    assert (found.open, found.wrong) == ([], [])
    return found


def test_a_page_needs_nothing_else():
    found = parsed(page.page("a < b", [page.title_line("<x>"), "", page.section("s", page.paragraph("1 & 2"))]))
    assert "<x>" in found.text
    assert "1 & 2" in found.text
    assert not [attrs for tag, attrs in found.tags if tag in ("script", "link", "img") or "src" in attrs]
    assert "prefers-color-scheme: dark" in page.STYLE
    assert "@media print" in page.STYLE


def test_what_is_empty_is_left_out():
    assert page.section("s", "", "") == ""
    assert page.paragraph("") == page.items([]) == page.pairs([]) == page.warning("w", []) == page.bars([]) == ""


def test_tables_set_words_to_the_left_and_ours_first():
    text = page.table(["plan", "step"], [["<ours>", "1 s"], ["x", "2 s"]], text=("plan",), ours=0)
    assert '<th class="text">plan</th><th>step</th>' in text
    assert '<tr class="ours"><td class="text">&lt;ours&gt;</td><td>1 s</td></tr>' in text
    parsed(text)


def test_bars_are_as_long_as_what_they_stand_for():
    text = page.bars([page.Bar("stage 0", (("#000000", 0.25, 'a "b"'),), "1 GiB", mark=0.5)])
    assert "width:25.000%;background:#000000" in text
    assert "left:50.000%" in text
    assert "a &quot;b&quot;" in text
    parsed(text)
