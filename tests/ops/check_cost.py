"""What DLINFER_EXT_CHECK=1 and DLINFER_EXT_DUMP cost, as ratios to the same calls without them.

    python -m tests.ops.check_cost [--model qwen3_5-9b] [--rows 4] [--rounds 9]

One linear-attention layer of a model: a prompt of 128 tokens, and a verify step, each the convolution and the rule on
ring states. The settings are timed in turn in the same run, so that only their ratio counts. CPU times say nothing
about a card, where a read of the device also waits for all work before it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dlinfer_ext import ops
from dlinfer_ext.ops import _watch, state_dump
from dlinfer_ext.targets import Model, load_model, model_names

PROMPT = 128


def layer(model: Model, rows: int) -> dict[str, Callable[[], object]]:
    """Return the calls that are timed, by name."""
    ring, heads, values = 1 + model.drafts, model.value_heads, model.value_dim
    channels = 2 * model.heads * model.key_dim + heads * values
    weight = torch.randn(model.conv_width, channels)
    columns = torch.zeros(rows + 1, model.conv_width + model.drafts - 1, channels)
    states = torch.zeros(rows + 1, ring, heads, values, model.key_dim)
    channel_gate = (model.key_dim,) if model.rule == "kda" else ()
    kda = model.rule == "kda"
    rule: Callable[..., object] = ops.kda if kda else ops.gated_delta_rule
    update: Callable[..., object] = ops.kda_update if kda else ops.gated_delta_rule_update

    def inputs(*lead: int) -> list[torch.Tensor]:
        q, k = (torch.randn(*lead, model.heads, model.key_dim) for _ in range(2))
        v, g = torch.randn(*lead, heads, values), -torch.rand(*lead, heads, *channel_gate)
        return [q, k, v, g, torch.rand(*lead, heads)]

    slots, prompt, step = torch.arange(rows), inputs(PROMPT), inputs(rows, ring)
    x, drafts = torch.randn(PROMPT, channels), torch.randn(rows, ring, channels)
    history = torch.full((rows,), PROMPT)
    first: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, PROMPT]),
        "state_indices": slots[:1],
        "history_lens": torch.tensor([0]),
    }

    def prefill() -> None:
        ops.causal_conv1d(x, weight, conv_state=columns, layout="ring", activation="silu", **first)
        rule(*prompt, states, **first, use_qk_l2norm=True, host_lengths=[PROMPT])

    def verify() -> None:
        ops.causal_conv1d_update(drafts, columns, weight, conv_state_indices=slots, cache_seqlens=history)
        update(*step, states, state_indices=slots, history_lens=history, use_qk_l2norm=True)

    return {f"prompt of {PROMPT}": prefill, f"verify step of {rows} × {ring}": verify}


def seconds(
    call: Callable[[], object], settings: dict[str, dict[str, str]], rounds: int, folder: str
) -> dict[str, float]:
    """Return the least CPU seconds of a call by setting, each timed once a round: others on the machine only add."""
    taken: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(rounds + 1):
        for name, variables in settings.items():
            with mock.patch.dict(os.environ, variables):
                begun = time.process_time()
                call()
                taken[name].append(time.process_time() - begun)
                for dump in Path(folder).glob("*.safetensors"):
                    dump.unlink()  # a full folder takes no more, and costs nothing
    return {name: min(times[1:]) for name, times in taken.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ops.check_cost", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default="qwen3_5-9b", choices=model_names())
    parser.add_argument("--rows", type=int, default=4, help="of the verify step (default 4)")
    parser.add_argument("--rounds", type=int, default=9, help="the least of so many (default 9)")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        off = {"DLINFER_EXT_CHECK": "0", "DLINFER_EXT_DUMP": ""}
        settings = {
            "off": off,
            "check": off | {"DLINFER_EXT_CHECK": "1"},
            "dump": off | {"DLINFER_EXT_DUMP": folder, "DLINFER_EXT_DUMP_STEPS": "0-100000"},
            "dump, another step": off | {"DLINFER_EXT_DUMP": folder, "DLINFER_EXT_DUMP_STEPS": "none"},
        }
        calls = layer(load_model(args.model), args.rows)
        for name, call in calls.items():
            state_dump.reset()
            taken = seconds(call, settings, args.rounds, folder)
            said = ", ".join(f"{key} × {value / taken['off']:.2f}" for key, value in taken.items() if key != "off")
            sys.stdout.write(f"{args.model}, {name}: {said} (off: 1, {1000 * taken['off']:.1f} ms here)\n")
        with mock.patch.dict(os.environ, off):
            begun = time.perf_counter()
            for _ in range(10_000):
                _watch.wanted("kda_update")
            each = (time.perf_counter() - begun) / 10_000
        sys.stdout.write(f"off, to look at both variables: {1e6 * each:.1f} µs a call, nothing read from the device\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
