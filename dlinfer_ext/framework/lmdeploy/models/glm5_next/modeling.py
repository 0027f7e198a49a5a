"""The model: embedding, layers of two hyper-connected blocks, mean of the streams, norm, LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lmdeploy.pytorch.distributed import get_dist_manager, get_tp_world_rank
from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMixin
from lmdeploy.pytorch.models.utils.model import DeployModelMixin
from lmdeploy.pytorch.nn import ParallelEmbedding, ParallelLMHead, RMSNorm
from torch import Tensor, nn

from ...gated_delta import GatedDeltaMetadata
from .config import LINEAR, ConfigError
from .kda import KimiDeltaAttention
from .mhc import HyperConnection
from .mla import LatentAttention
from .moe import ClampedMLP, MixtureOfExperts
from .rows import PagedRows
from .weights import WeightLoader, text_tensors


def ranks_of_this_model() -> int:
    """Return over how many ranks the weights are split.

    Raises:
        ConfigError: data or expert parallelism, which these blocks do not have.
    """
    dist_config = get_dist_manager().current_config()
    if dist_config.dp > 1 or dist_config.ep > 1:
        raise ConfigError("parallelism", f"dp {dist_config.dp}, ep {dist_config.ep}", "tensor parallelism only (tp)")
    ranks: int = get_tp_world_rank("attn")[0]
    return ranks


def feed_forward(config: Any, sparse: bool, ranks: int, dtype: torch.dtype | None, device: Any) -> nn.Module:
    """Return a layer's second block."""
    if sparse:
        return MixtureOfExperts(config, ranks, dtype, device)
    return ClampedMLP(config, config.intermediate_size, dtype, device)


class DecoderLayer(nn.Module):
    """Streams [T, n, hidden] to streams: attention, then feed-forward."""

    def __init__(self, config: Any, layer: int, ranks: int, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        self.is_linear = config.layer_types[layer] == LINEAR
        self.shares_choice = not self.is_linear and config.indexer_types[layer] == "shared"
        self.self_attn: nn.Module = (
            KimiDeltaAttention(config, layer, ranks, dtype, device)
            if self.is_linear
            else LatentAttention(config, ranks, dtype, device, own_indexer=not self.shares_choice)
        )
        self.mlp = feed_forward(config, config.mlp_layer_types[layer] == "sparse", ranks, dtype, device)
        norm: dict[str, Any] = {"dtype": dtype, "device": device}
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm)
        self.attn_hc = HyperConnection(config, device)
        self.ffn_hc = HyperConnection(config, device)

    def forward(self, streams: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x, post, comb = self.attn_hc(streams)
        streams = self.attn_hc.expand(attend(self.input_layernorm(x)), streams, post, comb)
        x, post, comb = self.ffn_hc(streams)
        return self.ffn_hc.expand(self.mlp(self.post_attention_layernorm(x)), streams, post, comb)


class TextModel(nn.Module):
    """Token ids to hidden states after the final norm."""

    def __init__(self, config: Any, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        ranks = ranks_of_this_model()
        self.streams: int = config.hc_mult
        self.width: int = config.linear_conv_kernel_dim
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, dtype=dtype, device=device, is_tp=True
        )
        self.layers = nn.ModuleList(
            [DecoderLayer(config, layer, ranks, dtype, device) for layer in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, kv_caches: list[Any], state_caches: Any, meta: GatedDeltaMetadata, rows: PagedRows
    ) -> Tensor:
        """Return [1, T, hidden] for embeddings x of that shape; all caches are mutated."""
        streams = x[0][:, None].expand(-1, self.streams, -1)
        latents = iter(kv_caches)
        choice: Tensor | None = None

        def choose(attention: LatentAttention, x: Tensor, q_resid: Tensor) -> Tensor | None:
            nonlocal choice
            if attention.indexer is not None:  # else that of the sparse layer before
                choice = attention.select(x, q_resid, rows)
            return choice

        for layer in self.layers:
            if layer.is_linear:
                streams = layer(streams, lambda y, block=layer.self_attn: block(y, state_caches, meta))
            else:
                cache = next(latents)[0]
                streams = layer(streams, lambda y, block=layer.self_attn, cache=cache: block(y, cache, rows, choose))
        # Contracted before the norm: it is also what the MTP layer takes.
        return self.norm(streams.mean(1)[None])  # type: ignore[no-any-return]


class TextOnly(nn.Module, DeployModelMixin, CudaGraphMixin):  # type: ignore[misc]
    """What the model and its MTP layer share towards LMDeploy."""

    def __init__(self, config: Any, ctx_mgr: Any) -> None:
        super().__init__()
        self.config, self.ctx_mgr = config, ctx_mgr
        self.loader: WeightLoader | None = None

    def support_cuda_graph(self, *args: Any, **kwargs: Any) -> bool:
        """Say that no step is captured: the bound of the context length changes from step to step."""
        return False

    def tensors_of_this_model(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Give the tensors that belong to this model, by the names of its parameters before merging."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load one file's tensors; LMDeploy calls this once for each file.

        Raises:
            CheckpointError: a tensor that does not belong here, or does not fit.
        """
        if self.loader is None:
            self.loader = WeightLoader(self, self.config.fp8_block)
        for name, tensor in self.tensors_of_this_model(text_tensors(weights)):
            self.loader.load(name, tensor)

    def process_weights_after_loading(self) -> None:
        """Check that all came; LMDeploy calls this when the last file has been read.

        Raises:
            CheckpointError: it names what is missing.
        """
        if self.loader is not None:
            self.loader.finish()
            self.loader = None


class Glm5NextForConditionalGeneration(TextOnly):
    """GLM-5.3-Flash, text only, by the name that its config.json gives."""

    def __init__(self, config: Any, ctx_mgr: Any, dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__(config, ctx_mgr)
        text = config.text_config
        self.model = TextModel(text, dtype, device)
        self.lm_head = ParallelLMHead(text.vocab_size, text.hidden_size, bias=False, dtype=dtype, device=device)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[Any],
        attn_metadata: Any = None,
        inputs_embeds: Tensor | None = None,
        state_caches: Any = None,
        state_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return hidden states [1, T, hidden] after the final norm."""
        assert state_ids is not None
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        meta = GatedDeltaMetadata(x.size(1), self.model.width, state_ids, attn_metadata)
        return self.model(  # type: ignore[no-any-return]
            x, past_key_values, state_caches, meta, PagedRows.of(attn_metadata, x.size(1))
        )

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)  # type: ignore[no-any-return]

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens  # type: ignore[no-any-return]

    def prepare_inputs_for_generation(
        self, past_key_values: list[Any], inputs_embeds: Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        return {
            "input_ids": context.input_ids,
            "position_ids": context.position_ids,
            "past_key_values": past_key_values,
            "attn_metadata": context.attn_metadata,
            "inputs_embeds": inputs_embeds,
            "state_caches": context.named_state_caches,
            "state_ids": context.state_offsets,
        }

    def tensors_of_this_model(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        draft = f"model.layers.{self.config.text_config.num_hidden_layers}."
        return ((name, tensor) for name, tensor in weights if not name.startswith(draft))
