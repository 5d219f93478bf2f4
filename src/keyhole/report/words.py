r"""Text and numbers on a page: everything is escaped, and three small marks are understood.

``f_{1,2}`` sets a subscript, ``d^{2}`` a superscript, and backquotes set code. Nothing else has a meaning: a `<` is a
`<`, a `$` is a dollar.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from keyhole.report.document import Scalar

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
    """The same for the chart library, whose labels know some tags; it has no code, so backquotes go.

    >>> as_chart_text("f_{2} & <b>")
    'f<sub>2</sub> &amp; &lt;b&gt;'
    """
    # quotes stay: the library shows entities of quotes as they are written
    return _shifted(html.escape(_CODE.sub(r"\1", text), quote=False))


def as_plain(text: str) -> str:
    """Without any marks, for places that know none.

    >>> as_plain("f_{1,2} and d^{2}, `n`")
    'f1,2 and d2, n'
    """
    return _CODE.sub(r"\1", _SHIFTED.sub(r"\2", text))


def as_json(value: Any) -> str:
    r"""JSON that may stand in a script element: numbers that are not finite become null, and no tag can be closed.

    >>> as_json({"a": [1.5, float("nan")], "b": "</script>"})
    '{"a":[1.5,null],"b":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: Scalar, digits: int = 4) -> str:
    """A number for reading, to so many significant digits; text is left as it is and what is missing is a dash.

    >>> [number(v) for v in (12345, 0.000012345, 2.0, float("nan"), None, "x", 1234567.8)]
    ['12,345', '1.234×10⁻⁵', '2', '–', '–', 'x', '1.235×10⁶']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, (str, bool)):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}".replace("-", "−")
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPT)}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def column(values: Sequence[Scalar]) -> list[str]:
    """The cells of a table's column: with as many decimals in each row where that loses nothing, so that they align.

    >>> column([0.5, 12.25, None])
    ['0.50', '12.25', '–']
    >>> column([1e-7, 3.0])
    ['10⁻⁷', '3']
    """
    floats = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    sizes = [abs(v) for v in floats if v != 0]
    if not sizes or any(isinstance(v, int) for v in values):
        return [number(v) for v in values]
    decimals = min(6, max(0, 3 - math.floor(math.log10(max(sizes)))))
    if max(sizes) >= 1e6 or min(sizes) < 10.0 ** (1 - decimals) / 5:
        return [re.sub(r"^(−?)1×", r"\1", number(v)) for v in values]
    return [
        f"{v:,.{decimals}f}".replace("-", "−") if isinstance(v, float) and math.isfinite(v) else number(v)
        for v in values
    ]


def is_numeric(values: Sequence[Scalar]) -> bool:
    """Whether a column holds numbers (or nothing), and so is set flush right."""
    return any(isinstance(v, (int, float)) for v in values) and not any(isinstance(v, str) for v in values)


def _shifted(escaped: str) -> str:
    tags = {"_": "sub", "^": "sup"}
    return _SHIFTED.sub(lambda m: f"<{tags[m[1]]}>{m[2]}</{tags[m[1]]}>", escaped)


def _finite(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
