"""A Pre-Norm vision transformer in one file.

    h = h + attention(norm1(h))
    h = h + mlp(norm2(h))

Nothing ever normalises the residual stream `h` itself, so a token's norm grows with depth; the features handed to a
language model are taken from that raw stream (LLaVA takes the state before the last block). This is where the visual
tokens' large norms come from (PAPER.md, RQ1). Parameter names are timm's, so timm weights load without renaming.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class ViTConfig:
    """Sizes of the tower. `feature_layer` counts residual states: 0 is the embedding, -1 the last block's output."""

    image_size: int = 32
    patch_size: int = 8
    width: int = 128
    depth: int = 6
    heads: int = 4
    mlp_ratio: float = 4.0
    class_token: bool = False
    feature_layer: int = -2
    eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class PatchEmbed(nn.Module):
    """Cut the image into patches and map each to a vector: a convolution whose stride is its kernel."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.proj(pixel_values).flatten(2).transpose(1, 2)  # (B, 3, S, S) -> (B, N, D)


class Attention(nn.Module):
    """Bidirectional multi-head attention. Hands out q and k, so that a probe can recompute the attention map."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nh, N, hs)
        mixed = F.scaled_dot_product_attention(q, k, v)  # (B, nh, N, hs)
        return self.proj(mixed.transpose(1, 2).reshape(B, N, D)), q, k


class MLP(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        hidden = round(config.width * config.mlp_ratio)  # int() could lose one to rounding: 1152 * (4304 / 1152)
        self.fc1 = nn.Linear(config.width, hidden)
        self.fc2 = nn.Linear(hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One Pre-Norm block: two residual branches, each of which sees only the *direction* of the token (claim S1)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        update, q, k = self.attn(self.norm1(hidden_states))
        after_attn = hidden_states + update  # (B, N, D)
        after_mlp = after_attn + self.mlp(self.norm2(after_attn))  # (B, N, D)
        return after_mlp, {"attn": after_attn, "mlp": after_mlp, "q": q, "k": k}


class ViT(nn.Module):
    """Images to patch features.

    `forward(pixel_values)` takes (B, 3, S, S) floats and returns un-normalised features (B, N, D) from the residual
    state `feature_layer` (or `layer`, if given). With `return_states=True` it returns `(features, states)`: every
    residual state of every block in order ("embedding", "block0.attn", "block0.mlp", ...), class token included, with
    each block's q and k (B, nh, N, hs) beside them.

    Raises ValueError for images of another size, a width that the heads do not divide, or a layer that is not there.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        if config.width % config.heads or config.image_size % config.patch_size:
            raise ValueError(
                f"heads={config.heads} must divide width={config.width}, "
                f"and patch_size={config.patch_size} must divide image_size={config.image_size}"
            )
        self.config = config
        self.blocks_below(config.feature_layer)  # fail now rather than at the first image
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches + config.class_token, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)  # for a head on the last state; features skip it
        self.apply(self._init_weights)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def blocks_below(self, layer: int) -> int:
        """How many blocks produce residual state `layer`, where negative ones count from the last block's output."""
        depth = self.config.depth
        if not -depth - 1 <= layer <= depth:
            raise ValueError(f"layer {layer} is not there: {depth} blocks have residual states 0 to {depth}")
        return layer % (depth + 1)

    def embed(self, pixel_values: Tensor) -> Tensor:
        size = self.config.image_size
        if pixel_values.shape[1:] != (3, size, size):
            raise ValueError(f"images must be (B, 3, {size}, {size}), got {tuple(pixel_values.shape)}")
        x = self.patch_embed(pixel_values)  # (B, N, D)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (B, 1 + N, D)
        return x + self.pos_embed

    def forward(self, pixel_values: Tensor, layer: int | None = None, return_states: bool = False):
        last = self.blocks_below(self.config.feature_layer if layer is None else layer)
        hidden_states = self.embed(pixel_values)
        states = {"embedding": hidden_states}
        features = hidden_states
        for i, block in enumerate(self.blocks):
            if i >= last and not return_states:
                break  # blocks above the feature layer only cost time
            hidden_states, record = block(hidden_states)
            if return_states:
                states |= {f"block{i}.{name}": value for name, value in record.items()}
            if i + 1 == last:
                features = hidden_states
        features = features[:, int(self.config.class_token) :]  # patches only
        return (features, states) if return_states else features
