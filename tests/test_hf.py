"""The probe of Hugging Face models: nine families, built tiny from their config classes with random weights.

Every model and its processor go through `save_pretrained` and are loaded from the folder. The step angles are checked
against streams that are added up from branch outputs alone; that this is the stream is shown by the model's own logits.
"""

import csv
import functools
import json
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import minillava
from minillava import hf, hf_probe, interventions, survey
from minillava.hf_align import NormAlign
from minillava.probe import step_geometry, trace_observations

tf = pytest.importorskip("transformers")
tf.logging.disable_progress_bar()
tf.logging.set_verbosity_error()
ROOT = Path(__file__).parents[1]
QUESTION = "what is on the table ?"
WORDS = ("user what is on the table ? a red cup and two plates").split()

# Tiny models ---------------------------------------------------------------------------------------------------------

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
CLIP = VISION | {"image_size": 16, "patch_size": 8, "projection_dim": 24}
SIGLIP = VISION | {"image_size": 16, "patch_size": 4}
QWEN_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
QWEN_TEMPLATE = "{% for m in messages %}user " + " ".join(QWEN_TOKENS[i] for i in (0, 1, 3))
QWEN_TEMPLATE += " {{ m.content[1].text }}{% endfor %}"


def words(special, **named):
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "\n", *special, *WORDS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(special))
    options = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    options |= {"extra_special_tokens": named} if named else {}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=inner, **options)
    return tokenizer, tokenizer.convert_tokens_to_ids(list(special))


def build_llava():
    tokenizer, (image,) = words(["<image>"])
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**CLIP), text_config=tf.LlamaConfig(**TEXT), image_token_index=image
    )
    pictures = tf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return tf.LlavaForConditionalGeneration(config), tf.LlavaProcessor(pictures, tokenizer, **options)


def build_llava_next():
    tokenizer, (image,) = words(["<image>"])
    grid = [[16, 32], [32, 16], [32, 32]]
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**CLIP),
        text_config=tf.MistralConfig(**TEXT),
        image_token_index=image,
        image_grid_pinpoints=grid,
    )
    pictures = tf.LlavaNextImageProcessor(size={"shortest_edge": 16}, crop_size=16, image_grid_pinpoints=grid)
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return tf.LlavaNextForConditionalGeneration(config), tf.LlavaNextProcessor(pictures, tokenizer, **options)


def build_qwen(kind):
    tokenizer, ids = words(QWEN_TOKENS)
    names = ("vision_start_token_id", "image_token_id", "video_token_id", "vision_end_token_id")
    vision = {"depth": 3, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    pictures, options = tf.Qwen2VLImageProcessor(**sizes), dict(zip(names, ids, strict=True))
    text = TEXT | {"rope_parameters": rope}
    if kind == "qwen3_vl":  # the last layer too is followed by a deep-stack addition: no later layer could show it
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}
        model = tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(vision_config=vision, text_config=text, **options))
        processor = tf.Qwen3VLProcessor(pictures, tokenizer, tf.Qwen3VLVideoProcessor(), chat_template=QWEN_TEMPLATE)
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = tf.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **options)
        model = tf.Qwen2_5_VLForConditionalGeneration(config)
        processor = tf.Qwen2_5_VLProcessor(pictures, tokenizer, tf.Qwen2VLVideoProcessor(), chat_template=QWEN_TEMPLATE)
    return model, processor


def build_idefics(kind):
    """SmolVLM borrows Idefics3's processor, which makes the same inputs: its own needs a package for video prompts."""
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer, ids = words(special + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)])
    pictures = tf.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    configs, classes = {"smolvlm": tf.SmolVLMConfig, "idefics3": tf.Idefics3Config}, tf.Idefics3ForConditionalGeneration
    classes = {"smolvlm": tf.SmolVLMForConditionalGeneration, "idefics3": classes}
    config = configs[kind](
        vision_config=SIGLIP, text_config=tf.LlamaConfig(**TEXT), image_token_id=ids[0], scale_factor=2
    )
    return classes[kind](config), tf.Idefics3Processor(pictures, tokenizer, image_seq_len=4)


def build_paligemma():
    tokenizer, (image,) = words(["<image>"], image_token="<image>")
    config = tf.PaliGemmaConfig(
        vision_config=tf.SiglipVisionConfig(**SIGLIP, projection_dim=32),
        text_config=tf.GemmaConfig(**TEXT),
        image_token_index=image,
        projection_dim=32,
    )
    pictures = tf.SiglipImageProcessor(size={"height": 16, "width": 16})
    pictures.image_seq_length = 16
    return tf.PaliGemmaForConditionalGeneration(config), tf.PaliGemmaProcessor(pictures, tokenizer)


def build_gemma3():
    special = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer, ids = words(special.values(), **special)
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**SIGLIP),
        text_config=tf.Gemma3TextConfig(**TEXT, sliding_window=8, query_pre_attn_scalar=8),
        mm_tokens_per_image=4,
        **dict(zip(("image_token_index", "boi_token_index", "eoi_token_index"), ids, strict=True)),
    )
    pictures = tf.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    return tf.Gemma3ForConditionalGeneration(config), tf.Gemma3Processor(pictures, tokenizer, image_seq_length=4)


def build_internvl():
    special = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    special |= {"video_token": "<video>"}
    tokenizer, ids = words(special.values(), **special)
    vision = tf.InternVLVisionConfig(**VISION | {"image_size": [16, 16], "patch_size": [4, 4]})
    text = tf.Qwen2Config(**TEXT)
    config = tf.InternVLConfig(vision_config=vision, text_config=text, image_token_id=ids[2], image_seq_length=4)
    pictures = tf.GotOcr2ImageProcessor(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4)
    video = tf.InternVLVideoProcessor()
    return tf.InternVLForConditionalGeneration(config), tf.InternVLProcessor(
        pictures, tokenizer, video, image_seq_length=4
    )


BUILD = {
    "llava": build_llava,
    "llava_next": build_llava_next,
    "qwen3_vl": lambda: build_qwen("qwen3_vl"),
    "qwen2_5_vl": lambda: build_qwen("qwen2_5_vl"),
    "smolvlm": lambda: build_idefics("smolvlm"),
    "idefics3": lambda: build_idefics("idefics3"),
    "paligemma": build_paligemma,
    "gemma3": build_gemma3,
    "internvl": build_internvl,
}
assert BUILD.keys() == hf.FAMILIES.keys()


def picture(seed=0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 30, 3), dtype=np.uint8))


def write_family(family: str, path: Path) -> Path:
    """A folder with a tiny model of a family, every weight random, and its processor."""
    torch.manual_seed(0)
    model, processor = BUILD[family]()
    with torch.no_grad():  # as they are initialised, some are zero and norms are 1: mistakes would not show
        for name, weight in model.named_parameters():
            gain = "norm" in name and weight.dim() == 1 and "bias" not in name
            weight.uniform_(0.5, 2) if gain else weight.normal_(std=0.15)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a family to its folder."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family: write_family(family, root / family))


@pytest.fixture
def load(folders):
    """A function from a family to (model, parts, inputs of one picture)."""

    def loaded(family: str):
        model, processor = hf.load(folders(family))
        return model, hf.find_parts(model), hf.make_inputs(processor, picture(), QUESTION)

    return loaded


families = pytest.mark.parametrize("family", hf.FAMILIES)

# States --------------------------------------------------------------------------------------------------------------


def added_up(model, inputs) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stream as branch outputs add it up, from what the LM is called with; and the logits that follow from it."""
    lm = getattr(model.model, "language_model", None) or model.model.text_model
    called, branches, handles = {}, [], []
    keep = lambda _, args, kwargs: called.update(kwargs)  # noqa: E731
    handles.append(lm.register_forward_pre_hook(keep, with_kwargs=True))
    post = model.config.model_type == "gemma3"
    for layer in lm.layers:
        ends = (layer.post_attention_layernorm, layer.post_feedforward_layernorm) if post else ()
        for module in ends or (layer.self_attn, layer.mlp):
            hook = lambda _, args, out: branches.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    state = called["inputs_embeds"]
    states, extra = {"embedding": state}, called.get("deepstack_visual_embeds") or []
    for i in range(len(lm.layers)):
        for branch, update in zip(("attn", "mlp"), branches[2 * i : 2 * i + 2], strict=True):
            state = state + update
            states[f"block{i}.{branch}"] = state
        if i < len(extra):
            state = state.clone()
            state[called["visual_pos_masks"]] += extra[i]
            states[f"block{i}.added"] = state
    with torch.no_grad():
        return states, model.lm_head(lm.norm(state))


def turns(states: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Angle of every step, token by token, by the textbook, in float64."""
    found = {}
    for (_, before), (name, after) in pairwise(states.items()):
        a, b = before[tokens].double().numpy(), after[tokens].double().numpy()
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        found[name] = np.arccos(np.clip(cosine, -1, 1))
    return found


@families
def test_step_angles_agree_with_branches_added_up(load, family):
    model, parts, inputs = load(family)
    seen = hf.observe(model, parts, inputs, verify=True).observation
    states, logits = added_up(model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)  # it is the stream
    assert list(seen.states) == list(states)
    assert ("block2.added" in states) == (family == "qwen3_vl")
    for tokens in (seen.visual, seen.text):
        expected = turns(states, tokens)
        for (_, before), (name, after) in pairwise(seen.states.items()):
            ours = step_geometry(before[tokens], after[tokens])["turn"].numpy()
            np.testing.assert_allclose(ours, expected[name], atol=1e-3, err_msg=name)
    trace = trace_observations([seen])
    expected = [values.mean() for values in turns(states, seen.visual).values()]
    np.testing.assert_allclose(trace.data["visual"]["turn"], expected, atol=1e-3)


def worst_disagreement(model, states: dict[str, torch.Tensor], inputs, tokens) -> float:
    found, expected = turns(states, tokens), turns(added_up(model, inputs)[0], tokens)
    return max(np.abs(found[name] - expected[name]).max() for name in found)


@families
def test_a_last_state_after_the_final_norm_is_caught(load, family):
    model, parts, inputs = load(family)
    seen = hf.observe(model, parts, inputs).observation
    last = list(seen.states)[-1]
    with torch.no_grad():
        wrong = seen.states | {last: parts.final_norm(seen.states[last])}
    assert worst_disagreement(model, wrong, inputs, seen.visual) > 0.01  # ten times the tolerance
    with torch.no_grad():  # and that is what transformers calls the last hidden state
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(wrong[last], hidden, rtol=1e-4, atol=1e-4)


def test_ignored_deep_stack_additions_are_caught(load):
    model, parts, inputs = load("qwen3_vl")
    seen = hf.observe(model, parts, inputs).observation
    wrong = {name: state for name, state in seen.states.items() if not name.endswith(".added")}
    assert worst_disagreement(model, wrong, inputs, seen.visual) > 0.05
    assert worst_disagreement(model, wrong, inputs, seen.text) < 1e-3  # nothing is added to text


def test_ignored_post_norms_are_caught(load, monkeypatch):
    model, parts, inputs = load("gemma3")
    layer, raw = parts.layers[0], []
    handle = layer.self_attn.register_forward_hook(lambda _, args, out: raw.append(out[0]))
    seen = hf.observe(model, parts, inputs).observation
    handle.remove()
    wrong = seen.states | {"block0.attn": seen.states["embedding"] + raw[0]}
    assert worst_disagreement(model, wrong, inputs, seen.visual) > 0.05
    monkeypatch.setattr(hf, "branch_ends", lambda layer: (layer.self_attn, layer.mlp))
    with pytest.raises(ValueError, match="layer 1: its attention branch does not add up"):
        hf.observe(model, parts, inputs, verify=True)


def test_states_between_the_wrong_modules_are_caught(load, monkeypatch):
    model, parts, inputs = load("llava")
    monkeypatch.setattr(hf, "before_mlp", lambda layer: layer.mlp)  # sees the normalised state
    with pytest.raises(ValueError, match="does not add up"):
        hf.observe(model, parts, inputs, verify=True)


def test_a_layer_that_is_one_step(load, monkeypatch):
    """Parallel blocks have no state between their branches: a layer is one step, and closes as one."""
    model, parts, inputs = load("llava")
    two = hf.observe(model, parts, inputs).observation
    monkeypatch.setattr(hf, "before_mlp", lambda layer: None)
    one = hf.observe(model, parts, inputs, verify=True).observation
    assert list(one.states) == ["embedding", "block0.layer", "block1.layer", "block2.layer"]
    data = [trace_observations([seen]).data["visual"]["layer_cosine"] for seen in (one, two)]
    np.testing.assert_array_equal(*data)


@families
def test_observing_changes_nothing_and_leaves_nothing_behind(load, family):
    model, parts, inputs = load(family)
    with torch.no_grad():
        before = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
    assert torch.equal(hf.observe(model, parts, inputs).next_token, before)
    hf.observe(model, parts, inputs, visual_scale=0.1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in parts.layers.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1], before)


@families
def test_the_interface(load, family):
    """What enters the projector, what leaves it, and what the LM receives at image placeholders."""
    model, parts, inputs = load(family)
    seen = hf.observe(model, parts, inputs)
    assert seen.encoder.shape[1] == 24 and seen.projected.shape[1] == 32
    received = seen.observation.states["embedding"][seen.observation.visual]
    if family != "llava_next":  # which adds a learned token at the end of each row
        norms = (tokens.norm(dim=-1).sort().values for tokens in (received, seen.projected))
        torch.testing.assert_close(*norms)  # sorted: Qwen2.5-VL's projector works window by window
    words = inputs["input_ids"][seen.observation.text]
    torch.testing.assert_close(seen.observation.states["embedding"][seen.observation.text], parts.embedding(words))
    assert not seen.observation.text[:, 0].any()


def test_text_scale_counts_what_the_embedding_module_does(load):
    for family, factor in (("llava", 1.0), ("gemma3", math.sqrt(32))):
        _, parts, _ = load(family)
        rows = parts.embedding.weight.detach().norm(dim=-1)
        assert hf.text_scale(parts.embedding) == pytest.approx(factor * rows[rows > 1e-6].mean().item(), rel=1e-5)
        assert torch.equal(hf.vocabulary_norms(parts.embedding), hf.vocabulary_norms(parts.embedding, chunk=7))


# Unknown models and bad input ----------------------------------------------------------------------------------------


def test_an_unknown_family_says_what_to_name(load):
    model, parts, inputs = load("llava")
    names = hf.FAMILIES["llava"]._asdict()
    model.config.model_type = "strange"
    with pytest.raises(ValueError, match=r"Name four things.*missing: --embedding, --projector, --layers$"):
        hf.find_parts(model)
    with pytest.raises(ValueError, match=r"--projector model\.projektor: no such module.*model\.multi_modal_projector"):
        hf.find_parts(model, **names | {"projector": "model.projektor"})
    with pytest.raises(ValueError, match="not the list of layers"):
        hf.find_parts(model, **names | {"layers": "model.language_model"})
    assert hf.find_parts(model, **names) == parts
    with pytest.raises(ValueError, match="no visual token"):
        hf.observe(model, hf.find_parts(model, **names, image_token_id=63), inputs)
    model.add_module("spare", torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="projector was not called"):
        hf.observe(model, hf.find_parts(model, **names | {"projector": "spare"}), inputs)
    del model.config.model_type


def run(*arguments, cwd=ROOT) -> subprocess.CompletedProcess:
    environment = {"HF_HUB_OFFLINE": "1", "MINILLAVA_REFERENCE": "1", "PATH": ""}
    command = [sys.executable, "-m", "minillava", "probe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_bad_input_is_one_line(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "questions.txt").write_text("\n")
    picture().save(tmp_path / "a.png")
    for arguments, message in (
        ((None, "q", None, 3), "--image: a picture or a folder"),
        ((tmp_path / "none.png", "q", None, 3), "no such file"),
        ((tmp_path / "empty", "q", None, 3), "no picture in it"),
        ((tmp_path / "a.png", "q", tmp_path / "questions.txt", 3), "no question in it"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_probe.gather(*arguments)
    picture().save(tmp_path / "empty" / "b.PNG")
    found = [len(hf_probe.gather(tmp_path, "q", None, limit).pictures) for limit in (1, 3)]
    assert found == [1, 2]  # folders in it are looked into
    for word in ("loud", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="a positive number or norm-matched"):
            interventions.read_scales([word], 4.0, 1.0)
    assert interventions.read_scales(["0.1", "norm-matched"], 4.0, 1.0) == {"0.1": 0.1, "norm-matched": 0.25}


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_from_folder_to_page(folders, tmp_path):
    for seed in range(2):
        picture(seed).save(tmp_path / f"{seed}.png")
    (tmp_path / "questions.txt").write_text("what is on the table ?\na red cup ?\n")
    out = tmp_path / "out"
    model = ("--model", folders("qwen3_vl"), "--image", tmp_path, "--questions", tmp_path / "questions.txt")
    done = run(*model, "--attention", "--interventions", "0.1", "norm-matched", "--out", out, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "probe.json").read_text())
    assert found["samples"] == 4
    assert f"Verdict ({found['verdict']['kind']})" in done.stdout
    assert found["interventions"]["norm-matched"]["scale"] == pytest.approx(1 / found["interface"]["ratio_text"])
    page = (out / "report.html").read_text()
    assert found["verdict"]["words"].split(".")[0] in page
    assert (
        page.count("data:image/svg+xml;base64,") >= 4
        and 'src="figures' not in page
        and "http" not in page.split("base64")[0]
    )
    assert found["trace"]["formula_error"]["turn"] < 1e-12
    for modality in ("visual", "text"):
        assert found["audit"][modality]["exact"] == pytest.approx(1, abs=1e-9)
        assert found["audit"][modality]["shared"] < found["audit"][modality]["exact"]


def test_the_command_says_errors_in_one_line(folders, tmp_path):
    for arguments, message in (
        (("--model", folders("llava")), "--image: a picture or a folder of pictures is needed"),
        (("--model", tmp_path), "config.json: not found"),
        (("--images", "0"), "--images 0: at least 1 is needed"),
    ):
        done = run(*arguments)
        assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("minillava: "), done.stderr
        assert message in done.stderr


def test_verdicts_follow_the_numbers(load):
    """The words are the numbers' own: the same trace with another interface tells another story."""
    model, parts, inputs = load("llava")
    result = hf_probe.measure(model, parts, [inputs])
    assert result["interface"]["ratio_text"] > 1.5 and result["verdict"]["kind"] == "gap, slower"
    assert result["gain"]["gain"] == pytest.approx(hf.text_scale(parts.embedding) / math.sqrt(32))
    kinds = {0.5: "reversed", 1.2: "no gap", 3.0: "gap, slower"}
    for ratio, kind in kinds.items():
        other = result | {"interface": result["interface"] | {"ratio_text": ratio}}
        assert hf_probe.verdict(other)["kind"] == kind
    data = result["trace"].data
    swapped = data["visual"]["layer_cosine"], data["text"]["layer_cosine"]
    data["text"]["layer_cosine"], data["visual"]["layer_cosine"] = swapped
    assert hf_probe.verdict(result)["kind"] == "gap, not slower"


def test_layers_until_norms_meet(load):
    model, parts, inputs = load("llava")
    trace = trace_observations([hf.observe(model, parts, inputs).observation])
    met = hf_probe.meeting(trace)
    assert met["layers"] == 3 and met["predicted"] > 0
    norms = [trace.data[modality]["state_norm"][::2] for modality in ("visual", "text")]
    first = np.flatnonzero(np.maximum(norms[0] / norms[1], norms[1] / norms[0]) <= 1.1)
    assert met["measured"] == (first[0] if len(first) else None)
    for rows in trace.data.values():
        rows["state_norm"] = np.ones(7)
    assert (hf_probe.meeting(trace)["measured"], hf_probe.meeting(trace)["predicted"]) == (0, 0.0)


def test_a_survey_grows_by_rows_of_its_schema(load, tmp_path):
    model, parts, inputs = load("paligemma")
    result = hf_probe.measure(model, parts, [inputs]) | {"model": "a, b", "revision": "", "samples": 1}
    table = tmp_path / "survey.csv"
    table.write_bytes(survey.TABLE.read_bytes())
    before = list(csv.DictReader(table.open()))
    assert len(before) >= 6 and all(row["source"] not in ("", "measured") for row in before[:6])
    survey.append(survey.row_of(result), table)
    after = list(csv.DictReader(table.open()))
    assert after[:-1] == before
    assert after[-1]["model"] == "a, b" and after[-1]["source"] == "measured"
    assert float(after[-1]["ratio"]) == pytest.approx(result["interface"]["ratio_text"], rel=1e-3)
    table.write_text("model,norm\n")
    with pytest.raises(ValueError, match="has the columns model, norm"):
        survey.append(survey.row_of(result), table)
    with pytest.raises(ValueError, match="from a checkout"):
        survey.append(survey.row_of(result), tmp_path / "none.csv")
    assert all(f"`{column}`" in (ROOT / "docs" / "survey.md").read_text() for column in survey.COLUMNS)


def test_the_command_appends_to_the_survey_of_its_checkout(folders, tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "docs").mkdir(parents=True)
    for name in ("minillava", "theory"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "checkpoint"))
    table = checkout / "docs" / "survey.csv"
    shutil.copy(survey.TABLE, table)
    before = table.read_text()
    picture().save(tmp_path / "a.png")
    done = run(
        "--model", folders("llava"), "--image", tmp_path / "a.png", "--prompt", QUESTION, "--survey", cwd=checkout
    )
    assert done.returncode == 0, done.stderr
    assert table.read_text().startswith(before)
    (row,) = csv.DictReader([before.splitlines()[0], *table.read_text()[len(before) :].splitlines()])
    assert row["model"] == str(folders("llava")) and row["source"] == "measured" and row["samples"] == "1"


# Attention and interventions -----------------------------------------------------------------------------------------


@families
def test_recorded_attention_is_the_models_own(load, family):
    """Same logits as the fused attention, same weights as transformers' eager one; and the model is given back."""
    model, parts, inputs = load(family)
    before = hf.observe(model, parts, inputs).next_token
    with interventions.recorded(model, parts) as kept:
        torch.testing.assert_close(hf.observe(model, parts, inputs).next_token, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(hf.observe(model, parts, inputs).next_token, before)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    for ours, theirs in zip(kept.weights, weights, strict=True):
        torch.testing.assert_close(ours, theirs.mean(dim=1), rtol=1e-4, atol=1e-5)


def test_attention_mass(load):
    model, parts, inputs = load("llava")
    found = interventions.attention(model, parts, [inputs])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[1].mean(dim=1)[0]  # (T, S)
    visual, text = (mask[0] for mask in hf.token_masks(inputs, parts.image_token_id))
    assert found["mass"][1] == pytest.approx(weights[text][:, visual].sum(1).mean().item(), rel=1e-4)
    assert found["map"].shape == (3, 2, 2)


def test_interventions(load):
    """Scale 1 is no intervention; what a scale does to the LM's input is what the caller asked for; controls bite."""
    model, parts, inputs = load("llava")
    found = interventions.interventions(model, parts, [inputs, inputs], {"1": 1.0, "0.1": 0.1, "0.5": 0.5})
    assert found["1"]["kl"] == 0 and found["1"]["keys"] == pytest.approx([1, 1, 1])
    for name in ("0.1", "0.5", "blank image", "no image"):
        assert found[name]["kl"] > 1e-4
    # LLaVA's first layer normalises its input, so its keys and values do not see the scale (claim S1), later ones do.
    assert found["0.1"]["keys"][0] == pytest.approx(1, abs=1e-3)
    assert found["0.1"]["keys"][1] < 0.99
    base, scaled = (hf.observe(model, parts, inputs, visual_scale=scale).observation for scale in (1, 0.5))
    difference = scaled.states["embedding"] - base.states["embedding"] * torch.where(base.visual, 0.5, 1.0)[..., None]
    assert difference.abs().max() == 0
    cut = hf.without_image(inputs, parts.image_token_id)
    assert parts.image_token_id not in cut["input_ids"] and "pixel_values" not in cut


def test_divergence_is_that_of_torch():
    a, b = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="batchmean")
    assert interventions.divergence(a, b) == pytest.approx(expected.item(), rel=1e-5)
    assert interventions.divergence(a, a) == 0


# Aligning ------------------------------------------------------------------------------------------------------------


@families
def test_aligned_visual_tokens_are_as_loud_as_text(load, family):
    model, parts, inputs = load(family)
    before = hf.observe(model, parts, inputs).next_token
    names = [name for name, _ in model.named_parameters()]
    minillava.align(model)
    norms = hf.observe(model, parts, inputs).projected.norm(dim=-1)
    assert norms.mean().item() == pytest.approx(hf.text_scale(parts.embedding), rel=1e-3)
    assert [name for name, _ in model.named_parameters() if "norm_align" not in name] == names
    minillava.unalign(model)
    assert torch.equal(hf.observe(model, parts, inputs).next_token, before)
    assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(ValueError, match="not aligned"):
        minillava.unalign(model)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_alignment_is_saved_and_loaded(load, family, tmp_path):
    model, _, inputs = load(family)
    norm = minillava.align(model, compensation=family != "llava")
    with torch.no_grad():
        norm.weight.mul_(torch.linspace(0.5, 1.5, 32))  # as training would
        norm.bias.add_(0.01)
    model.save_pretrained(tmp_path / "aligned")
    again = minillava.load_aligned(tmp_path / "aligned").eval()
    found = hf.find_parts(again).projector.norm_align
    assert isinstance(found, NormAlign) and found.compensate == (family != "llava")
    logits = (hf.observe(m, hf.find_parts(m), inputs).next_token for m in (again, model))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)  # not in bits: where memory lies changes rounding
    minillava.unalign(again)
    again.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"holds no model that minillava\.align has aligned"):
        minillava.load_aligned(tmp_path / "plain")


def test_an_aligned_model_trains_and_compensation_multiplies_the_gradient(load):
    """One step of SGD lowers the loss; upstream gradients differ by 1/mean|g| exactly, the gain's do not (G1)."""
    grads = {}
    for compensation in (False, True):
        model, parts, inputs = load("llava")
        norm = minillava.align(model, compensation)
        gain = norm.weight.abs().mean().item()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        grads[compensation] = (parts.projector.linear_2.weight.grad.clone(), norm.weight.grad.clone())
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        with torch.no_grad():
            assert model(**inputs, labels=inputs["input_ids"]).loss < loss
    torch.testing.assert_close(grads[True][0] * gain, grads[False][0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(grads[True][1], grads[False][1])


def test_a_projector_at_text_scale_is_refused(load):
    model, parts, inputs = load("llava")
    with pytest.raises(ValueError, match="aligned already"):
        minillava.align(model) and minillava.align(model)
    minillava.unalign(model)
    T = hf.text_scale(parts.embedding)
    with torch.no_grad():  # one that is quiet by its weights shows only when it is measured
        scale = T / hf.observe(model, parts, inputs).projected.norm(dim=-1).mean()
        parts.projector.linear_2.weight.mul_(scale)
        parts.projector.linear_2.bias.mul_(scale)
    with pytest.raises(ValueError, match=r"already ends at text scale.*visual tokens have a mean norm"):
        minillava.align(model, inputs=inputs)
    model.model.multi_modal_projector = torch.nn.Sequential(parts.projector, torch.nn.LayerNorm(32))
    minillava.align(model)  # a LayerNorm of gain 1 has norm √32, far above the text's
    minillava.unalign(model)
    torch.nn.init.constant_(model.model.multi_modal_projector[1].weight, T / math.sqrt(32))
    with pytest.raises(ValueError, match="its last layer, a LayerNorm"):
        minillava.align(model)


def test_import_stays_light():
    code = "import sys, minillava; assert not {'torch', 'transformers'} & sys.modules.keys(); minillava.align"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minillava.nothing
