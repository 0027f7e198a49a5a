"""The pages on benchmarks show the records that are beside them, and their commands can be used."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from dlinfer_ext.cli import bench, bench_record, bench_text
from dlinfer_ext.cli.bench_cases import BASELINES

DOCS = Path(__file__).parents[2] / "docs"
BOTH = pytest.mark.parametrize("page", [DOCS / tree / "benchmarks.md" for tree in ("en", "zh_cn")], ids=["en", "zh_cn"])


@BOTH
def test_tables_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ops, engine = (bench_record.read(DOCS / "benchmarks" / f"{name}.json") for name in ("ops", "engine"))
    for table in (bench_text.ratios(ops.cases), bench_text.curves(ops.cases), bench_text.engine(engine.cases)):
        rows = bench_text.markdown(*table).partition("\n")[2]
        assert rows in text
    for record in (ops, engine):
        said = (record.command, record.date, record.commit, record.cpu, *record.versions.values())
        assert [s for s in said if s not in text] == []
    assert [line for line in bench_text.missing(ops.cases) if line not in text] == []


@BOTH
def test_every_baseline_is_explained(page: Path) -> None:
    named = re.findall(r"^\| `([\w-]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == list(BASELINES)


@BOTH
def test_commands_can_be_used(page: Path) -> None:
    found = re.findall(
        r"^(?:\w+=\w+ )?python -m dlinfer_ext bench (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(found) >= 4
    for line in found:
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        parser.parse_args(shlex.split(line))


def test_pictures_are_small() -> None:
    pictures = sorted((DOCS / "en" / "figures").glob("bench_*.png"))
    sizes = [p.stat().st_size for p in pictures]
    assert [p.stem for p in pictures] == ["bench_engine", "bench_growth", "bench_ratios"]
    assert max(sizes) <= 60_000
    assert sum(sizes) <= 200_000
