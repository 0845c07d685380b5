"""Pieces of a page: text is escaped here and nowhere else, and what a page looks like is said here once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { --ink: #1b1c1e; --soft: #5b6068; --line: #d9dce1; --paper: #ffffff; --shade: #e8e8ea; --tint: #f5f6f8;
  --mark: #b3541e; --note: #fdf3e7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e8ea; --soft: #a2a8b1; --line: #3a3e45; --paper: #16181b;
  --shade: #34373c; --tint: #1f2226; --mark: #f0a36b; --note: #33281c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.1rem 0 .25rem; }
p { margin: .35rem 0; max-width: 62rem; }
.lead { font-size: 1.05rem; }
.soft, figcaption { color: var(--soft); font-size: .88rem; }
.warning { background: var(--note); border-left: 4px solid var(--mark); padding: .6rem .9rem; margin: 1rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1.1rem 0; }
.figures div { background: var(--tint); border-radius: 6px; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.25rem; line-height: 1.3; }
.figures span { color: var(--soft); font-size: .85rem; display: block; line-height: 1.35; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; } td { white-space: nowrap; }
td.text, th.text { text-align: left; } td.text { white-space: normal; }
tr.ours td { font-weight: 600; background: var(--tint); }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .7rem; align-items: center;
  margin: .6rem 0; font-size: .85rem; }
.bar { display: flex; height: 1.25rem; background: var(--shade); border-radius: 2px; overflow: hidden;
  position: relative; }
.bar i { display: block; height: 100%; }
.bar u { position: absolute; top: 0; bottom: 0; width: 2px; background: #d55e00; }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; color: var(--soft); margin: .3rem 0; }
.keys i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
figure { margin: .8rem 0; } .picture { width: 100%; height: auto; display: block; }
.picture text { font-family: inherit !important; }
ul { margin: .3rem 0; padding-left: 1.2rem; } li { margin: .2rem 0; max-width: 62rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; } }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --shade: #e8e8ea; --tint: #f5f6f8;
  --mark: #b3541e; --note: #fdf3e7; } body { max-width: none; padding: 0; font-size: 10pt; }
  h2 { break-after: avoid; } figure, table, .bars, .figures, .warning { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } @page { margin: 14mm; } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar.

    Attributes:
        parts: ``(color, share of the whole width, what it says when pointed at)``.
        mark: Where a limit is, as a share of the whole width.
    """

    label: str
    parts: tuple[tuple[str, float, str], ...]
    text: str
    mark: float | None = None


def page(title: str, sections: Iterable[str]) -> str:
    """A whole page that needs nothing else."""
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def title_line(text: str) -> str:
    """The heading of the page."""
    return f"<h1>{escape(text)}</h1>"


def subsection(title: str, *parts: str) -> str:
    """A smaller heading with what belongs to it."""
    return f"<h3>{escape(title)}</h3>" + "\n".join(parts)


def section(title: str, *parts: str) -> str:
    """A heading with what belongs to it; nothing if nothing does."""
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>" if inner else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_class(kind)}>{escape(text)}</p>" if text else ""


def items(texts: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>\n" + "\n".join(f"<li>{escape(text)}</li>" for text in texts) + "\n</ul>" if texts else ""


def pairs(values: Iterable[tuple[str, str]]) -> str:
    """Names with what they stand for."""
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
    return f"<dl>\n{rows}\n</dl>" if rows else ""


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[str] = (), ours: int | None = None
) -> str:
    """A table of text.

    Args:
        text: Headings of columns of words, which are set to the left.
        ours: The row to be seen first.
    """
    kinds = ["text" if heading in text else "" for heading in headings]
    head = "".join(f"<th{_class(kind)}>{escape(heading)}</th>" for heading, kind in zip(headings, kinds, strict=True))
    lines = [
        f"<tr{_class('ours' if index == ours else '')}>"
        + "".join(f"<td{_class(kind)}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


def bars(lines: Iterable[Bar]) -> str:
    """Stacked bars below each other, all as long."""
    rows = []
    for line in lines:
        parts = "".join(
            f'<i style="width:{100 * share:.3f}%;background:{color}" title="{escape(words, quote=True)}"></i>'
            for color, share, words in line.parts
        )
        mark = "" if line.mark is None else f'<u style="left:{100 * min(line.mark, 0.998):.3f}%" title="limit"></u>'
        rows.append(
            f'<span>{escape(line.label)}</span><span class="bar">{parts}{mark}</span><span>{escape(line.text)}</span>'
        )
    return '<div class="bars">\n' + "\n".join(rows) + "\n</div>" if rows else ""


def keys(values: Iterable[tuple[str, str]]) -> str:
    """A legend of ``(color, words)``."""
    found = "".join(f'<span><i style="background:{color}"></i>{escape(words)}</span>' for color, words in values)
    return f'<div class="keys">{found}</div>'


def figures(values: Iterable[tuple[str, str]]) -> str:
    """Key figures in boxes, as ``(value, words)``."""
    found = "\n".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in values)
    return f'<div class="figures">\n{found}\n</div>'


def picture(svg: str, caption: str) -> str:
    """A picture with words under it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def warning(title: str, texts: Sequence[str]) -> str:
    """A highlighted box of sentences; nothing without any."""
    return f'<div class="warning"><b>{escape(title)}</b>{items(texts)}</div>' if texts else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
