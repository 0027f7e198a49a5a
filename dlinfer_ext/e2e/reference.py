"""Hugging Face transformers as the judge: greedy tokens, teacher-forced logits, and the law of sampled tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The order of sums, and so the last digits, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=2)
def load(path: Path, dtype: str = "float32") -> Any:
    """Load the model class that the checkpoint's config names; shared, so leave it as it is."""
    transformers.logging.set_verbosity_error()  # it advises CUDA packages
    transformers.utils.logging.disable_progress_bar()
    # False, not the default: that one asks at the terminal whether code of the folder may run.
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    name = (config.architectures or ["none"])[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"{path}: architectures names {name!r}, which is no model of transformers")
    cls: Any = found  # transformers' classes are not typed
    return cls.from_pretrained(path, dtype=getattr(torch, dtype)).eval().requires_grad_(False)


def end_tokens(model: Any) -> list[int]:
    """Return the ids that end a text."""
    end = model.generation_config.eos_token_id
    return list(end) if isinstance(end, list) else [] if end is None else [end]


def greedy(path: Path, prompts: Sequence[Sequence[int]], new: int, dtype: str = "float32") -> list[list[int]]:
    """Return greedy continuations on one thread, each exactly `new` tokens.

    The end token is never chosen, which is what LMDeploy's `ignore_eos` does (it masks the end token's logit).
    Prompts of one length go as one batch; none is padded.
    """
    model = load(path, dtype)
    ends = end_tokens(model)
    rows: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        rows.setdefault(len(prompt), []).append(i)
    out: dict[int, list[int]] = {}
    with one_thread(), torch.no_grad():
        for length, numbers in rows.items():
            ids = torch.tensor([list(prompts[i]) for i in numbers])
            config = transformers.GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=None, suppress_tokens=ends or None,
                pad_token_id=model.generation_config.pad_token_id,
            )  # fmt: skip
            got = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            out |= dict(zip(numbers, got[:, length:].tolist(), strict=True))
    return [out[i] for i in range(len(prompts))]


def logits(path: Path, ids: Sequence[int], dtype: str = "float32") -> Tensor:
    """Return teacher-forced logits, fp32 [len(ids), vocabulary]; `dtype` is that of the weights."""
    model = load(path, dtype)
    with one_thread(), torch.no_grad():
        out: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out.float()


def law(path: Path, prompt: Sequence[int], new: int, top_k: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every continuation of `new` tokens under top-k sampling.

    At each place the `top_k` largest logits remain (the end tokens masked), divided by the temperature, and softmax
    gives their law: top_k ** new continuations.
    """
    model = load(path)
    table: dict[tuple[int, ...], float] = {(): 1.0}
    with one_thread(), torch.no_grad():
        for _ in range(new):
            heads = list(table)
            ids = torch.tensor([[*prompt, *head] for head in heads])
            last = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].double()
            last[:, end_tokens(model)] = -torch.inf
            values, tokens = last.topk(top_k)
            chances = (values / temperature).softmax(-1).tolist()
            table = {
                (*head, token): table[head] * chance
                for head, row, chance_row in zip(heads, tokens.tolist(), chances, strict=True)
                for token, chance in zip(row, chance_row, strict=True)
            }
    return table
