"""Build the site of docs/ with Sphinx: `make docs`.

Every warning is an error: a link to a page, a heading or a picture that is not there, a page in no table of contents.
Exit code 1: there was one, or with --external an outside link that nothing answers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from docs.tools.stage import ROOT, stage


def sphinx(builder: str, source: Path, out: Path) -> int:
    """Run one of Sphinx's builders; return its exit code."""
    shutil.rmtree(out, ignore_errors=True)
    # jieba, which splits Chinese into words for the search, still asks for pkg_resources, which warns.
    quiet = ["-W", "ignore:pkg_resources is deprecated:UserWarning"]
    line = [sys.executable, *quiet, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, str(source), str(out)]
    return subprocess.run(line).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder of site-src/ and site/")
    parser.add_argument("--external", action="store_true", help="also ask the web for every outside link")
    args = parser.parse_args()
    source, site = args.out / "site-src", args.out / "site"
    pages = stage(source)
    code = sphinx("html", source, site)
    if code == 0:
        print(f"{len(pages)} pages: {site / 'index.html'}")
    if args.external:
        code |= sphinx("linkcheck", source, args.out / "site-links")
    return code


if __name__ == "__main__":
    sys.exit(main())
