"""The site of the pages builds, is whole, and is searchable; its figures and tables are what their sources say."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference as conv
from dlinfer_ext.kernels.gated_delta_rule import reference as delta
from docs.tools import figures, stage, tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md"))


class Html(HTMLParser):
    """What a page of the site refers to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[k] for k in ("id", "name") if k in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("index", "search", "next", "prev") and "href" in given:
            self.loads.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loads.append(given["src"])


def faults(site: Path) -> list[str]:
    """Return what does not hold in a built site: links and pictures that lead nowhere, files from the network."""
    pages = {p: Html(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        found += [f"{path.name} loads {x}" for x in page.loads if urlsplit(x).netloc]
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{path.name} leads to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.name} leads to {link}, which has no such place")
    return found


def build(out: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "docs.tools.build", "--out", str(out)]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=300)


needs_sphinx = pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="make docs installs Sphinx")


@pytest.mark.long
@needs_sphinx
def test_the_site_is_whole_and_is_found_in(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    for page in PAGES:
        made = site / ("index.html" if str(page) == "README.md" else page.with_suffix(".html"))
        text = made.read_text(encoding="utf-8")
        title = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert f">{title}<" in text
        assert f'lang="{"zh-CN" if page.parts[0] == "zh_cn" else "en"}"' in text
    first = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f'href="{page.with_suffix(".html")}"' in first, f"{page} is not in the navigation"
    assert faults(site) == []

    node = shutil.which("node")
    if node is None:
        pytest.skip("all but the search was checked: it needs node")
    line = [node, str(Path(__file__).with_name("site_search.js")), str(site), "rewind", "preemption", "安装", "抢占"]
    found = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    assert "en/operators" in found["rewind"]
    assert "en/e2e" in found["preemption"]
    assert "zh_cn/install" in found["安装"]
    assert "zh_cn/e2e" in found["抢占"]


@pytest.mark.long
@needs_sphinx
@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ("[x](no_such_page.md)", "no_such_page.md"),
        ("[x](install.md#no-such-heading)", "no-such-heading"),
        ("![x](figures/none.svg)", "none.svg"),
        ("[x](../../configs/none.json)", "none.json"),
    ],
    ids=["page", "heading", "picture", "file"],
)
def test_a_broken_link_ends_the_build(spoilt: str, says: str, tmp_path: Path) -> None:
    """The control: one page with one link that leads nowhere."""
    (tmp_path / "docs" / "en").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "tools", tmp_path / "docs" / "tools")
    shutil.copy(ROOT / "docs" / "conf.py", tmp_path / "docs")
    (tmp_path / "docs" / "README.md").write_text("# First\n", encoding="utf-8")
    (tmp_path / "docs" / "en" / "install.md").write_text("# Installation\n", encoding="utf-8")
    (tmp_path / "docs" / "zh_cn").mkdir()
    (tmp_path / "docs" / "zh_cn" / "install.md").write_text("# 安装\n", encoding="utf-8")
    assert build(tmp_path / "build", tmp_path).returncode == 0
    (tmp_path / "docs" / "en" / "install.md").write_text(f"# Installation\n\n{spoilt}\n", encoding="utf-8")
    done = build(tmp_path / "build", tmp_path)
    assert done.returncode == 1
    assert says in done.stderr


def test_what_leads_nowhere_in_a_built_site_is_found(tmp_path: Path) -> None:
    """The control of `faults`."""
    page = '<a href="b.html#x"></a><a href="c.html"></a><img src="d.png"><script src="https://a.b/c.js"></script>'
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    (tmp_path / "b.html").write_text('<p id="y">', encoding="utf-8")
    assert len(faults(tmp_path)) == 4
    (tmp_path / "a.html").write_text('<a href="b.html#y"></a><a href="https://a.b"></a>', encoding="utf-8")
    assert faults(tmp_path) == []


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = stage.contents()
    assert all(f"\n{page.with_suffix('')}\n" in listed for page in PAGES[1:])


def test_index_pages_list_every_page() -> None:
    for folder in stage.LANGUAGES:
        index = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
        pages = {p.name for p in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
        assert {name for name in pages if f"]({name})" not in index} == set()


def test_figures_are_what_the_definitions_do() -> None:
    for path, wanted in figures.files().items():
        assert path.read_text(encoding="utf-8") == wanted, f"{path}: run make docs-tables"


def test_a_figure_follows_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a step that forgets how many drafts stood, and states that lie one entry on."""
    right = figures.text(figures.rewind())
    update, rule = conv.causal_conv1d_update, delta.gated_delta_rule_update

    def forgets(*args: Any, **given: Any) -> Tensor:
        given["num_accepted_tokens"] = given["num_accepted_tokens"].clamp(max=1)
        return update(*args, **given)

    def moved(*args: Any, **given: Any) -> Tensor:
        given["history_lens"] = given["history_lens"] + 1
        return rule(*args, **given)

    monkeypatch.setattr(conv, "causal_conv1d_update", forgets)
    assert figures.text(figures.rewind()) != right
    monkeypatch.setattr(delta, "gated_delta_rule_update", moved)
    with pytest.raises(ValueError, match="a step reads nan"):
        figures.recurrent()


def test_tables_are_those_of_configs() -> None:
    pages = tables.pages()
    for path, wanted in pages.items():
        assert path.read_text(encoding="utf-8") == wanted, f"{path}: run make docs-tables"
    names = {m["name"] for text in pages.values() for m in tables.PLACE.finditer(text)}
    assert names == set(tables.TABLES)
    versions = json.loads((ROOT / "configs" / "hosts.json").read_text(encoding="utf-8"))["lmdeploy"]
    head, _, *rows = tables.hosts("en").splitlines()
    assert all(f" {version} |" in head for version in versions)
    assert len(rows) == len({key for entry in versions.values() for key in entry})


SOURCE = re.compile(r"https?://[^\s)`\"',;]+|(?:arXiv|arxiv) (\d{4}\.\d{5})")


def sources(text: str) -> set[str]:
    """Return the papers and projects that a source file names: an arXiv number is its address, a file its project."""
    found = set()
    for match in SOURCE.finditer(text):
        link = f"https://arxiv.org/abs/{match[1]}" if match[1] else match[0].rstrip(".:")
        link = re.sub(r"(https://github\.com/[^/]+/[^/]+)/.*", r"\1", link)
        if not re.match(r"http://127|https://download|https://github\.com/\{", link):
            found.add(link)
    return found


@pytest.mark.parametrize("language", stage.LANGUAGES)
def test_every_source_that_a_definition_names_is_on_the_page(language: str) -> None:
    files = [*sorted((ROOT / "kernels").rglob("*.py")), *sorted((ROOT / "dlinfer_ext" / "ops").glob("*.py"))]
    named = {link for f in files for link in sources(f.read_text(encoding="utf-8"))}
    definitions = {f: sources(f.read_text(encoding="utf-8")) for f in files if f.name == "reference.py"}
    assert sum(map(len, definitions.values())) >= 5
    page = (ROOT / "docs" / language / "provenance.md").read_text(encoding="utf-8")
    assert {link for link in named if f"]({link})" not in page} == set()


def test_a_source_is_found_in_each_form() -> None:
    """The control of `sources`."""
    text = "(the operator of https://github.com/a/b/blob/main/c.py). Yang et al., arXiv 2412.06464; https://x.y/z."
    assert sources(text) == {"https://github.com/a/b", "https://arxiv.org/abs/2412.06464", "https://x.y/z"}


def test_a_table_fills_its_own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two empty places stay two, and a second run changes nothing."""
    place = "<!-- table: {} -->\n\n<!-- end -->\n"
    page = tmp_path / "docs" / "en" / "a.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"# A\n\n{place.format('pairs')}\ntext\n\n{place.format('chips')}", encoding="utf-8")
    pairs, chips = tables.pairs("en"), tables.chips("en")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "TABLES", {"pairs": lambda _: pairs, "chips": lambda _: chips})
    for _ in range(2):
        (text,) = tables.pages().values()
        assert text.count(pairs) == text.count(chips) == 1
        assert "\ntext\n" in text
        page.write_text(text, encoding="utf-8")
