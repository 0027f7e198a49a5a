"""Sphinx's settings for the site of docs/, which `make docs` builds into build/site."""

from __future__ import annotations

from typing import Any

from sphinx.search.zh import SearchChinese

project = "dlinfer_ext"
extensions = ["myst_parser"]
language = "en"
smartquotes = False  # options and code keep their own signs
html_theme = "furo"
html_title = project
html_copy_source = html_show_sourcelink = False
html_show_copyright = html_show_sphinx = False
html_search_language = "zh"  # the search below
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
pygments_style = "friendly"
# Read by `make docs EXTERNAL=1` only.
linkcheck_timeout = 20
linkcheck_workers = 4
linkcheck_ignore = [r"http://127\.0\.0\.1"]


class BothLanguages(SearchChinese):  # type: ignore[misc]
    """Splits Chinese text into words and stems English ones.

    Sphinx 9.0 gives the browser the English stemmer under the name of the search's language, so that with "Chinese" its
    script ends with "ChineseStemmer is not defined", and no search finds anything.
    """

    language_name = "English"


def _say_language(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Say the language of a Chinese page, which fonts and screen readers go by."""
    if pagename.startswith("zh_cn/"):
        context["language"] = "zh-CN"


def setup(app: Any) -> None:
    app.add_search_language(BothLanguages)
    app.connect("html-page-context", _say_language)
