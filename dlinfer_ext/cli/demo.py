"""`demo`: the stock LMDeploy server on a trained tiny model, with MTP, asked and checked."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..e2e import model_folder
from ..e2e import server as serve

CHECKPOINTS = {
    "qwen": (Path("examples/checkpoints/tiny_qwen3_5"), "tiny-qwen3.5"),
    "glm": (Path("examples/checkpoints/tiny_glm5_next"), "tiny-glm-5.3"),
}
PROMPTS = (
    "import os\nimport sys\n\ndef read_file(path):\n    with open(path) as f:\n",
    'def join(a, b):\n    """Join two or more pathname components',
)


@dataclass(frozen=True)
class Answer:
    """One prompt's continuation."""

    prompt: str
    text: str
    tokens: int
    seconds: float
    identical: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = " or ".join(CHECKPOINTS)
    parser.add_argument("--model", default="qwen", help=f"{names} (the trained ones), or a checkpoint folder")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per step (default 4; 0 turns MTP off)")
    parser.add_argument("--tokens", type=int, default=80, help="tokens to generate per prompt (default 80)")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--serve", action="store_true", help="leave the server running and print how to ask it")
    parser.epilog = "Exit code 1: no server, an answer that differs from transformers, or no draft accepted."


def run(args: argparse.Namespace) -> int:
    path, name = CHECKPOINTS.get(args.model, (Path(args.model), Path(args.model).name))
    try:
        model_folder.check(path)
    except model_folder.ModelFolderError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    port = args.port or serve.free_port()
    line = serve.command(path.resolve(), name, port, args.drafts)
    say = (lambda *_: None) if args.json else print
    say("$ DLINFER_EXT_VENDOR=cpu DLINFER_EXT_CPU_DTYPE=float32 lmdeploy " + " ".join(map(str, line[3:])))
    started = time.monotonic()
    try:
        with serve.serving(line, name, port, serve.environment()) as server:
            say(f"server up in {time.monotonic() - started:.1f} s at {server.url}")
            if args.serve:
                return _leave_running(server, args.json)
            report = _ask(server, path, args)
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    report["command"] = line[1:]
    ok = report["token_identical"] and (not args.drafts or report["accepted"] > 0)
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0 if ok else 1


def _ask(server: serve.Server, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
    expected = _transformers(path, args.tokens)
    answers = []
    for prompt, want in zip(PROMPTS, expected, strict=True):
        start = time.monotonic()
        reply = client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=args.tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "top_k": 1},
        )
        seconds = time.monotonic() - start
        ids = _generate(server, prompt, args.tokens)
        assert reply.usage is not None
        answers.append(Answer(prompt, reply.choices[0].text, reply.usage.completion_tokens, seconds, ids == want))
    return {
        "answers": [asdict(a) for a in answers],
        "tokens_per_second": sum(a.tokens for a in answers) / sum(a.seconds for a in answers),
        "token_identical": all(a.identical for a in answers),
        **_acceptance(server, args.drafts),
    }


def _generate(server: serve.Server, prompt: str, tokens: int) -> list[int]:
    """Ask LMDeploy's /generate, which returns token ids; the OpenAI completion returns text only."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        ids: list[int] = json.load(reply)["output_ids"]
    return ids


def _transformers(checkpoint: Path, tokens: int) -> list[list[int]]:
    """Return the greedy continuations by transformers in fp32."""
    from transformers import AutoTokenizer

    from ..e2e.reference import greedy

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    return greedy(checkpoint, [tokenizer(prompt).input_ids for prompt in PROMPTS], tokens)


def _acceptance(server: serve.Server, drafts: int, patience_s: float = 10) -> dict[str, Any]:
    """Read the accepted drafts by position from the server's own /metrics, once they have stopped changing."""
    if not drafts:
        return {"verify_steps": 0, "accepted": 0, "accepted_by_position": []}
    deadline = time.monotonic() + patience_s
    counts, before = _draft_counts(server, drafts), None
    while counts != before and time.monotonic() < deadline:
        time.sleep(1)
        counts, before = _draft_counts(server, drafts), counts
    steps, accepted, *by_position = counts
    return {
        "verify_steps": int(steps),
        "accepted": int(accepted),
        "accepted_by_position": [round(n / steps, 3) if steps else 0.0 for n in by_position],
    }


def _draft_counts(server: serve.Server, drafts: int) -> list[float]:
    """Return verify steps, drafts accepted, and drafts accepted at each position."""
    metrics = server.get("/metrics")

    def total(name: str, label: str = "") -> float:
        rows = re.findall(rf"^lmdeploy:spec_decode_{name}_total\{{(.*?)\}} (\S+)$", metrics, re.MULTILINE)
        return sum(float(value) for labels, value in rows if label in labels)

    by_position = (total("num_accepted_tokens_per_pos", f'position="{p}"') for p in range(drafts))
    return [total("num_drafts"), total("num_accepted_tokens"), *by_position]


def _text(report: dict[str, Any]) -> str:
    lines = []
    for a in report["answers"]:
        lines += ["", "--- prompt", a["prompt"].rstrip(), "--- continuation", a["text"].rstrip()]
    lines += ["", f"tokens/s (server, one request at a time): {report['tokens_per_second']:.0f}"]
    if report["accepted_by_position"]:
        lines.append(
            f"drafts accepted by position: {' '.join(f'{p:.3f}' for p in report['accepted_by_position'])} "
            f"({report['accepted']} in {report['verify_steps']} verify steps)"
        )
    lines.append(f"token-identical to transformers: {'yes' if report['token_identical'] else 'no'}")
    return "\n".join(lines)


def _leave_running(server: serve.Server, as_json: bool) -> int:
    body = json.dumps({"model": server.model, "prompt": "def main():", "max_tokens": 48, "temperature": 0})
    if as_json:
        print(json.dumps({"url": server.url, "model": server.model, "pid": server.pid}), flush=True)
    else:
        print(f"ask it:  curl {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
        print("stop it: Ctrl-C", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
