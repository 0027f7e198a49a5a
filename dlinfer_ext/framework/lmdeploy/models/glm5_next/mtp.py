"""The MTP layer, at the number after the last layer's, behind LMDeploy's proposer "deepseek_mtp".

A plain residual layer without hyper-connections: the embedding of the token that follows and the hidden state, both
normed and projected to one; sparse latent attention; a mixture of experts. Embedding and LM head are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lmdeploy.pytorch.nn import RMSNorm
from torch import Tensor, nn

from ... import counters
from .mla import LatentAttention
from .modeling import TextOnly, feed_forward, ranks_of_this_model
from .parameters import column_linear
from .rows import PagedRows


class SharedChoice:
    """The tokens that the first draft of a round chose, for the later ones (`index_share_for_mtp_iteration`).

    A row with no more than `topk` tokens chose all of them, and goes on to take all: a later draft then sees itself
    and the drafts before it, whether or not another row of the batch had to choose.
    """

    def __init__(self, topk: int, drafts: int) -> None:
        self.topk, self.drafts = topk, drafts
        self.indices: Tensor | None = None
        self.visible: Tensor | None = None

    def keep(self, indices: Tensor | None, rows: PagedRows) -> None:
        """Keep a choice int32 [T, n], and how many tokens each query could see."""
        self.indices = self.visible = None
        if indices is None:
            return
        tokens = torch.arange(indices.size(0), device=indices.device)
        row = torch.searchsorted(rows.cu_seqlens[1:].long(), tokens, right=True).clamp(
            max=rows.history_lens.size(0) - 1
        )
        self.indices = indices
        self.visible = rows.history_lens[row] + tokens - rows.cu_seqlens[row] + 1

    def compact(self, queries: Tensor) -> None:
        """Keep one query of each row, in the order of the rows."""
        if self.indices is not None and self.visible is not None:
            self.indices, self.visible = self.indices[queries], self.visible[queries]

    def of(self, rows: PagedRows) -> Tensor | None:
        """Return the choice for one token of each row."""
        if self.indices is None or self.visible is None:
            return None
        width = self.indices.size(1) + self.drafts
        positions = torch.arange(width, dtype=torch.int32, device=self.indices.device)
        everything = torch.where(positions <= rows.history_lens[:, None], positions, -1)
        chosen = nn.functional.pad(self.indices, (0, self.drafts), value=-1)
        return torch.where((self.visible <= self.topk)[:, None], everything, chosen).to(torch.int32)


class MtpLayer(nn.Module):
    """Embeddings and hidden states [1, T, hidden] to hidden states before `shared_head.norm`."""

    def __init__(self, config: Any, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        ranks, hidden = ranks_of_this_model(), config.hidden_size
        norm: dict[str, Any] = {"dtype": dtype, "device": device}
        self.enorm = RMSNorm(hidden, config.rms_norm_eps, **norm)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps, **norm)
        self.eh_proj = column_linear(2 * hidden, hidden, dtype, device, split=False)
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, **norm)
        self.self_attn = LatentAttention(config, ranks, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, **norm)
        self.mlp = feed_forward(config, True, ranks, dtype, device)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(hidden, config.rms_norm_eps, **norm)

    def forward(self, embedded: Tensor, hidden: Tensor, cache: Tensor, rows: PagedRows, choose: Any) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        x = x + self.self_attn(self.input_layernorm(x), cache, rows, choose)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Glm5NextMTPModel(TextOnly):
    """The draft model: takes the model's hidden states after the final norm, and its own after `shared_head.norm`."""

    uses_dsa_topk_buffer = (
        True  # LMDeploy's proposer then lends the embedding, compacts the choice and passes skip_topk
    )

    def __init__(self, config: Any, ctx_mgr: Any, dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__(config, ctx_mgr)
        text = config.text_config
        self.number = str(text.num_hidden_layers)
        self.layers = nn.ModuleDict({self.number: MtpLayer(text, dtype, device)})
        shares = getattr(text, "index_share_for_mtp_iteration", False)
        indexer = self.layer.self_attn.indexer
        self.shared = SharedChoice(text.index_topk, indexer.drafts) if shares else None
        self._embedding: list[Any] = []  # in a list: not a module of this one

    @property
    def layer(self) -> Any:
        return self.layers[self.number]

    def set_input_embeddings(self, embedding: Any) -> None:
        self._embedding = [embedding]

    def get_input_embeddings(self) -> Any:
        return self._embedding[0]

    def compact_topk_indices(self, queries: Tensor) -> None:
        """Keep the choice of the last query of each row; LMDeploy's proposer calls this after the first draft."""
        if self.shared is not None:
            self.shared.compact(queries)

    def prepare_hidden_states_for_logits(self, hidden_states: Tensor) -> Tensor:
        """Norm once: the LM head takes the result as it is, and so does the next draft."""
        return self.layer.shared_head.norm(hidden_states)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[Any],
        target_hidden_states: Tensor,
        attn_metadata: Any = None,
        inputs_embeds: Tensor | None = None,
        skip_topk: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return hidden states [1, T, hidden] before the last norm."""
        embedded = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        rows = PagedRows.of(attn_metadata, embedded.size(1))

        def choose(attention: LatentAttention, x: Tensor, q_resid: Tensor) -> Tensor | None:
            if self.shared is not None and skip_topk:
                counters.add("shared_choice")
                return self.shared.of(rows)
            choice = attention.select(x, q_resid, rows)
            if self.shared is not None:
                self.shared.keep(choice, rows)
            return choice

        return self.layer(embedded, target_hidden_states, past_key_values[0][0], rows, choose)  # type: ignore[no-any-return]

    def prepare_inputs_for_generation(
        self, past_key_values: list[Any], inputs_embeds: Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        metas = context.model_metas
        return {
            "input_ids": context.input_ids,
            "position_ids": context.position_ids,
            "past_key_values": past_key_values,
            "attn_metadata": context.attn_metadata,
            "inputs_embeds": inputs_embeds,
            "target_hidden_states": context.target_hidden_states,
            "skip_topk": bool(metas) and all(meta is not None and meta.get("skip_topk", False) for meta in metas),
        }

    def tensors_of_this_model(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        own = f"model.layers.{self.number}."
        # Some conversions repeat the embedding and the LM head here; they are the model's.
        shared = (f"{own}embed_tokens.", f"{own}shared_head.head.")
        for name, tensor in weights:
            if name.startswith(own) and not name.startswith(shared):
                yield name.removeprefix("model."), tensor
