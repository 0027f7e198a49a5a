"""Every command that a page tells the reader to type is run somewhere, or stands here with the reason why it is not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from dlinfer_ext.e2e.server import free_port, serving

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "docs" / "en").glob("*.md")),
]
FENCE = re.compile(r"^```(bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLES = r"(?:[A-Z_]+=\S+ )*"
# What a line is, by its beginning, and who runs it: a test of this suite, or CI, or nobody, with the reason.
HOW: Final = {
    "make": (r"make [a-z-]+", "the target exists; .ci/run runs those that need no card"),
    "own": (rf"{VARIABLES}python -m dlinfer_ext ", "tests/packaging/test_docs.py; `verify --` by make verify"),
    "explain": (r"dlinfer-ext explain-state ", "here, on what the example with DLINFER_EXT_DUMP leaves"),
    "cost": (r"python -m tests\.ops\.check_cost\b", "not run: it measures, and decides nothing"),
    "mutate": (r"python -m tests\.mutate --fault \w+$", "make mutate; test_docs.py checks the name"),
    "pytest": (rf"{VARIABLES}python -m pytest ", "here: what it names is collected; make test runs it"),
    "example": (rf"{VARIABLES}python examples/(offline|compare)\w+\.py", "here, as it stands"),
    "client": (r"python examples/openai_client\.py", "tests/examples, beside a server"),
    "script": (rf"{VARIABLES}examples/serve_\w+\.sh$", "tests/examples"),
    "serve": (rf"{VARIABLES}lmdeploy serve api_server ", "here: LMDeploy takes each; those of this CPU are started"),
    "curl": (r"curl ", "here, beside a server"),
    "python": (r"python -c \"from tests", "here, as it stands"),
    "wheel": (r"pip download|python -m zipfile|python -c \"from pathlib", "not run: it brings a wheel"),
    "install": (r"pip (install|uninstall) ", "not run: it changes the environment; test_packaging.py installs a wheel"),
    "shell": (r"(source|export|git clone) ", "not run: it is about the reader's shell"),
    "card": (r"(docker run|npu-smi) ", "not run: it needs a card"),
}  # fmt: skip


def lines() -> list[tuple[str, str]]:
    """Return (page, command) of every command line; of a console block those behind a `$`."""
    found = []
    for page in PAGES:
        for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
            text = block.replace("\\\n", " ")
            for line in text.splitlines():
                if kind == "bash" or line.startswith("$ "):
                    command = " ".join(line.removeprefix("$ ").partition(" # ")[0].split())
                    found += [(str(page.relative_to(ROOT)), command)] if command else []
    return found


LINES = lines()


def of(kind: str) -> list[str]:
    return sorted({line for _, line in LINES if re.match(HOW[kind][0], line)})


def here(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell as a reader would, without this package's variables but those it sets."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{p}: {c[:50]}" for p, c in LINES])
def test_a_command_is_run_somewhere_or_there_is_a_reason(page: str, line: str) -> None:
    kinds = [kind for kind, (pattern, _) in HOW.items() if re.match(pattern, line)]
    assert len(kinds) == 1, f"{page}: {line!r} is of the kinds {kinds}; give it one in HOW"


def test_no_kind_is_left_over() -> None:
    assert [kind for kind in HOW if not of(kind)] == []


def test_targets_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    assert {line.split()[1] for line in of("make")} <= targets


@pytest.mark.lmdeploy
def test_lmdeploy_takes_every_option_of_a_server() -> None:
    given = [shlex.split(line)[shlex.split(line).index("serve") :] for line in of("serve")]
    given = [["23333" if word == "PORT" else word for word in words] for words in given]
    code = (
        "import json, sys\n"
        "from lmdeploy.cli.cli import CLI\nfrom lmdeploy.cli.serve import SubCliServe\n"
        "SubCliServe.add_parsers()\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    CLI.parser.parse_args(words)\n"
        "    print('taken')\n"
    )
    line = [sys.executable, "-c", code, json.dumps([*given, [*given[0], "--no-such-option"]])]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("taken") == len(given), done.stderr
    assert "--no-such-option" in done.stderr


@pytest.mark.parametrize("line", of("pytest"))
def test_what_a_pytest_line_names_exists(line: str) -> None:
    words = [w for w in shlex.split(line) if w.startswith("tests/")]
    assert words
    assert [w for w in words if not (ROOT / w.partition("::")[0]).exists()] == []


@pytest.mark.long
@pytest.mark.parametrize("line", [line for line in of("pytest") if " -k " in line])
def test_what_a_pytest_line_selects_is_collected(line: str) -> None:
    done = here(f"{line} --collect-only -p no:cacheprovider")
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"[1-9]\d*(/\d+)? tests? collected", done.stdout), done.stdout[-2000:]


@pytest.mark.parametrize("line", of("python"))
def test_a_python_line_runs(line: str) -> None:
    done = here(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize("line", of("example"))
def test_an_example_runs_as_it_stands(line: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = here(f"cd {tmp_path} && {line}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "tokens" in done.stdout
    for explain in of("explain") if "DLINFER_EXT_DUMP=" in line else ():
        done = here(f"cd {tmp_path} && {explain}")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert done.stdout


# The servers of this CPU, each with the name it gets: PATH is the reader's model.
SERVERS = [line for line in of("serve") if "examples/checkpoints" in line and "PORT" not in line]
SERVERS += ["DLINFER_EXT_VENDOR=cpu " + line for line in of("serve") if " PATH " in line]


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize("line", SERVERS)
def test_a_server_starts_and_answers(line: str) -> None:
    port = str(free_port())
    text = line.replace(" PATH ", " examples/checkpoints/tiny_glm5_next ")
    text = re.sub(r"--server-port \d+", f"--server-port {port}", text)
    if "--server-port" not in text:
        text += f" --server-name 127.0.0.1 --server-port {port} --session-len 512 --cache-max-entry-count 0.2"
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with serving(["bash", "-c", f"cd {ROOT} && exec env {text}"], "any", int(port), env) as server:
        name = json.loads(server.get("/v1/models"))["data"][0]["id"]
        asked = {}
        for command in of("curl"):
            request = command.replace("23333", port).replace("tiny-qwen3.5", name)
            if "spec_decode" in command and "--speculative" not in text:
                continue
            done = here(request)
            assert done.returncode == 0, done.stderr
            asked[command] = done.stdout
    (answer,) = (json.loads(out) for command, out in asked.items() if "/v1/completions" in command)
    assert answer["usage"]["completion_tokens"] > 0


def snippet(page: Path, has: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = (b for b in blocks if has in b)
    return str(text)


@pytest.mark.long
@pytest.mark.lmdeploy
def test_the_readmes_pipeline_answers(tmp_path: Path) -> None:
    text = snippet(ROOT / "README.md", 'pipeline("PATH"')
    text = text.replace('"PATH"', repr(str(ROOT / "examples" / "checkpoints" / "tiny_glm5_next")))
    file = tmp_path / "program.py"
    file.write_text(text + "\nprint(pipe(['def main():'])[0].generate_token_len)\n", encoding="utf-8")
    done = here(f"python {file}", DLINFER_EXT_VENDOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 0


@pytest.mark.long
@pytest.mark.lmdeploy
def test_the_pages_pipeline_finds_its_prompt_in_the_cache(tmp_path: Path) -> None:
    """The page says: the second line starts with a number above 0, and has the same text."""
    text = snippet(ROOT / "docs" / "en" / "quick_start.md", "enable_prefix_caching=True")
    file = tmp_path / "program.py"
    file.write_text(text.replace('"examples/', f'"{ROOT}/examples/'), encoding="utf-8")
    done = here(f"python {file}", DLINFER_EXT_VENDOR="cpu", LMDEPLOY_EXECUTOR_BACKEND="mp")
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (m.groups() for m in re.finditer(r"^(\d+) (['\"].*)$", done.stdout, re.MULTILINE))
    assert int(first[0]) == 0 < int(second[0])
    assert first[1] == second[1]
