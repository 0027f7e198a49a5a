"""What the scripts that train a tiny checkpoint share: text, optimiser loop, head training, acceptance, report.

Stages, each of which keeps its product in ``--work`` and is skipped when that product is there:

1. text and tokenizer: the Python standard library, byte-level BPE of 512 entries with the model's own pre-tokenizer;
2. base: the text model, next-token cross-entropy;
3. head (dlinfer_ext/e2e/simulation.py): the draft layer, trunk frozen, unrolled over its own hidden state for four
   drafts;
4. save and report: a Hugging Face directory with ``TRAINING.json`` and the held-out prompts for the tests.

Both training stages follow a schedule in steps, so seed and step counts fix the result on one machine and one set of
versions. ``--minutes`` and ``--head-minutes`` only bound one invocation: run the same command again to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from dlinfer_ext.e2e.simulation import accepted_drafts, hidden_states, summarise, walk

VOCAB_SIZE = 512
HELD_OUT_FILES = 12
WINDOW = 256  # tokens per training sequence
BATCH = 4
DRAFTS = 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 128


def next_token_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats: tokens [B, T]."""
    logits = model.lm_head(hidden_states(model, tokens)[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Recipe:
    """What one model does in its own way.

    Attributes:
        train_tokenizer: texts to a tokenizer of `VOCAB_SIZE` entries.
        build_model: tokenizer and seed to the untrained model.
        make_head: model to the draft head that starts from it.
        head_weights: model and head to the head's weights under their names in the checkpoint.
        finish_config: changes config.json, in place, to the released spelling.
        loss: of the base for tokens [B, T]; more than the cross-entropy where a part learns otherwise.
        training: what holds while the base trains, such as a faster form of an operator.
        steps: of the base.
        head_steps: of the head.
    """

    train_tokenizer: Callable[[list[str]], Any]
    build_model: Callable[[Any, int], Any]
    make_head: Callable[[Any], Any]
    head_weights: Callable[[Any, Any], dict[str, torch.Tensor]]
    finish_config: Callable[[dict[str, Any]], None] = lambda config: None
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = next_token_loss
    training: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: int = 2200
    head_steps: int = 2000


# ---------------------------------------------------------------------------------------------------- text, tokenizer


def standard_library() -> tuple[list[Path], list[Path]]:
    """Return the training and the held-out source files of this interpreter's standard library (PSF licence)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = ("/test", "/site-packages/", "/idlelib/", "/encodings/", "/pydoc_data/")
    files = sorted(f for f in root.rglob("*.py") if not any(part in f"/{f.relative_to(root)}" for part in left_out))
    random.Random(0).shuffle(files)
    return files[HELD_OUT_FILES:], files[:HELD_OUT_FILES]


def read(file: Path) -> str:
    return file.read_text(encoding="utf8", errors="ignore")


def train_bpe(backend: Any, texts: list[str], special_tokens: tuple[str, ...]) -> tuple[dict[str, int], list[Any]]:
    """Train a byte-level BPE behind the normaliser and pre-tokenizer of `backend`; return vocabulary and merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {token: len(model["vocab"]) + i for i, token in enumerate(special_tokens)}
    return vocab, [tuple(pair) for pair in model["merges"]]


def prepare_text(work: Path, train_tokenizer: Callable[[list[str]], Any]) -> dict[str, Any]:
    """Stage 1: write ``tokenizer/`` and ``text.pt`` (int64 token streams ``train`` and ``held_out``, and ``facts``)."""
    product = work / "text.pt"
    if not product.exists():
        train_files, held_out_files = standard_library()
        train, held_out = [read(f) for f in train_files], [read(f) for f in held_out_files]
        tokenizer = train_tokenizer(train)
        tokenizer.save_pretrained(work / "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer", trust_remote_code=False)

        def stream(texts: list[str]) -> torch.Tensor:
            return torch.tensor([i for ids in tokenizer(texts, verbose=False)["input_ids"] for i in ids])

        facts = {
            "source": f"Python {platform.python_version()} standard library, {len(train)} files; tests, idlelib, "
            "encodings and pydoc_data left out",
            "licence": "Python Software Foundation License Version 2; the text itself is not redistributed",
            "characters": sum(map(len, train)),
            "sha256": hashlib.sha256("".join(train).encode("utf8", "replace")).hexdigest(),
            "held_out": [f.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for f in held_out_files],
        }
        save({"train": stream(train), "held_out": stream(held_out), "facts": facts}, product)
    text: dict[str, Any] = torch.load(product, weights_only=True)
    print(f"text: {len(text['train'])} training tokens, {len(text['held_out'])} held out", flush=True)
    return text


# ------------------------------------------------------------------------------------------------------------ training


def save(value: dict[str, Any], path: Path) -> None:
    """Write atomically, so that an interrupted run leaves a whole file."""
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def train(
    modules: nn.Module,
    loss: Callable[[torch.Generator], torch.Tensor],
    path: Path,
    *,
    steps: int,
    minutes: float,
    weight_decay: float,
    seed: int,
    evaluate: Callable[[], dict[str, Any]],
) -> dict[str, Any] | None:
    """Run AdamW to ``steps`` from the state saved at ``path``, or until ``minutes`` have passed.

    Learning rate: 3e-3, 60 warm-up steps, constant to 30 % of the steps, then linear to 2 %. Windows are drawn from
    a generator whose state is saved with the rest, so an interrupted run gives what an uninterrupted one would.

    Returns:
        ``evaluate()``'s figures with ``steps`` and ``minutes`` of training, or None where the time ran out.
    """
    peak = 3e-3
    parameters = list(modules.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=peak,
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(seed)
    step, seconds = 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        modules.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        step, seconds = state["step"], state["seconds"]

    start = time.monotonic() - seconds
    deadline = time.monotonic() + 60 * minutes
    while step < steps and time.monotonic() < deadline:
        done = step / steps
        rate = peak * min(1, (step + 1) / 60) * min(1, max(0.02, 1 - (done - 0.3) / 0.7))
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = loss(generator)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0 or step == steps or time.monotonic() >= deadline:
            seconds = time.monotonic() - start
            state = {"model": modules.state_dict(), "optimizer": optimizer.state_dict()}
            save(state | {"generator": generator.get_state(), "step": step, "seconds": seconds}, path)
            figures = evaluate() if step % 500 == 0 else {}
            print(f"{path.stem}: step {step}/{steps} {seconds:.0f} s loss {value.item():.4f} {figures}", flush=True)
    if step < steps:
        print(f"{path.stem}: out of time at step {step}; run the same command again to go on", flush=True)
        return None
    return {"steps": steps, "minutes": round(seconds / 60, 1)} | evaluate()


def windows(stream: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``count`` windows: int64 [count, WINDOW]."""
    starts = torch.randint(0, len(stream) - WINDOW, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(WINDOW)]


# ---------------------------------------------------------------------------------------------------------------- base


def held_out_windows(text: dict[str, Any]) -> torch.Tensor:
    """Thirty-two evenly spaced windows of the held-out text: int64 [32, WINDOW]."""
    held_out: torch.Tensor = text["held_out"]
    starts = torch.linspace(0, len(held_out) - WINDOW, 32).long()
    return held_out[starts[:, None] + torch.arange(WINDOW)]


def train_base(
    recipe: Recipe, model: Any, text: dict[str, Any], work: Path, *, steps: int, minutes: float, seed: int
) -> dict[str, Any] | None:
    """Stage 2: train the text model in place; state in ``base.pt``."""
    fixed = held_out_windows(text)

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        return {"held_out_nats_per_token": round(next_token_loss(model, fixed).item(), 4)}

    with recipe.training():
        return train(
            nn.ModuleList([model.model.language_model, model.lm_head]),
            lambda generator: recipe.loss(model, windows(text["train"], BATCH, generator)),
            work / "base.pt",
            steps=steps,
            minutes=minutes,
            weight_decay=0.1,
            seed=seed + 1,
            evaluate=evaluate,
        )


# ---------------------------------------------------------------------------------------------------------------- head


def prepare_hidden(model: Any, text: dict[str, Any], work: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write ``hidden.pt``: training windows and greedy continuations of the prompts with the trunk's hidden states."""
    product = work / "hidden.pt"
    if not product.exists():
        generator = torch.Generator().manual_seed(seed + 2)
        tokens = windows(text["train"], 2048, generator)
        starts = 500 + torch.arange(PROMPTS) * (len(text["held_out"]) // PROMPTS)
        prompts = text["held_out"][starts[:, None] + torch.arange(PROMPT_TOKENS)]
        with torch.no_grad():
            # A step past the last new token and its drafts are verified too.
            new = NEW_TOKENS + 4 * DRAFTS
            greedy = model.generate(prompts, max_new_tokens=new, do_sample=False, eos_token_id=None)
            hidden = torch.cat([hidden_states(model, part).half() for part in torch.split(tokens, 16)])
            save({"tokens": tokens, "hidden": hidden, "greedy": greedy}, product)
    data: dict[str, torch.Tensor] = torch.load(product, weights_only=True)
    return data


def acceptance(head: Any, model: Any, greedy: torch.Tensor, hidden: torch.Tensor) -> dict[str, Any]:
    """Simulate greedy speculative decoding of ``NEW_TOKENS`` tokens and count accepted drafts.

    LMDeploy runs one more verification after the last token is out; it is counted here. Loops are easy to draft, so
    the means of novel and of repeated contexts are given too.
    """
    accepted = accepted_drafts(model, head, greedy, hidden, DRAFTS).tolist()
    chains = [walk(row, PROMPT_TOKENS, NEW_TOKENS, 1) for row in accepted]
    figures = summarise(greedy.tolist(), chains, DRAFTS)
    return {
        "histogram": list(figures.histogram),
        "reach": [round(reach, 3) for reach in figures.reach],
        "mean": round(figures.mean, 3),
        "mean_by_context": {name: round(mean, 3) for name, mean in figures.mean_by_context.items()},
    }


def train_head(
    head: Any,
    model: Any,
    data: dict[str, torch.Tensor],
    work: Path,
    *,
    steps: int,
    minutes: float,
    seed: int,
) -> dict[str, Any] | None:
    """Stage 3: train the head in place against the trunk's full softmax at each position; state in ``head.pt``."""
    tokens, hidden, greedy = data["tokens"], data["hidden"], data["greedy"]
    greedy_hidden = hidden_states(model, greedy).detach()
    weights, bases = (1.0, 0.8, 0.6, 0.5), WINDOW - DRAFTS

    def loss(generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(0, len(tokens), (BATCH,), generator=generator)
        states = hidden[chosen].float()
        target = model.lm_head(states).softmax(-1)
        outputs = head.unroll(model, tokens[chosen], states, bases, DRAFTS)
        each = [
            F.cross_entropy(model.lm_head(output).flatten(0, 1), target[:, k : k + bases].flatten(0, 1))
            for k, output in enumerate(outputs, start=1)
        ]
        return torch.stack([w * one for w, one in zip(weights, each, strict=True)]).sum() / sum(weights)

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        return acceptance(head, model, greedy, greedy_hidden)

    return train(
        head,
        loss,
        work / "head.pt",
        steps=steps,
        minutes=minutes,
        weight_decay=0.05,
        seed=seed + 3,
        evaluate=evaluate,
    )


# ---------------------------------------------------------------------------------------------------------------- save


def save_checkpoint(recipe: Recipe, model: Any, head: Any, tokenizer: Any, out: Path) -> None:
    """Stage 4: write what ``from_pretrained`` and LMDeploy read."""
    model.save_pretrained(out)  # under the released names
    weights = load_file(out / "model.safetensors") | recipe.head_weights(model, head)
    save_file({k: v.contiguous() for k, v in weights.items()}, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    recipe.finish_config(config)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def save_prompts(model: Any, text: dict[str, Any], greedy: torch.Tensor, out: Path, path: Path) -> float:
    """Write the held-out prompts, their greedy continuations and an excerpt of four windows; return its loss."""
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    excerpt = held_out_windows(text)[::8]
    data = {
        "source": text["facts"]["source"],
        "licence": text["facts"]["licence"] + " beyond these excerpts",
        "prompts": greedy[:, :PROMPT_TOKENS].tolist(),
        "greedy": greedy[:, PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS].tolist(),
        "text": tokenizer.batch_decode(greedy[:, :PROMPT_TOKENS]),
        "excerpt": excerpt.tolist(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    with torch.no_grad():
        return round(next_token_loss(model, excerpt).item(), 4)


def run(recipe: Recipe, description: str | None) -> None:
    """Run all stages as the command line says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for what the stages keep")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file for the held-out prompts")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="base training steps")
    parser.add_argument("--head-steps", type=int, default=recipe.head_steps, help="head training steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="most time for the base in this invocation")
    parser.add_argument("--head-minutes", type=float, default=60.0, help="most time for the head in this invocation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    text = prepare_text(args.work, recipe.train_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(args.work / "tokenizer", trust_remote_code=False)
    model = recipe.build_model(tokenizer, args.seed)
    base = train_base(recipe, model, text, args.work, steps=args.steps, minutes=args.minutes, seed=args.seed)
    if base is None:
        return
    model.requires_grad_(False)
    data = prepare_hidden(model, text, args.work, args.seed)
    head = recipe.make_head(model)
    head_report = train_head(
        head, model, data, args.work, steps=args.head_steps, minutes=args.head_minutes, seed=args.seed
    )
    if head_report is None:
        return
    save_checkpoint(recipe, model, head, tokenizer, args.out)
    excerpt_loss = save_prompts(model, text, data["greedy"], args.out, args.prompts)
    report = {
        "command": command_line(),
        "seed": args.seed,
        "threads": args.threads,
        "parameters": {
            "text": sum(p.numel() for p in (*model.model.language_model.parameters(), *model.lm_head.parameters())),
            "head": sum(p.numel() for p in head.parameters()),
        },
        "text": text["facts"],
        "base": base | {"excerpt_nats_per_token": excerpt_loss},
        "head": {"drafts": DRAFTS, "prompts": PROMPTS, "new_tokens": NEW_TOKENS} | head_report,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (args.out / "TRAINING.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def command_line() -> str:
    """Return the command that runs this training again, from the root of the repository."""
    return " ".join(["python", "-m", f"examples.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
