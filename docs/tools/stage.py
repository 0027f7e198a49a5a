"""Lay out the pages of docs/ as Sphinx reads them.

The same Markdown is read in the repository and on the site. In the repository a link such as `../../configs/hosts.json`
leaves docs/; on the site it leads to a page `source/configs/hosts.json` that shows the file. A page that is new in
docs/en stands in the navigation without being named anywhere.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {"en": "English", "zh_cn": "中文"}
# What a reader wants first. Pages that are not named here follow by name.
ORDER = ("README", "install", "quick_start", "troubleshooting", "environment", "operators", "hosts", "glm5_next")
LINK = re.compile(r"(?P<open>\]\()(?P<target>[^)\s#:]+)(?P<anchor>(?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SHOWN_BYTES = 60_000


def site_path(path: Path) -> Path:
    """Return where the site has a file or folder of the repository, relative to the site's root."""
    if path == DOCS or DOCS in path.parents:
        name = path.relative_to(DOCS)
        return name / "README.md" if path.is_dir() else name
    name = "source" / path.relative_to(ROOT)
    if path.is_dir():
        return name / "README.md"
    return name if path.suffix == ".md" else name.with_name(name.name + ".md")


def shown(path: Path) -> str:
    """Return the Markdown of the page that shows a file or a folder without README.md."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        entries = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name != "__pycache__")
        return f"# {name}\n\n" + "\n".join(f"- `{entry}`" for entry in entries) + "\n"
    content = path.read_bytes()
    if b"\0" in content or len(content) > SHOWN_BYTES:
        return f"# {name}\n\n{len(content)} bytes, in the repository only.\n"
    kind = {".py": "python", ".json": "json", ".yaml": "yaml", ".sh": "bash"}.get(path.suffix, "text")
    return f"# {name}\n\n````{kind}\n{content.decode()}\n````\n"


def lead(text: str, page: Path) -> tuple[str, list[Path]]:
    """Lead the links of a page to where the site has their targets.

    Args:
        text: Markdown.
        page: its place in the repository.

    Returns:
        The Markdown of the site, and the files outside docs/ that it links to. A link to nothing stays, and Sphinx
        names it.
    """
    found = []
    start = site_path(page).parent

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match["target"]).resolve()
        if not target.exists() or ROOT not in target.parents:
            return match[0]
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        if target != DOCS and DOCS not in target.parents:
            found.append(target)
        return match["open"] + os.path.relpath(site_path(target), start) + match["anchor"]

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    # The word behind `python` tells the tests to run a block; no highlighter knows it.
    parts[1::2] = [re.sub(r"\A```python run$", "```python", part, flags=re.MULTILINE) for part in parts[1::2]]
    return "".join(parts), found


def contents() -> str:
    """Return the tables of contents for the end of the first page: one for each language, every page in it."""
    blocks = []
    for folder, name in LANGUAGES.items():
        stems = sorted(p.stem for p in (DOCS / folder).glob("*.md"))
        stems.sort(key=lambda stem: ORDER.index(stem) if stem in ORDER else len(ORDER))
        lines = "\n".join(f"{folder}/{stem}" for stem in stems)
        blocks.append(f"\n```{{toctree}}\n:hidden:\n:caption: {name}\n\n{lines}\n```\n")
    return "".join(blocks)


def stage(folder: Path) -> list[Path]:
    """Write everything that Sphinx reads into a folder, which is emptied before; return the pages' paths in it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("tools", "*.md", "__pycache__"))
    waiting = sorted(DOCS.rglob("*.md"))
    written: dict[Path, Path] = {}
    while waiting:
        page = waiting.pop()
        if page in written:
            continue
        if page.suffix == ".md":
            text, more = lead(page.read_text(encoding="utf-8"), page)
            waiting += more
        else:
            text = shown(page)
        if DOCS not in page.parents:
            text = f"---\norphan: true\n---\n{text}"
        target = folder / ("index.md" if page == DOCS / "README.md" else site_path(page))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + (contents() if target == folder / "index.md" else ""), encoding="utf-8")
        written[page] = target
    return sorted(written.values())
