"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

from typing import Any

import keyhole

project = "keyhole"
author = "The keyhole developers"
copyright = author
release = version = keyhole.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["figures/*.md"]
html_theme = "furo"
html_title = f"keyhole {release}"
html_static_path = ["static"]
html_css_files = ["keyhole.css"]
html_math_renderer = (
    "mathml"  # browsers draw it themselves: no script, and no request leaves the machine
)
autodoc_typehints = "none"  # shapes stand in the docstrings, where they can be read
napoleon_google_docstring = False
napoleon_use_ivar = True


def _escape_bars(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """|x| is a norm to us, and a substitution to reStructuredText."""
    lines[:] = [line.replace("|", r"\|") for line in lines]


def _mathml(translator: Any, node: Any) -> None:
    """Formulas as MathML, by the converter that docutils brings.

    It is imported here, because tests read this file without it.
    """
    from docutils import nodes
    from docutils.utils.math.latex2mathml import tex2mathml

    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app: Any) -> None:  # noqa: D103
    app.add_html_math_renderer("mathml", (_mathml, None), (_mathml, None))
    app.connect("autodoc-process-docstring", _escape_bars, priority=100)
