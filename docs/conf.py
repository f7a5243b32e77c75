"""The documentation site: `make docs` builds it into build/docs."""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject, PyXRefRole

from surrogap import __version__
from surrogap.core.catalog import SHARED

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import flags  # noqa: E402 (beside this file)

_urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

project = "surrogap"
author = "The surrogap developers"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "surrogap"
html_baseurl = _urls["Documentation"]
html_theme_options = {
    "source_repository": _urls["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

# Names as the public modules have them, and types in the list of arguments.
add_module_names = False
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 72
default_role = "name"
smartquotes = False  # make a dash of the hyphens of a flag

_LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()(\.\./[^)#\s]+)([^)\s]*\))")


def _name_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Code in a docstring, which is a link where it is the name of something on the site."""
    # The radius is an argument; only `surrogap.rho` means the module.
    if re.fullmatch(r"[A-Za-z_][\w.]*", text) and text != "rho":
        return PyXRefRole()("py:obj", rawtext, text, lineno, inliner, {}, [])
    return [nodes.literal(rawtext, text.replace("\x00", ""))], []


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill in what is generated, and lead links that leave docs/ to the repository."""
    folder = (DOCS / page).parent

    def outside(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[2]))
        if path.is_relative_to(DOCS):
            return link[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{link[1]}{_urls['Repository']}/{kind}/main/{path.relative_to(ROOT)}{link[3]}"

    text = _LINK.sub(outside, source[0])
    for name, generate in flags.GENERATED.items():
        if (marker := f"<!-- generated: {name} -->") in text:
            text = text.replace(marker, generate())
    source[0] = text


def _docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names by their path, and name shared arguments."""
    lines[:] = [re.sub(r"\bdocs/([\w/-]+)\.md\b", r":doc:`/\1`", line) for line in lines]
    for i, line in enumerate(lines):
        if line.startswith(":param shared:"):
            lines[i : i + 1] = [f":param {argument}: See `Objective`." for argument in SHARED]


def _signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str,
) -> tuple[str, str] | None:
    """Hide the constructors that only surrogap itself calls, and name shared arguments."""
    if name in {"surrogap.CapturedStep", "surrogap.Report"}:
        return "", returns
    if signature is None or "**shared" not in signature:
        return None
    shared = ", ".join(f"{argument}={default!r}" for argument, default in SHARED.items())
    return signature.replace("**shared", shared), returns


def _finish(app: Sphinx, doctree: nodes.document) -> None:
    """Link images to their files, and set dashes between arguments and what they mean."""
    for image in doctree.findall(nodes.image):
        image.setdefault("scale", 100)  # Sphinx links images with a scale
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":  # Sphinx's own, which it leaves to smartquotes
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.add_role("name", _name_role)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("source-read", _read)
    app.connect("doctree-read", _finish)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
