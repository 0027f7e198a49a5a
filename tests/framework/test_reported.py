"""Problems reported of other implementations of GLM-5.3-Flash that are of the engine's side, each by its number.

The register of all of them, with links, is tests/reported.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from lmdeploy.serve.openai.protocol import ChatCompletionRequest
from torch import Tensor

from dlinfer_ext.e2e import compare
from dlinfer_ext.framework.lmdeploy import reasoning
from dlinfer_ext.framework.lmdeploy.models.glm5_next import METHOD
from dlinfer_ext.framework.lmdeploy.models.glm5_next.modeling import TextModel
from dlinfer_ext.framework.lmdeploy.models.glm5_next.mtp import Glm5NextMTPModel, MtpLayer, SharedChoice
from dlinfer_ext.framework.lmdeploy.models.glm5_next.rows import PagedRows
from tests.e2e.glm_chat import chat_tokenizer
from tests.framework.test_glm5_next_config import build, outer
from tests.framework.test_reasoning import NOW, PARIS_3, Said, by_token, parser, streamed

CASES: Final[dict[str, Callable[[], None]]] = {}


def reported(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(case: Callable[[], None]) -> Callable[[], None]:
        assert name not in CASES
        CASES[name] = case
        return case

    return register


@reported("14-vllm-55605")
def _() -> None:
    """The draft layer projects the embedding of the next token, then the hidden state, each by its own norm."""
    seen: list[Tensor] = []

    def project(x: Tensor) -> Tensor:
        seen.append(x)
        return x[..., :2] * 0

    def same(x: Tensor, *_: Any) -> Tensor:
        return x

    layer = SimpleNamespace(
        enorm=lambda x: 2 * x, hnorm=lambda x: 3 * x, eh_proj=project, self_attn=same, input_layernorm=same,
        post_attention_layernorm=same, mlp=same,
    )  # fmt: skip
    embedded, hidden = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[5.0, 7.0]]])
    MtpLayer.forward(layer, embedded, hidden, None, None, None)  # type: ignore[arg-type]
    assert seen[0].tolist() == [[[2.0, 4.0, 15.0, 21.0]]]


@reported("15-vllm-47448")
def _() -> None:
    """What the LM head and the next draft take is the hidden state after `shared_head.norm`, normed once."""
    calls: list[Tensor] = []

    def norm(x: Tensor) -> Tensor:
        calls.append(x)
        return x + 1

    model = SimpleNamespace(layer=SimpleNamespace(shared_head=SimpleNamespace(norm=norm)))
    before = torch.zeros(1, 2, 3)
    after = Glm5NextMTPModel.prepare_hidden_states_for_logits(model, before)  # type: ignore[arg-type]
    assert bool((after == 1).all())
    assert len(calls) == 1
    # The layer itself ends before that norm.
    layer: Any = SimpleNamespace(
        enorm=lambda x: x, hnorm=lambda x: x, eh_proj=lambda x: x[..., :3], input_layernorm=lambda x: x,
        self_attn=lambda x, *_: x, post_attention_layernorm=lambda x: x, mlp=lambda x: x, shared_head=None,
    )  # fmt: skip
    assert MtpLayer.forward(layer, before, before, None, None, None).shape == before.shape  # type: ignore[arg-type]


def paged(lengths: list[int], history: list[int]) -> PagedRows:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return PagedRows(cu, torch.tensor(history), torch.zeros(len(lengths), 4, dtype=torch.int32), 64, tuple(lengths))


@reported("16-vllm-ascend-15864")
def _() -> None:
    """The first draft of a round chooses; the later ones have one row each of its choice, that of their own request."""
    assert SharedChoice(4, 3).of(paged([1], [9])) is None, "nothing was chosen before the first draft"
    prepare: Any = Glm5NextMTPModel.prepare_inputs_for_generation
    for metas, skips in ((None, False), ([None], False), ([{}], False), ([{"skip_topk": True}], True)):
        context = SimpleNamespace(
            model_metas=metas, input_ids=None, position_ids=None, attn_metadata=None, target_hidden_states=None
        )
        assert prepare(None, [], context=context)["skip_topk"] == skips

    shared = SharedChoice(4, 3)
    first = paged([3, 2], [10, 20])
    indices = torch.arange(5)[:, None] * 100 + torch.arange(6)
    shared.keep(indices.int(), first)
    # What each request goes on from is not its last token if drafts were rejected.
    shared.compact(torch.tensor([1, 4]))
    later = shared.of(paged([1, 1], [12, 22]))
    assert later is not None
    assert later.tolist() == [[*range(100, 106), -1, -1, -1], [*range(400, 406), -1, -1, -1]]
    # A row that took all its tokens goes on to take all, the drafts before this one among them.
    shared.keep(indices.int(), paged([3, 2], [0, 20]))
    shared.compact(torch.tensor([2, 4]))
    later = shared.of(paged([1, 1], [3, 22]))
    assert later is not None
    assert later[:, :6].tolist() == [[0, 1, 2, 3, -1, -1], [*range(400, 406)]]


@reported("17-sglang-36829")
def _() -> None:
    """The streams are made one, their mean, before the last norm: what the draft layer is given has one's width."""
    seen: list[Tensor] = []

    def norm(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def layer(streams: Tensor, attend: Any) -> Tensor:
        return streams + torch.arange(4.0)[:, None]

    layer.is_linear, layer.self_attn = True, None  # type: ignore[attr-defined]
    model: Any = SimpleNamespace(streams=4, layers=[layer], norm=norm)
    x = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    out = TextModel.forward(model, x, [], None, None, None)  # type: ignore[arg-type]
    assert out.shape == x.shape
    assert torch.equal(out, x + 1.5)
    assert len(seen) == 1


@reported("19-sglang-38297")
def _() -> None:
    """The pair glm45 and glm47 is named, never guessed; without it a call stays text."""
    assert (reasoning.NAME, reasoning.TOOLS) == ("glm45", "glm47")
    text = f"why</think>so{PARIS_3}"
    said = Said(text, "why", "so", (("weather", '{"city": "Paris", "days": 3}'),))
    assert streamed(parser(), by_token(text)) == said
    own: Any = type("Own", (reasoning.ResponseParser,), {})
    own.set_parsers(None, None, chat_tokenizer())
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}])
    assert streamed(own(request), by_token(text)) == Said(text, None, text)


@reported("20-vllm-45915")
def _() -> None:
    """A call ends the reasoning; one without arguments has a whole name; one that is cut off has no name yet."""
    whole = Said(f"why{NOW}", "why", None, (("weather_now", "{}"),))
    cut = Said("why<tool_call>weather", "why")
    for said in (whole, cut):
        for pieces in ([said.text], by_token(said.text), list(said.text)):
            assert streamed(parser(), pieces) == said


@reported("22-nvfp4-6")
def _() -> None:
    """NVFP4 is refused by name, inside text_config and outside, and so is MTP where the checkpoint has no layer."""
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    for inside in (True, False):
        hf_config = outer()
        (hf_config.text_config if inside else hf_config).quantization_config = dict(quantization)
        with pytest.raises(ValueError, match=r"'quantization_config' is .*modelopt.*; wanted none, or"):
            build(hf_config)
    with pytest.raises(ValueError, match="'num_nextn_predict_layers' is 0; wanted 1"):
        build(outer({"num_nextn_predict_layers": 0}), spec_method=METHOD)


@reported("24-vllm-backport-96")
def _() -> None:
    """A loop of one token is told by its tokens; nothing in the verdict asks how many drafts were accepted."""
    want, loop = [[5, 6, 7, 8, 9, 10, 11, 12]], [[5, 6, 6, 6, 6, 6, 6, 6]]
    assert compare.identity(want, want, ["r"]).failures == ()
    assert compare.identity(loop, want, ["r"]).failures == ("r: token 2 is 6; wanted 7",)


@reported("30-lmdeploy-4958")
def _() -> None:
    """W4A16 is refused by name, with MTP and without."""
    for options in ({}, {"spec_method": METHOD, "num_spec_tokens": 3}):
        for method in ("awq", "gptq", "compressed-tensors"):
            hf_config = outer()
            hf_config.quantization_config = {"quant_method": method, "bits": 4}
            with pytest.raises(ValueError, match=rf"'quantization_config' is .*{method}.*; wanted none, or"):
                build(hf_config, **options)


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param("missing", id="32-llama.cpp-27752-missing"),
        pytest.param("kpool_block_size", id="32-llama.cpp-27752-renamed"),
    ],
)
def test_the_size_of_a_pool(spelling: str, tmp_path: Path) -> None:
    """A converter that writes the size of a pool under another key, or not at all, is told so."""
    hf_config = outer()
    text = hf_config.text_config.to_dict()
    size = text.pop("index_kpool")
    if spelling != "missing":
        text[spelling] = size
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}), encoding="utf-8")
    with pytest.raises(ValueError, match="'index_kpool' is missing; wanted the checkpoint's own value"):
        build(hf_config, model_path=str(tmp_path))


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in CASES])
def test_reported_fault(name: str) -> None:
    CASES[name]()
