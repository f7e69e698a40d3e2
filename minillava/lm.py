"""A Pre-Norm decoder language model in one file, shaped like Llama.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional tied embeddings, a key-value cache. Parameter
names are those of Llama checkpoints, so their weights load without renaming. The Post-Norm block at the end is the
control of the experiment: there the residual *is* re-normalised, and inertia should not appear.

The model consumes embeddings, not ids, because in a vision-language model some of its tokens never had an id:

    logits = lm(lm.embed_tokens(input_ids))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class LMConfig:
    """Sizes of the decoder. `post_norm=True` swaps every block for the Post-Norm control."""

    vocab_size: int = 320
    width: int = 96
    depth: int = 6
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 256
    rope_theta: float = 10_000.0
    eps: float = 1e-5
    tie_embeddings: bool = True
    post_norm: bool = False


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Statistics in fp32 whatever the input's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * rstd).to(x.dtype)


class Linear(nn.Linear):
    """x W^T, also for a single token on all cores: the CPU's matrix library multiplies one fp32 row on one of them, but
    shares out a batch, so there the rows of W are taken as a batch of as many slabs as there are threads."""

    def forward(self, x: Tensor) -> Tensor:
        slabs = torch.get_num_threads()
        alone = x.shape[:-1] == (1, 1) and x.dtype == torch.float32 and x.device.type == "cpu"
        if not alone or self.out_features % slabs:
            return super().forward(x)
        weight = self.weight.view(slabs, -1, self.in_features)
        return torch.bmm(x.expand(slabs, 1, -1), weight.mT).view(1, 1, -1)


def rotary_table(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, T, hs) of the rotation of each pair of channels at each position (B, T)."""
    frequency = theta ** (-torch.arange(0, head_size, 2, device=positions.device).float() / head_size)  # (hs/2,)
    angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, hs/2)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel i together with channel i + hs/2 (Llama's pairing)."""
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


def build_mask(document_ids: Tensor, queries: int | None = None) -> Tensor:
    """The one attention mask: causal, and only within a document.

    `document_ids` (B, S) numbers the documents that are packed into a row; padding is 0. Padding attends to padding,
    so no row of the mask is ever empty (an empty row is a NaN). Returns booleans (B, 1, queries, S), the last
    `queries` rows (all by default).
    """
    S = document_ids.shape[1]
    first = 0 if queries is None else S - queries
    order = torch.arange(S, device=document_ids.device)
    causal = order[first:, None] >= order[None, :]  # (queries, S)
    same = document_ids[:, first:, None] == document_ids[:, None, :]  # (B, queries, S)
    return (causal & same)[:, None]


def build_positions(document_ids: Tensor) -> Tensor:
    """Position of each token inside its own document (B, T): it does not depend on padding or on neighbours."""
    T = document_ids.shape[1]
    order = torch.arange(T, device=document_ids.device).expand_as(document_ids)
    starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return order - torch.where(starts, order, 0).cummax(dim=1).values


class KVCache:
    """Keys and values of the tokens seen so far, in buffers allocated once."""

    def __init__(self, config: LMConfig, batch: int, capacity: int, device=None, dtype=None):
        shape = (batch, config.kv_heads, capacity, config.width // config.heads)
        self.keys, self.values = (
            [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.depth)] for _ in range(2)
        )
        self.length, self.capacity = 0, capacity

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, kv, T, hs) after what is there; return everything up to and with it."""
        keys, values, end = self.keys[layer], self.values[layer], self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, and these would make {end}")
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention; hands out q and k (both rotated), so that a probe can recompute the map."""

    def __init__(self, config: LMConfig, layer: int):
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.head_size = config.width // config.heads
        self.q_proj = Linear(config.width, config.heads * self.head_size, bias=False)
        self.k_proj = Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.v_proj = Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.o_proj = Linear(config.heads * self.head_size, config.width, bias=False)

    def forward(self, x: Tensor, rotary, mask: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.head_size).transpose(1, 2)  # (B, nh, T, hs)
        k = self.k_proj(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)  # (B, kv, T, hs)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)  # (B, kv, T, hs)
        q, k = rotate(torch.cat([q, k], dim=1), rotary).split([self.heads, self.kv_heads], dim=1)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, kv, S, hs)
        grouped = self.kv_heads < self.heads  # not said of groups of one: no fused GPU kernel takes it beside a mask
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)  # (B, nh, T, hs)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, T, -1)), q, k


class MLP(nn.Module):
    """SwiGLU: one half decides how much of the other half passes."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.gate_proj = Linear(config.width, config.hidden, bias=False)
        self.up_proj = Linear(config.width, config.hidden, bias=False)
        self.down_proj = Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-Norm: the branches see a normalised token, the residual is never normalised. Inertia lives here."""

    def __init__(self, config: LMConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.mlp = MLP(config)

    def forward(self, hidden_states: Tensor, rotary, mask: Tensor | None, cache: KVCache | None = None):
        update, q, k = self.self_attn(self.input_layernorm(hidden_states), rotary, mask, cache)
        after_attn = hidden_states + update  # (B, T, D)
        after_mlp = after_attn + self.mlp(self.post_attention_layernorm(after_attn))  # (B, T, D)
        return after_mlp, {"attn": after_attn, "mlp": after_mlp, "q": q, "k": k}


class PostNormBlock(Block):
    """The control: normalise after every addition, so that no token can stay loud (same parameters, same cost)."""

    def forward(self, hidden_states: Tensor, rotary, mask: Tensor | None, cache: KVCache | None = None):
        update, q, k = self.self_attn(hidden_states, rotary, mask, cache)
        after_attn = self.input_layernorm(hidden_states + update)  # (B, T, D)
        after_mlp = self.post_attention_layernorm(after_attn + self.mlp(after_attn))  # (B, T, D)
        return after_mlp, {"attn": after_attn, "mlp": after_mlp, "q": q, "k": k}


class LM(nn.Module):
    """Embeddings (B, T, D) to logits (B, T, V).

    `document_ids` (B, S) numbers the documents of each row, 0 for padding; without it the whole row is one document.
    With a `cache`, the S tokens are those in the cache followed by the T new ones. `return_states=True` returns
    `(logits, states)`: every residual state in order ("embedding", "block0.attn", "block0.mlp", ...) and each block's
    q (B, nh, T, hs) and k (B, kv, S, hs).

    Raises ValueError when heads do not divide the width evenly or kv_heads do not divide heads, when `document_ids` are
    not one for each of the S tokens, or when the cache is full.
    """

    def __init__(self, config: LMConfig):
        super().__init__()
        if config.width % (2 * config.heads) or config.heads % config.kv_heads:
            raise ValueError(
                f"heads={config.heads} must divide width={config.width} into an even size (RoPE turns pairs), "
                f"and kv_heads={config.kv_heads} must divide heads={config.heads}"
            )
        self.config = config
        block = PostNormBlock if config.post_norm else Block
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.depth))
        self.norm = RMSNorm(config.width, config.eps)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        # After a norm the residual has size one from the first block on: updates as small as Pre-Norm's would be lost.
        loud = self.config.post_norm and isinstance(module, nn.Linear)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.06 if loud else 0.02)

    def forward(
        self,
        inputs_embeds: Tensor,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        return_states: bool = False,
    ):
        B, T, _ = inputs_embeds.shape
        seen = T if cache is None else cache.length + T
        if document_ids is None and T == 1:  # one more token of the only document: it sees all
            mask, positions = None, torch.full((B, 1), seen - 1, device=inputs_embeds.device)
        else:
            if document_ids is None:
                document_ids = torch.ones(B, seen, dtype=torch.long, device=inputs_embeds.device)
            if document_ids.shape != (B, seen):
                got = tuple(document_ids.shape)
                raise ValueError(f"document_ids must be ({B}, {seen}), one for each token, got {got}")
            mask = build_mask(document_ids, queries=T)  # (B, 1, T, S)
            positions = build_positions(document_ids)[:, -T:]  # (B, T)
        rotary = rotary_table(positions, self.config.width // self.config.heads, self.config.rope_theta)

        hidden_states = inputs_embeds
        states = {"embedding": hidden_states}
        for i, layer in enumerate(self.layers):
            hidden_states, record = layer(hidden_states, rotary, mask, cache)
            if return_states:
                states |= {f"block{i}.{name}": value for name, value in record.items()}
        if cache is not None:
            cache.length += T
        logits = self.lm_head(self.norm(hidden_states))  # (B, T, V)
        return (logits, states) if return_states else logits
