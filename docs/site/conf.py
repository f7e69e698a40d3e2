"""The site: `sphinx-build -W docs/site docs/site/build`; `pages.py` writes what is made from the code first.

Nothing is fetched while it is built or read: formulas become MathML here, and the theme brings its own fonts and
scripts.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["MINILLAVA_REFERENCE"] = "1"  # importing the package for its docstrings needs no compiled kernels

import pages  # noqa: E402  (it lives beside this file)

pages.write(HERE / "generated")

project = "minillava"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["build", "jupyter_execute"]  # the second one is where myst-nb keeps pictures
html_theme = "furo"
html_title = "minillava"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the committed notebooks hold their outputs
autodoc_preserve_defaults = True  # as they are written: a default that is a path would name the machine
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "member-order": "bysource"}
nitpicky = False  # annotations name types of torch and numpy, which this site does not document


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings here are plain text: paragraphs become paragraphs, what is indented or listed stays as it is typed."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    written = []
    for block in blocks:
        if any(line.startswith((" ", "-")) or re.match(r"\w+:?\s{2,}", line) for line in block.split("\n")):
            written += ["::", "", *textwrap.indent(block, "   ").split("\n"), ""]
        else:
            pieces = re.split(r"(`[^`]+`)", re.sub(r"\s*\n\s*", " ", block))
            escaped = [f"\\ `{p}`\\ " if p.startswith("`") else re.sub(r"([\\*|_`])", r"\\\1", p) for p in pieces]
            written += ["".join(escaped), ""]
    lines[:] = written


def mathml_inline(translator, node):
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def mathml_block(translator, node):
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (mathml_inline, None), (mathml_block, None))
    app.connect("autodoc-process-docstring", plain_docstring)
