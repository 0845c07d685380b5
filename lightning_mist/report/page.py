"""Pieces of a page: text is escaped here and nowhere else, and what a page looks like is said here once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

STYLE = "\n" + files("lightning_mist.report").joinpath("style.css").read_text(encoding="utf-8")


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
