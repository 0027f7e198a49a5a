"""The documents are true: mirrored page by page, linked, complete, and their commands and code run."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

import dlinfer_ext.ops  # noqa: F401  (declares the operators)
from dlinfer_ext import envs
from dlinfer_ext.cli import e2e
from dlinfer_ext.e2e import judge, report, scenario
from dlinfer_ext.framework.lmdeploy import contract
from dlinfer_ext.framework.lmdeploy.patches import PATCHES
from dlinfer_ext.ops import _registry
from dlinfer_ext.testing import TOLERANCE
from dlinfer_ext.toolchain import interpreter, native
from tests import faults, mutate

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "docs" / "en", ROOT / "docs" / "zh_cn"
PAGES = sorted(p.name for p in ENGLISH.glob("*.md"))
DOCUMENTS = [
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "kernels" / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "examples" / "checkpoints" / "README.md",
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EACH_PAGE = pytest.mark.parametrize("page", PAGES)
BOTH_TREES = pytest.mark.parametrize("tree", [ENGLISH, CHINESE], ids=["en", "zh_cn"])


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, kind: str = "") -> list[str]:
    """Return the code blocks of a page whose info string is `kind`, or all."""
    return [text for info, text in FENCE.findall(read(path)) if not kind or info == kind]


def table(text: str, column: int = 0) -> list[str]:
    """Return the code spans that start a cell of the given column, in every table of a page."""
    rows = re.findall(r"^\|(.+)\|$", text, re.MULTILINE)
    cells = [row.split("|")[column].strip() for row in rows]
    return [c.strip("`") for c in cells if c.startswith("`")]


def run(line: list[str], cwd: Path = ROOT, variables: dict[str, str] | None = None) -> str:
    """Run a command without this package's variables but those given, and return what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(variables or {})}
    done = subprocess.run(line, cwd=cwd, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{shlex.join(line)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


# --- the two trees ----------------------------------------------------------------------------------------------------


def test_both_trees_hold_the_same_pages() -> None:
    assert PAGES
    assert sorted(p.name for p in CHINESE.glob("*.md")) == PAGES


@EACH_PAGE
def test_code_blocks_are_the_same_in_both_languages(page: str) -> None:
    assert FENCE.findall(read(ENGLISH / page)) == FENCE.findall(read(CHINESE / page))


@EACH_PAGE
def test_headings_and_table_rows_correspond(page: str) -> None:
    shapes = []
    for tree in (ENGLISH, CHINESE):
        prose = FENCE.sub("", read(tree / page))
        shapes.append([re.match(r"#+|\|", line).group() for line in prose.splitlines() if line[:1] in ("#", "|")])  # type: ignore[union-attr]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_files_resolve(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def tables(path: Path) -> list[list[str]]:
    """Return, for every table of a page, the code spans in its first column."""
    prose = FENCE.sub("", read(path))
    found = re.findall(r"(?:^\|.*\|$\n?)+", prose, re.MULTILINE)
    return [[c for row in rows.splitlines() for c in re.findall(r"`([^`]+)`", row.split("|")[1])] for rows in found]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_fence_is_closed_and_of_a_known_kind(path: Path) -> None:
    text = read(path)
    assert text.count("```") == 2 * len(FENCE.findall(text))
    assert {info for info, _ in FENCE.findall(text)} <= {"bash", "console", "python", "python run", "text", "yaml"}


# --- what pages list is what the code has -----------------------------------------------------------------------------


@BOTH_TREES
def test_every_variable_is_documented_with_its_default(tree: Path) -> None:
    text = read(tree / "environment.md")
    listed = [name for name in table(text) if name.startswith("DLINFER_EXT_")]
    assert listed == [v.name for v in envs.ALL]
    for var in envs.ALL:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{var.name}` |"))
        assert all(f"`{choice}`" in row for choice in (*var.choices, var.default) if choice)


@BOTH_TREES
def test_hooks_are_those_of_the_contract(tree: Path) -> None:
    rows = re.findall(r"^\| (H\d+) \|(.*)$", read(tree / "hosts.md"), re.MULTILINE)
    wanted = {"H1"} | {s.hook for s in contract.SEAMS}
    assert [hook for hook, _ in rows] == sorted(wanted, key=lambda h: int(h[1:]))
    for patch in PATCHES:
        text = dict(rows)[patch.hook]
        assert f"`{patch.module.removeprefix('lmdeploy.')}" in text, f"{patch.key} is not named"
        assert ("| cpu |" in text) == (patch.vendors == ("cpu",))


@BOTH_TREES
def test_limits_are_those_of_the_tests(tree: Path) -> None:
    section = read(tree / "operators.md").rpartition("| fp32 | bf16 | fp16 |")[2]
    rows = re.findall(r"^\| [^|`]+ \| (\S+) \| (\S+) \| (\S+) \|$", section, re.MULTILINE)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    families = ("conv", "delta_rule", "kda", "norm", "kpool", "latent", "hyper_connection", "clamped_moe")
    wanted = [tuple(TOLERANCE[f, d] for d in dtypes) for f in families]
    assert [tuple(map(float, row)) for row in rows if "---" not in row] == wanted
    assert len(TOLERANCE) == len(wanted) * len(dtypes)


def test_the_table_of_operators_is_the_registry() -> None:
    text = read(ROOT / "kernels" / "README.md").partition("## Letters")[0]
    assert sorted(table(text)) == sorted(_registry.OPERATORS)
    for name in _registry.OPERATORS:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        target = _registry.routes(name, "cpu")[0].target
        assert f"({target.removeprefix('dlinfer_ext.kernels.').split('.')[0]})" in row


@BOTH_TREES
def test_names_and_faults_that_pages_mention_exist(tree: Path) -> None:
    from dlinfer_ext.vendor.ascend import triton_ops

    text = read(tree / "operators.md").partition("dlinfer_ext.vendor.ascend.triton_ops")[2]
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|$", text, re.MULTILINE)
    offered = [name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(offered) == sorted(n for n in vars(triton_ops) if not n.startswith("_"))
    assert {name for _, cell in rows for name in re.findall(r"`(\w+)`", cell)} <= set(_registry.OPERATORS)
    for name in re.findall(r"PLANT=(\w+)", read(tree / "testing.md")):
        assert name in faults.FAULTS
    planted = re.findall(r"tests\.mutate --fault (\w+)", read(tree / "testing.md"))
    assert planted
    assert set(planted) <= set(mutate.CAUGHT_BY)


@BOTH_TREES
def test_scenarios_settings_and_rules_are_those_of_the_code(tree: Path) -> None:
    found = tables(tree / "e2e.md")
    assert [f.stem for f in scenario.shipped()] in found
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:cpu|npu)[^|]*) \|", read(tree / "e2e.md"), re.MULTILINE))
    for file in scenario.shipped():
        assert tuple(re.findall(r"\w+", rows[file.stem])) == scenario.load(file).where
    kinds: tuple[type[BaseModel], ...] = (scenario.Scenario, scenario.Request, scenario.Soak, scenario.Law)
    wanted = [[name for name in kind.model_fields if name != "name"] for kind in kinds]
    assert [sorted(t) for t in found if sorted(t) in map(sorted, wanted)] == [sorted(w) for w in wanted]
    assert list(report.RULES) in found
    for number in (judge.LOGIT_MARGIN, round(100 * judge.LOGIT_ERROR)):
        assert f"{number}" in read(tree / "e2e.md")


@pytest.mark.parametrize("text", blocks(ENGLISH / "e2e.md", "yaml"))
def test_scenario_of_the_page_can_be_used(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my_scenario.yaml"
    file.write_text(text, encoding="utf-8")
    assert len(list(scenario.load(file).runs())) == 4


@BOTH_TREES
def test_engine_starts_on_a_card_are_counted(tree: Path) -> None:
    starts = 0
    for file in scenario.shipped():
        one = scenario.load(file)
        if "npu" in one.where:
            starts += len(list(one.runs())) * one.engines + (one.law is None)  # and the plain run
    assert re.search(rf"\b{starts}\b", read(tree / "e2e.md"))


# --- what pages tell the reader to run --------------------------------------------------------------------------------


OWN_COMMAND = r"\bpython -m dlinfer_ext\b(?! demo| verify --| e2e(?! --list))"


def commands() -> list[str]:
    """Return every command of this package's own line in the pages.

    Left out: demo, which needs a server and has tests of its own; the kernel checks, which `make verify` runs; and the
    scenarios, which are tests.
    """
    found = []
    for page in PAGES:
        for block in blocks(ENGLISH / page, "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                line
                for line in lines
                if re.search(r"\bpython -m dlinfer_ext\b(?! demo| verify --| e2e(?! --list))", line)
            ]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_command_exits_with_zero(line: str) -> None:
    words = shlex.split(line)
    variables = dict(w.split("=", 1) for w in words[: words.index("python")])
    if words[-1] == "env":
        # On an Ascend machine the vendor need not be set.
        variables.setdefault("DLINFER_EXT_VENDOR", "cpu")
    run([sys.executable, *words[words.index("python") + 1 :]], variables=variables)


def scenario_commands() -> list[str]:
    text = "\n".join(b.replace("\\\n", " ") for page in PAGES for b in blocks(ENGLISH / page, "bash"))
    return sorted({line.partition(" 2>&1")[0] for line in re.findall(r"python -m dlinfer_ext e2e(.*)", text)})


@pytest.mark.parametrize("options", scenario_commands())
def test_scenario_command_can_be_used(options: str) -> None:
    parser = argparse.ArgumentParser()
    e2e.add_arguments(parser)
    given = parser.parse_args(shlex.split(re.sub(r"\$\(.*\)", "--config a.yaml", options)))
    for name in given.config or ():
        assert name.endswith(".yaml") or scenario.find(name).is_file()


def snippets(kind: str) -> list[tuple[str, str]]:
    return [(f"{page}-{i}", text) for page in PAGES for i, text in enumerate(blocks(ENGLISH / page, kind))]


@pytest.mark.parametrize("text", [t for _, t in snippets("python run")], ids=[n for n, _ in snippets("python run")])
def test_snippet_runs(text: str, tmp_path: Path) -> None:
    run([sys.executable, "-c", text], cwd=tmp_path)


WHOLE = [(name, text) for name, text in snippets("python") if not text.startswith("# into ")]


@pytest.mark.parametrize("text", [t for _, t in WHOLE], ids=[n for n, _ in WHOLE])
def test_snippet_compiles(text: str) -> None:
    ast.parse(text)


def test_following_the_page_adds_an_operator(tmp_path: Path) -> None:
    """Do what adding_an_operator.md says, in a copy, and run what it says to run."""
    copy = tmp_path / "checkout"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("dlinfer_ext", "kernels", "configs", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "requirements", copy / "requirements")

    def insert(name: str, after: str, text: str) -> None:
        old = read(copy / name)
        assert after in old, f"{name} has no {after!r}"
        (copy / name).write_text(old.replace(after, after + text, 1), encoding="utf-8")

    for block in blocks(ENGLISH / "adding_an_operator.md", "python"):
        first, _, body = block.partition("\n")
        files = re.findall(r"[\w/]+\.py", first)
        if not first.startswith("# into "):
            (copy / files[0]).parent.mkdir(exist_ok=True)
            (copy / files[0]).write_text(body, encoding="utf-8")
        elif "__all__" in first:
            insert(files[0], "import rejection_sample, unusable_positions, verify, verify_greedy\n", body)
            insert(files[0], '    "sigmoid_gating_delta_rule_update",\n', '    "soft_cap",\n')
        else:
            # The page shows what goes in; a reader finds the place by the name.
            where = {
                "CALLS": "Mapping[str, Call] = {\n",
                "FOLDERS": "dict[str, str]] = {\n",
                "FAMILIES": "FAMILIES: Final = (" if "toolchain" in files[0] else "FAMILIES = (",
            }
            name = first.split()[2]
            insert(files[0], where[name], first.partition(".py: ")[2] + " " if name == "FAMILIES" else body)
    (row,) = (b for b in blocks(ENGLISH / "adding_an_operator.md", "text") if b.startswith("| `soft_cap`"))
    insert("kernels/README.md", "|---|---|---|---|---|---|---|\n", row)

    touched = ["dlinfer_ext", "kernels/soft_cap", "tests/kernels"]
    run([sys.executable, "-m", "ruff", "check", "--no-cache", *touched], copy)
    path = {"PYTHONPATH": str(copy)}
    assert "soft_cap" in run([sys.executable, "-m", "dlinfer_ext", "ops"], copy, path)
    bench = ["-m", "dlinfer_ext", "bench", "ops", "--family", "cap", "--repeats", "3"]
    assert "soft_cap" in run([sys.executable, *bench], copy, path)
    tests = ["tests/kernels/test_soft_cap.py", "tests/ops/test_interface.py", "tests/ops/test_registry.py"]
    tables = "tests/packaging/test_docs.py::test_the_table_of_operators_is_the_registry"
    pytest_line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "soft_cap or table or vendor"]
    out = run([*pytest_line, *tests, tables], copy, path)
    assert int(re.findall(r"(\d+) passed", out)[-1]) >= 20, out
    for route, missing in (("interpret", interpreter.missing()), ("native", native.missing())):
        if missing is not None:
            pytest.skip(f"all but the kernel's {route} checks was done: {missing}")
        out = run([sys.executable, "-m", "pytest", "-q", "--route", route, tests[0]], copy, path)
        assert int(re.findall(r"(\d+) passed", out)[-1]) >= 10, out
    verify = ["-m", "dlinfer_ext", "verify", "--native", "--count", "--operator", "soft_cap", "--json"]
    assert [r["held"] for r in json.loads(run([sys.executable, *verify], copy, path))] == [True, True]


@pytest.mark.lmdeploy
def test_offline_example_runs() -> None:
    line = [
        sys.executable,
        "examples/offline_pipeline.py",
        "--tokens",
        "12",
        "--prompt",
        "import os\n",
        "--prompt",
        "x",
    ]
    out = run(line, variables={"DLINFER_EXT_VENDOR": "cpu"})
    assert out.count("tokens in, 12 out") == 2


@pytest.mark.parametrize("name", ["offline_pipeline.py", "openai_client.py"])
def test_examples_explain_themselves(name: str) -> None:
    out = run([sys.executable, f"examples/{name}", "--help"], variables={"DLINFER_EXT_VENDOR": "cpu"})
    assert "usage:" in out
    assert f"examples/{name}" in out
