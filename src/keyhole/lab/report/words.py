"""Texts and numbers for reading: in tables, in HTML, in charts, and as JSON inside a page."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from keyhole.lab.report.document import Scalar

_SHIFTED = re.compile(r"([_^])\{([^{}<>]{1,40})\}")
_CODE = re.compile(r"`([^`]+)`")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def as_html(text: str) -> str:
    """Escape for HTML, then set subscripts, superscripts and code.

    >>> as_html("f_{1,2} < `n`")
    'f<sub>1,2</sub> &lt; <code>n</code>'
    """
    return _CODE.sub(r"<code>\1</code>", _shifted(html.escape(text)))


def as_chart_text(text: str) -> str:
    """The same for plotly, whose labels know some tags; it has no code, so backquotes go.

    >>> as_chart_text("f_{2} & <b>")
    'f<sub>2</sub> &amp; &lt;b&gt;'
    """
    # quotes stay: plotly shows entities of quotes as they are written
    return _shifted(html.escape(_CODE.sub(r"\1", text), quote=False))


def as_plain(text: str) -> str:
    """Without any marks, for places that know none.

    >>> as_plain("f_{1,2} and d^{2}, `n`")
    'f1,2 and d2, n'
    """
    return _CODE.sub(r"\1", _SHIFTED.sub(r"\2", text))


def _shifted(escaped: str) -> str:
    """Set ``_{…}`` as a subscript and ``^{…}`` as a superscript."""
    tags = {"_": "sub", "^": "sup"}
    return _SHIFTED.sub(lambda m: f"<{tags[m[1]]}>{m[2]}</{tags[m[1]]}>", escaped)


def as_json(value: Any) -> str:
    r"""JSON that may stand in a script element.

    Numbers that are not finite become null, and no tag can be closed.

    >>> as_json({"a": [1.5, float("nan")], "b": "</script>"})
    '{"a":[1.5,null],"b":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: Any) -> Any:
    """The same value in JSON's types, with None for every number that is not finite."""
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_finite(item) for item in value]
    return value


def number(value: Scalar, digits: int = 4) -> str:
    """A number for reading, to so many significant digits.

    Text is left as it is and what is missing is a dash.

    >>> [number(v) for v in (12345, 0.000012345, 2.0, float("nan"), None, "x", 1234567.8)]
    ['12,345', '1.234×10⁻⁵', '2', '–', '–', 'x', '1.235×10⁶']
    """
    # what is no number, or not finite
    if isinstance(value, (str, bool)):
        return str(value)
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"

    # whole numbers are written in full, with a comma between thousands
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}".replace("-", "−")

    # others in significant digits; Python's "e-05" becomes "×10⁻⁵"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPT)}"
    if text.startswith("-"):
        text = "−" + text[1:]
    return text


def column(values: Sequence[Scalar]) -> list[str]:
    """The cells of a table's column, with equally many decimals where that loses nothing.

    >>> column([0.5, 12.25, None])
    ['0.50', '12.25', '–']
    >>> column([1e-7, 3.0])
    ['1×10⁻⁷', '3']
    """
    sizes = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v) and v != 0]
    has_integers = any(isinstance(v, int) for v in values)
    if not sizes or has_integers or max(sizes) >= 1e6:
        return [number(v) for v in values]

    # four significant digits of the largest number fix the decimals of the column
    decimals = min(6, max(0, 3 - math.floor(math.log10(max(sizes)))))
    if min(sizes) < 10.0 ** (1 - decimals) / 5:
        return [number(v) for v in values]
    cells = []
    for value in values:
        if isinstance(value, float) and math.isfinite(value):
            cells.append(f"{value:,.{decimals}f}".replace("-", "−"))
        else:
            cells.append(number(value))
    return cells


def is_numeric(values: Sequence[Scalar]) -> bool:
    """Whether a column holds numbers (or nothing), and so is set flush right."""
    has_number = any(isinstance(v, (int, float)) for v in values)
    has_text = any(isinstance(v, str) for v in values)
    return has_number and not has_text


def safe_names(names: Sequence[str]) -> list[str]:
    """Names fit for files and anchors, all different also where case does not count.

    A name that is fit already and alone stays as it is.

    >>> safe_names(["f_{1,2}", "../../etc", "a", "A", ""])
    ['f_-1-2', 'etc', 'a', 'A-2', 'unnamed']
    """
    taken: set[str] = set()
    safe = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80] or "unnamed"
        # the first free of stem, stem-2, stem-3, …
        candidate = stem
        suffix = 1
        while candidate.casefold() in taken:
            suffix += 1
            candidate = f"{stem}-{suffix}"
        taken.add(candidate.casefold())
        safe.append(candidate)
    return safe
