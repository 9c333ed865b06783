"""The settings of Sphinx; scripts/build_site.py lays out the pages and calls it."""

import inspect
from importlib import metadata

from pydantic import BaseModel

import coterie.api  # noqa: F401  (autodoc sets TYPE_CHECKING, with which pydantic builds no models)

project = "Coterie"
author = "The Coterie authors"
version = release = metadata.version("coterie")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
smartquotes = False  # options begin with two hyphens
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Coterie {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False


def keep_colons(app, what, name, value, options, lines):
    """Prevent napoleon from reading the text before an attribute's first colon as its type."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"


def without_fields(app, what, name, value, options, signature, returns):
    """Leave out the signature of a pydantic model, which repeats all fields."""
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return "", returns
    return None


def setup(app):
    """Register the changes to docstrings and signatures."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-process-signature", without_fields)
