"""The programs of examples/ run on this CPU and print what they say; the comparison says no where it should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlinfer_ext.e2e.reference import greedy
from dlinfer_ext.e2e.server import Server, free_port, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
QWEN = EXAMPLES / "checkpoints" / "tiny_qwen3_5"
GLM = EXAMPLES / "checkpoints" / "tiny_glm5_next"
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    clean["PATH"] = f"{BIN}:{clean['PATH']}"
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DLINFER_EXT_VENDOR": "cpu", **more}


def run(*line: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=240)


@contextmanager
def served(script: str) -> Iterator[Server]:
    """Run a serve script until the block ends."""
    port = free_port()
    with serving([str(EXAMPLES / script)], "any", port, environment(PORT=str(port))) as server:
        yield server


def expected(prompt: str, tokens: int) -> str:
    """Return transformers' greedy continuation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN)
    (ids,) = greedy(QWEN, [tokenizer(prompt).input_ids], tokens)
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.long
@pytest.mark.lmdeploy
def test_a_server_and_a_client_of_qwen3_5() -> None:
    with served("serve_qwen3_5.sh") as server:
        done = run(sys.executable, "examples/openai_client.py", "--url", f"{server.url}/v1", "--tokens", "12")
        metrics = server.get("/metrics")
    assert done.returncode == 0, done.stderr
    prompt = "class Server:\n    def __init__(self, host, port):\n"
    text = expected(prompt, 12)
    assert f"--- completion\n{prompt}{text}\n--- chat\n" in done.stdout
    assert f"--- stream\n{prompt}{text}\n" in done.stdout
    assert "lmdeploy:spec_decode_num_drafts_total" in metrics


@pytest.mark.long
@pytest.mark.lmdeploy
def test_a_server_of_glm5_next() -> None:
    with served("serve_glm5_next.sh") as server:
        (model,) = json.loads(server.get("/v1/models"))["data"]
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        messages = [{"role": "user", "content": "def main():"}]
        body = {"model": model["id"], "messages": messages, "tools": [tool], "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 16
    # The template opens the reasoning, and 16 tokens of this model do not close it.
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]


@pytest.mark.parametrize(
    ("script", "method", "drafts"),
    [("serve_qwen3_5.sh", "qwen3_5_mtp", "4"), ("serve_glm5_next.sh", "deepseek_mtp", "3")],
)
def test_what_a_serve_script_asks_for(script: str, method: str, drafts: str, tmp_path: Path) -> None:
    """A program of LMDeploy's name that prints its options stands in the way."""
    fake = tmp_path / "lmdeploy"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)

    def asked(*line: str, **more: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(EXAMPLES / script), *line], env={"PATH": path, **more}, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    card = asked("some/model", "--tp", "16")
    assert card[:3] == ["serve", "api_server", "some/model"]
    assert card[-2:] == ["--tp", "16"]
    assert "--eager-mode" not in card
    assert card[card.index("--speculative-algorithm") + 1] == method
    assert card[card.index("--speculative-num-draft-tokens") + 1] == drafts
    cpu = asked(DLINFER_EXT_VENDOR="cpu", DRAFTS="0", PORT="1")
    assert "--eager-mode" in cpu
    assert cpu[cpu.index("--server-port") + 1] == "1"
    assert Path(cpu[2]).is_dir()
    assert not any(word.startswith("--speculative") for word in cpu)


def compared(*line: str, **more: str) -> subprocess.CompletedProcess[str]:
    more = {"DLINFER_EXT_CPU_DTYPE": "float32", **more}
    return run(sys.executable, "examples/compare_with_transformers.py", "--tokens", "16", *line, **more)


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize("line", [[], [str(GLM), "--drafts", "3", "--chunk", "32"]], ids=["qwen3_5", "glm5_next"])
def test_the_comparison_holds(line: list[str]) -> None:
    done = compared(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("16 of 16 tokens equal") == 3
    assert done.stdout.splitlines()[-1].endswith("tolerance 1e-03, dtype float32: equal")


@pytest.mark.long
@pytest.mark.lmdeploy
def test_the_comparison_sees_one_changed_weight(tmp_path: Path) -> None:
    """The control: the norm of one layer is 1 % too large."""
    spoilt = tmp_path / "spoilt"
    shutil.copytree(QWEN, spoilt)
    weights = load_file(spoilt / "model.safetensors")
    (name,) = (n for n in weights if n.endswith("layers.1.linear_attn.norm.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    done = compared(str(spoilt), "--reference", str(QWEN))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("DIFFERENT")


class Model:
    """A model of four tokens whose logits do not depend on the text; token 3 ends it."""

    generation_config = SimpleNamespace(eos_token_id=3)

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.tensor([1.0, 2.0, 1.9995, 5.0]).expand(1, ids.shape[1], 4))


@pytest.mark.parametrize(
    ("token", "given", "found"),
    [
        (1, {1: 2.0, 0: 1.0}, (1, 0, 0.0)),
        (2, {2: 1.9995}, (0, 0, 0.0)),  # a near tie is no fault
        (0, {0: 1.0}, (0, 1, 0.0)),  # transformers is sure of another
        (1, {1: 2.5}, (1, 0, 0.5)),
        (1, {1: 2.0, 3: 5.0}, (1, 0, 0.0)),  # the end token is masked
    ],
)
@pytest.mark.lmdeploy
def test_how_tokens_and_logits_are_compared(token: int, given: dict[int, float], found: tuple[int, int, float]) -> None:
    from examples.compare_with_transformers import compare

    answer: Any = SimpleNamespace(token_ids=[token], logprobs=[given])
    model: Any = Model()
    assert compare(answer, [0, 1], model, 2e-3) == pytest.approx(found, abs=1e-6)


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".sh")} - {"tiny_training.py"}
    assert {name for name in files if f"]({name})" not in text} == set()
