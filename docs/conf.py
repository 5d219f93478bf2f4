"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import keyhole
from keyhole import _compiled

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# `kh.tokens` is the module keyhole.data.tokens: pages use the name that users type
for alias in ("tokens", "datasets", "targets"):
    sys.modules[f"keyhole.{alias}"] = getattr(keyhole, alias)

project = "keyhole"
author = "The keyhole developers"
copyright = author
release = version = keyhole.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "commands",  # docs/_ext/commands.py: the help texts of the command line
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["figures/*.md", "_templates", "gallery/*.ipynb", "gallery/*.py"]
templates_path = ["_templates"]

# Markdown
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

# HTML: furo, without requests to other machines
html_theme = "furo"
html_title = f"keyhole {release}"
html_logo = "static/logo.svg"
html_favicon = "static/logo.svg"
html_static_path = ["static"]
html_css_files = ["keyhole.css"]
html_js_files = ["copy.js", "pictures.js"]
html_show_sourcelink = True
html_copy_source = True
html_math_renderer = (
    "mathml"  # browsers draw it themselves: no script, and no request leaves the machine
)

# the reference: a page for every class and function, from docstrings in NumPy's format
autodoc_typehints = "none"  # shapes stand in the docstrings, where they can be read
autosummary_generate = True
autosummary_imported_members = True
default_role = "autolink"
numpydoc_show_class_members = False  # the template lists them
numpydoc_xref_param_type = False


def _is_property(class_name: str, member: str) -> bool:
    """Whether a member of a class is a property; fields stand in the docstring of the class."""
    module, _, name = class_name.rpartition(".")
    found = getattr(getattr(import_module(module), name), member, None)
    return isinstance(found, property)


autosummary_context = {
    "is_property": _is_property,
    # members that scikit-learn's base classes bring, the same for every estimator
    "hidden": [
        "__init__",
        "get_metadata_routing",
        "get_params",
        "layer_spec",
        "set_params",
        "set_fit_request",
        "set_partial_fit_request",
        "set_predict_request",
        "set_score_request",
        "set_transform_request",
        "set_output",
    ],
    # classes of which users need some members only; the others serve keyhole itself
    "shown": {
        "SetBatch": [
            "from_tokens",
            "from_flat",
            "lengths",
            "dim",
            "query_dim",
            "dtype",
            "device",
            "astype",
            "numpy",
            "to",
            "with_extras",
            "with_query",
        ],
        "SetGroups": ["set_counts", "dim", "device", "astype", "numpy", "with_extras"],
        "ParquetSets": ["parts", "n_rows", "n_groups"],
        "Schema": ["read", "check"],
        "Dataset": ["train", "test", "schema"],
        "HeadDraw": ["block"],
        "LearnedHeads": ["fit"],
    },
}

# the gallery: scripts of examples/ that run offline are run, the others are shown
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"(score_onnx|service|loaders|finetune)\.py",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "default_thumb_file": str(Path(__file__).parent / "static" / "logo.svg"),
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "show_signature": False,
    "remove_config_comments": True,
    "doc_module": ("keyhole",),
    "backreferences_dir": "gallery/backreferences",
    "inspect_global_variables": False,
}
suppress_warnings = ["config.cache"]


def _clean_docstring(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Escape norms, link our pages, and drop links into scikit-learn's own pages.

    |x| is a norm to us, and a substitution to reStructuredText.
    """
    text = "\n".join(lines).replace("|", r"\|")
    text = re.sub(r"(?<![`\w/])docs/([\w/]+)\.md", r":doc:`/\1`", text)
    lines[:] = re.sub(r":ref:`([^<`]*?)\s*<[^`]*>`", r"\1", text).split("\n")


def _mathml(translator: Any, node: Any) -> None:
    """Formulas as MathML, by the converter that docutils brings.

    It is imported here, because tests read this file without it.
    """
    nodes = import_module("docutils.nodes")
    converter = import_module("docutils.utils.math.latex2mathml")
    is_block = isinstance(node, nodes.math_block)
    translator.body.append(converter.tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


def _strip_code(app: Any, doctree: Any) -> None:
    """Drop the empty line that ends a code block.

    doctest needs one between the expected output and the closing fence; readers do not.
    """
    nodes = import_module("docutils.nodes")
    for block in doctree.findall(nodes.literal_block):
        stripped = block.astext().rstrip("\n")
        block.rawsource = stripped
        if len(block.children) == 1 and isinstance(block.children[0], nodes.Text):
            block.children[0] = nodes.Text(stripped)
            block.children[0].parent = block


def setup(app: Any) -> None:  # noqa: D103
    # The line that says that loops are being compiled is not output of an example. It is silenced
    # while pages are built, and not where this file is only imported, as pytest does.
    _compiled._say = lambda words: None
    app.add_html_math_renderer("mathml", (_mathml, None), (_mathml, None))
    app.connect("autodoc-process-docstring", _clean_docstring, priority=100)
    app.connect("doctree-read", _strip_code)
