"""GLM-5.3-Flash's draft layer in transformers' modules, which itself leaves the layer out; see simulation.py."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class GlmMtpHead(nn.Module):
    """GLM-5.3-Flash's MTP layer, one past the last layer of the text model.

    A plain residual layer, without hyper-connections, over ``eh_proj([enorm(embedding of the next token),
    hnorm(hidden state)])``: sparse latent attention, then a mixture of experts. The hidden state is the trunk's after
    its final norm, or this layer's own after ``shared_head.norm``; embedding and output projection are the trunk's.
    A new head starts as the trunk's last attention that chooses for itself and its last mixture of experts, between an
    even mix of both inputs and the trunk's norm.

    The first step of a draft chooses the tokens to attend to and the later ones go on with its choice
    (``index_share_for_mtp_iteration``): they see neither themselves nor the steps between. A base that has no more
    than ``index_topk`` tokens had nothing to choose, and its chain sees all.

    Args:
        model: transformers' Glm5NextForConditionalGeneration; only read.

    Raises:
        ValueError: the config has every step choose anew, which is not simulated.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        trunk, config = model.model.language_model, copy.deepcopy(model.config.text_config)
        if not getattr(config, "index_share_for_mtp_iteration", False):
            raise ValueError("index_share_for_mtp_iteration is not set; only drafts that share a choice are simulated")
        kinds = zip(config.layer_types, config.indexer_types, strict=True)
        attention = [i for i, kind in enumerate(kinds) if kind == ("indexed_attention", "full")][-1]
        sparse = [i for i, kind in enumerate(config.mlp_layer_types) if kind == "sparse"][-1]
        # Two layers' worth of config: the first chooses and hands its choice on, as to a second that shares it.
        config.num_hidden_layers, config.indexer_types = 2, ["full", "shared"]
        config.layer_types, config.mlp_layer_types = ["indexed_attention"] * 2, ["sparse"] * 2
        self.config = config

        layer, hidden, norm = trunk.layers[attention], config.hidden_size, type(trunk.norm)
        self.enorm = norm(hidden, config.rms_norm_eps)
        self.hnorm = norm(hidden, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = copy.deepcopy(layer.input_layernorm)
        self.self_attn = type(layer.self_attn)(config, 0)
        self.self_attn.load_state_dict(layer.self_attn.state_dict())
        self.post_attention_layernorm = copy.deepcopy(trunk.layers[sparse].post_attention_layernorm)
        self.mlp = copy.deepcopy(trunk.layers[sparse].mlp)
        self.shared_head = nn.ModuleDict({"norm": copy.deepcopy(trunk.norm)})
        with torch.no_grad():
            self.eh_proj.weight.copy_(torch.eye(hidden).repeat(1, 2) / 2 + torch.randn(hidden, 2 * hidden) / 100)
        self.requires_grad_(True)

    @staticmethod
    def prefix(model: Any) -> str:
        """Return what a checkpoint's names of the layer begin with."""
        return f"model.language_model.layers.{model.config.text_config.num_hidden_layers}."

    def forward(
        self, model: Any, tokens: Tensor, state: Tensor, chosen: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on T positions of every sequence.

        Args:
            model: the trunk, for the embedding.
            tokens: int64 [B, T], each the one after its position.
            state: [B, T, hidden]: the hidden states of the positions, the trunk's or this layer's own.
            chosen: integers [B, T, n], the keys of `cache` and of this call that each position sees, -1 for none;
                None to choose.
            cache: transformers' cache of this layer, to which T latent keys are added.

        Returns:
            [B, T, hidden], normalised: the output projection makes drafts of it, and it is the next step's `state`;
            and the choice.
        """
        embedding = self.enorm(model.model.language_model.embed_tokens(tokens))
        x = self.eh_proj(torch.cat([embedding, self.hnorm(state)], -1))
        attend = self.self_attn
        if chosen is not None:
            attend = copy.copy(attend)  # the same weights, but it goes by the choice it is given
            attend._modules = attend._modules | {"indexer": None}
        everything = torch.ones(tokens.shape, dtype=torch.bool)
        out, _, choice = attend(
            self.input_layernorm(x), attention_mask=everything, cache=cache, prev_topk_indices=chosen
        )
        x = x + out
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.shared_head["norm"](x), choice if chosen is None else chosen

    def unroll(self, model: Any, tokens: Tensor, hidden: Tensor, bases: int, drafts: int) -> list[Tensor]:
        """Draft from every base position at once; arguments and result as of `MtpHead.unroll`."""
        from transformers import DynamicCache  # here, so that the figures can be had without a second's import

        cache = DynamicCache(config=self.config)
        base = torch.arange(bases)
        state, chosen, outputs = hidden[:, :bases], None, list[Tensor]()
        for k in range(1, drafts + 1):
            state, chosen = self(model, tokens[:, k : k + bases], state, chosen, cache)
            outputs.append(state)
            # The key that the next step adds for its own base is the k-th beyond the bases' own.
            own = torch.where(base < self.config.index_topk, k * bases + base, -1).to(chosen.dtype)
            chosen = torch.cat([chosen, own.expand(len(tokens), -1)[..., None]], -1)
        return outputs

    def released(self) -> dict[str, Tensor]:
        """Return the weights under the names of a checkpoint, below `prefix`: the experts one by one."""
        weights = dict(self.state_dict())
        gate_up, down = weights.pop("mlp.experts.gate_up_proj"), weights.pop("mlp.experts.down_proj")
        for expert, (both, out) in enumerate(zip(gate_up, down, strict=True)):
            gate, up = both.chunk(2)
            names = f"mlp.experts.{expert}.{{}}_proj.weight"
            weights |= {names.format("gate"): gate, names.format("up"): up, names.format("down"): out}
        return weights

    def load_released(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint, named as `released` does.

        Raises:
            RuntimeError: they are not the layer's; the ones that are missing or too many are named.
        """
        mine, parts = dict(weights), {kind: list[Tensor]() for kind in ("gate", "up", "down")}
        for expert in range(self.config.n_routed_experts):
            for kind, found in parts.items():
                name = f"mlp.experts.{expert}.{kind}_proj.weight"
                if name not in mine:
                    raise RuntimeError(f"the draft layer has no weight {name}")
                found.append(mine.pop(name))
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        mine |= {"mlp.experts.gate_up_proj": torch.stack(both), "mlp.experts.down_proj": torch.stack(parts["down"])}
        self.load_state_dict(mine)
