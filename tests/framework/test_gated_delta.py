"""What stands between LMDeploy's metadata and the operators: index maths, phase by phase.

R-numbers are findings in LMDeploy 0.18's own metadata and its users, and in dlinfer's adapter; each is the smallest
input that shows it, with the right result written out or taken from the definition.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta
from torch import Tensor

from dlinfer_ext.framework.lmdeploy import gated_delta, pools
from dlinfer_ext.kernels.causal_conv1d import reference as conv_reference
from dlinfer_ext.kernels.gated_delta_rule import reference as rule_reference
from dlinfer_ext.testing import TOLERANCE, assert_close, no_host_reads

W, H, HV, K, V = 4, 2, 4, 16, 8
CHANNELS = 2 * H * K + HV * V
SLOTS, LAYERS = 6, 2


@dataclasses.dataclass
class AttentionMetadata:
    """The fields of LMDeploy's Ascend metadata that the adapter reads."""

    is_decoding: bool
    cu_seqlens_q: Tensor
    q_seqlens: Tensor
    kv_seqlens: Tensor
    cu_seqlens_q_cpu: Tensor | None
    kv_seqlens_cpu: Tensor | None
    is_multi_token_decoding: bool = False


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    n: int = getattr(request, "param", 0)
    build = SimpleNamespace(build_ctx=SimpleNamespace(num_spec_tokens=n))
    monkeypatch.setattr(gated_delta, "get_step_ctx_manager", lambda: build)
    return n


with_and_without_drafts = pytest.mark.parametrize("drafts", [0, 3], indirect=True, ids=["plain", "drafts3"])


def metadata(lengths: list[int], histories: list[int], slots: list[int], phase: str) -> gated_delta.GatedDeltaMetadata:
    q, cu = torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, *lengths]).cumsum(0).int()
    kv = q + torch.tensor(histories, dtype=torch.int32)
    attention = AttentionMetadata(
        phase == "decode", cu, q, kv, cu.clone(), kv.clone(), is_multi_token_decoding=phase == "verify"
    )
    return gated_delta.GatedDeltaMetadata(sum(lengths), W, torch.tensor(slots), attention)


def convolve(*args: Any) -> Tensor:
    return gated_delta.CausalConv1d().forward(*args)


def apply_rule(mixed: Tensor, *args: Any) -> Tensor:
    """Split the convolution's output as the model does, and run the rule on it."""
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    heads = (q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)))
    rest: tuple[Any, ...] = (*heads, *args, HV // H, True)
    return gated_delta.GatedDeltaRule().forward(*rest)


class Step:
    """Both operators on one step's random inputs, through the adapter and through the definitions."""

    def __init__(self, drafts: int, *, dirty: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.drafts = drafts
        ring = (1 + drafts,) if drafts else ()
        # As LMDeploy lays them out: one pool of all layers, of which a layer gets a strided slice.
        self.conv = torch.randn(SLOTS, LAYERS, W + drafts, CHANNELS, generator=generator) + dirty
        self.state = torch.randn(SLOTS, LAYERS, *ring, HV, V, K, generator=generator) + dirty
        self.weight = torch.randn(CHANNELS, 1, W, generator=generator)
        self.generator = generator

    def run(self, meta: gated_delta.GatedDeltaMetadata, lengths: list[int], histories: list[int]) -> None:
        """Fail unless outputs and both pools, all layers, are what the definitions give."""
        tokens = sum(lengths)
        x = torch.randn(1, tokens, CHANNELS, generator=self.generator)
        a, b = torch.randn(1, tokens, 2 * HV, generator=self.generator).split(HV, -1)  # views of one projection
        a_log_exp, dt_bias = -torch.rand(HV, generator=self.generator), torch.randn(HV, generator=self.generator)
        want_conv, want_state = self.conv.clone(), self.state.clone()
        out = convolve(x, self.weight, None, self.conv[:, 1], meta, "silu")
        q, k, v = out.split([H * K, H * K, HV * V], -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        got = apply_rule(out, b, a, dt_bias, a_log_exp, self.state[:, 1], meta)
        cu, history = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(histories)
        want = conv_reference.causal_conv1d(
            *(x[0], self.weight[:, 0].t(), None, want_conv[:, 1], cu, meta.state_indices, history),
            layout="ring" if self.drafts else "linear",
            activation="silu",
        )
        assert_close("convolution", out[0], want, TOLERANCE["conv", torch.float32])
        assert torch.equal(self.conv, want_conv)
        g, beta = a_log_exp * torch.nn.functional.softplus(a[0].double() + dt_bias), b[0].double().sigmoid()
        rows: dict[str, Any] = {"state_indices": meta.state_indices, "history_lens": history, "use_qk_l2norm": True}
        definition: Any = rule_reference
        if meta.is_decoding:
            n = len(lengths)
            parts = [t.unflatten(0, (n, -1)) for t in (q[0], k[0], v[0], g, beta)]
            reference = definition.gated_delta_rule_update(*parts, want_state[:, 1], **rows).flatten(0, 1)
        else:
            parts = [q[0], k[0], v[0], g, beta]
            reference = definition.gated_delta_rule(*parts, want_state[:, 1], cu_seqlens=cu, **rows)
        assert_close("rule", got[0], reference, TOLERANCE["delta_rule", torch.float32])
        assert_close("state", self.state, want_state, TOLERANCE["delta_rule", torch.float32])


PREFILL: dict[str, tuple[list[int], list[int], list[int]]] = {
    "R93-short-chunk-behind-another-request": ([5, 2], [0, 10], [1, 2]),
    "R94-first-prompt-shorter-than-the-window": ([2], [0], [3]),
    "R95-empty-last-row": ([3, 0], [0, 4], [1, 2]),
    "R96-empty-row-shares-its-start": ([0, 3], [0, 5], [2, 1]),
    "R98-second-chunk-keeps-the-first": ([3, 3], [3, 0], [1, 5]),
    "R99-two-padded-rows": ([4, 2, 3], [0, 0, 6], [-1, -1, 4]),
    "R47-padded-row-does-not-become-slot-0": ([2, 3], [7, 0], [-1, 0]),
    "one-token-tail": ([1, 70], [349, 0], [2, 3]),
}


@with_and_without_drafts
@pytest.mark.parametrize("case", PREFILL.values(), ids=PREFILL)
def test_prefill(case: tuple[list[int], list[int], list[int]], drafts: int) -> None:
    lengths, histories, slots = case
    Step(drafts).run(metadata(lengths, histories, slots, "prefill"), lengths, histories)


@with_and_without_drafts
def test_r97_new_prompt_in_a_slot_that_holds_nan(drafts: int) -> None:
    """A gate of -1e6 in place of a zero state leaves 0 · NaN."""
    step = Step(drafts)
    step.conv[2], step.state[2] = float("nan"), float("inf")
    meta = metadata([6, 1], [0, 0], [2, 1], "prefill")
    x = torch.randn(1, 7, CHANNELS)
    out = convolve(x, step.weight, None, step.conv[:, 0], meta, "silu")
    gates = torch.randn(1, 7, HV)
    state = step.state[:, 0]
    got = apply_rule(out, gates, gates, gates[0, 0], -gates[0, 1].abs(), state, meta)
    assert torch.isfinite(out).all()
    assert torch.isfinite(got).all()
    stored = state[2, 6 % (1 + drafts)] if drafts else state[2]
    assert torch.isfinite(stored).all()


@pytest.mark.parametrize("drafts", [3], indirect=True)
@pytest.mark.parametrize("rows", [1, 4], ids=["R52-one-token", "verify"])
def test_step_on_a_pool_with_drafts_is_a_ring_step_whatever_its_length(rows: int, drafts: int) -> None:
    phase = "decode" if rows == 1 else "verify"
    lengths, histories, slots = [rows] * 3, [9, 2, 30], [4, -1, 1]
    meta = metadata(lengths, histories, slots, phase)
    assert meta.is_decoding
    Step(drafts).run(meta, lengths, histories)


@pytest.mark.parametrize("drafts", [0], indirect=True)
def test_plain_decode(drafts: int) -> None:
    Step(drafts).run(metadata([1, 1], [9, 2], [4, 1], "decode"), [1, 1], [9, 2])


@with_and_without_drafts
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_r49_no_layer_reads_the_device(phase: str, drafts: int) -> None:
    """Prefill takes its lengths from the CPU tensor that the backend made for its attention."""
    lengths = [1, 1] if phase == "decode" else [5, 2]
    step, meta = Step(drafts), metadata(lengths, [3, 7], [1, 2], phase)
    assert (meta.host_lengths is None) == (phase == "decode")
    x, gates = torch.randn(1, sum(lengths), CHANNELS), torch.randn(1, sum(lengths), HV)
    with no_host_reads():
        out = convolve(x, step.weight, None, step.conv[:, 0], meta, "silu")
        apply_rule(out, gates, gates, gates[0, 0], gates[0, 1], step.state[:, 0], meta)


@pytest.mark.parametrize("drafts", [3], indirect=True)
def test_metadata_names_are_the_hosts(drafts: int) -> None:
    meta = metadata([2, 5], [4, 0], [1, -1], "prefill")
    assert meta.cache_seqlens.tolist() == [4, 0]
    assert meta.state_indices.tolist() == [1, -1]
    assert meta.num_spec_tokens == 3
    assert meta.host_lengths == (2, 5)
    assert isinstance(meta, GatedDeltaMeta)


def test_pool_that_is_not_position_major_is_refused(drafts: int) -> None:
    x, meta = torch.randn(1, 2, 6), metadata([2], [0], [1], "prefill")
    with pytest.raises(ValueError, match=r"'conv_state' is of shape \[3, 6, 4\]; wanted \[slots, columns, 6\]"):
        convolve(x, torch.randn(6, 1, 4), None, torch.zeros(3, 6, 4), meta, None)


def test_pool_shape_is_changed_in_one_place() -> None:
    def config(**fields: Any) -> Any:
        return SimpleNamespace(**fields)

    gated = config(is_gated_delta=True, states_shapes=[((3, 64, 7), torch.bfloat16), ((3, 4, 2, 8, 16), torch.float32)])
    pools.position_major(gated)
    assert gated.states_shapes == [((3, 7, 64), torch.bfloat16), ((3, 4, 2, 8, 16), torch.float32)]
    draft_model = config(is_gated_delta=True, states_shapes=[])
    other = config(is_gated_delta=False, states_shapes=[((1, 2, 3), torch.float32)])
    assert pools.position_major(draft_model).states_shapes == []
    assert pools.position_major(other).states_shapes == [((1, 2, 3), torch.float32)]
