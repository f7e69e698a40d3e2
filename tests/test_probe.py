"""The probe against independent recomputation, planted mistakes and properties that theory demands (R1, R5, R6, S1)."""

import json
import math
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillava import attention, content, probe
from minillava.data import IGNORE, Batch
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LMConfig, build_mask
from minillava.norm_align import text_norm
from minillava.probe import Observation
from minillava.vit import ViTConfig
from theory.rotation import step_angle

IMAGE = 3
N = 4  # visual tokens of an image: 16 px, patches of 8


def build_model(seed=0, arm="base", class_token=False, **lm) -> MiniLLaVA:
    """A model whose every weight is random, norms included: at their initial 1 some mistakes could not be seen."""
    torch.manual_seed(seed)
    vision = ViTConfig(image_size=16, patch_size=8, width=24, depth=3, heads=2, class_token=class_token)
    language = LMConfig(**{"vocab_size": 40, "width": 32, "depth": 3, "heads": 4, "kv_heads": 2, "hidden": 48} | lm)
    model = MiniLLaVA(LLaVAConfig(vision=vision, lm=language, arm=arm, image_token_id=IMAGE))
    with torch.no_grad():
        for name, weight in model.lm.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2)
            else:
                weight.normal_(std=0.15)
    return model


def build_batch(seed=0, rows=3, T=14) -> Batch:
    """Rows with an image at 2..5 and one answer token at 11; each row one token shorter than the one before it."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, 40, (rows, T), generator=generator)
    input_ids[:, 2 : 2 + N] = IMAGE
    labels = torch.full((rows, T), IGNORE)
    labels[:, 11] = input_ids[:, 11]
    document_ids = (torch.arange(T) < T - torch.arange(rows)[:, None].clamp(max=2)).long()
    pixels = torch.randint(0, 256, (rows, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return Batch(input_ids, labels, document_ids, pixels=pixels)


def join(*batches: Batch) -> Batch:
    fields = {}
    for name in ("input_ids", "labels", "document_ids", "pixels"):
        fields[name] = torch.cat([getattr(batch, name) for batch in batches])
    return Batch(**fields)


def assert_same_numbers(a, b, rtol=1e-4, atol=1e-6):
    """Two results agree. Default tolerances are those of float32 states: batched sums may be ordered differently."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            assert_same_numbers(value, b[key], rtol, atol)
        elif isinstance(value, float | np.ndarray):
            np.testing.assert_allclose(value, b[key], rtol=rtol, atol=atol, err_msg=key)


def hooked(model, batch):
    """What the branches of every layer took and gave, by forward hooks, and the LM's input (the states unused)."""
    calls = []
    handles = []
    for layer in model.lm.layers:
        for module in (layer.self_attn, layer.mlp):
            keep = lambda _, args, out: calls.append((args[0], out[0] if isinstance(out, tuple) else out))  # noqa: E731
            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        embeds = model.embed(batch.input_ids, **batch.images(model.projector.fc1.weight.dtype))
        model.lm(embeds, batch.document_ids)
    for handle in handles:
        handle.remove()
    return embeds, calls


def trace_by_hand(model, batch, modality) -> dict[str, np.ndarray]:
    """Textbook formulas on hooked branch outputs; the update is what the branch gave, not a difference of states."""
    state, calls = hooked(model, batch)
    visual = batch.input_ids == IMAGE
    tokens = visual if modality == "visual" else ~visual & (batch.document_ids > 0)
    rows = {key: [] for key in ("norm", "update", "angle", "turn")}
    for _, update in calls:
        h, d = state[tokens].numpy(), update[tokens].numpy()
        after, length = h + d, np.linalg.norm
        n, C = length(h, axis=1), length(d, axis=1)
        rows["norm"].append(n.mean())
        rows["update"].append(C.mean())
        rows["angle"].append(np.arccos((h * d).sum(1) / n / C).mean())
        rows["turn"].append(np.arccos((h * after).sum(1) / n / length(after, axis=1)).mean())
        state = state + update
    return {key: np.array(values) for key, values in rows.items()}


# Trace ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", probe.MODALITIES)
def test_trace_agrees_with_hooked_branches(modality):
    """In float64: arccos loses half of the digits only near 0 and π, and these angles are far from both."""
    model, batch = build_model().double(), build_batch()
    data, hand = probe.trace(model, batch).data[modality], trace_by_hand(model, batch, modality)
    assert hand["turn"].min() > 0.01
    for key, values in hand.items():
        np.testing.assert_allclose(data[key], values, rtol=1e-9, err_msg=key)


def test_a_last_state_taken_after_the_final_norm_is_caught():
    model, batch = build_model().double(), build_batch()
    seen = probe.observe(model, batch)
    last = list(seen.states)[-1]
    assert torch.equal(
        model.lm.lm_head(model.lm.norm(seen.states[last])),
        model(batch.input_ids, batch.document_ids, **batch.images(torch.float64)),
    )
    planted = replace(seen, states=seen.states | {last: model.lm.norm(seen.states[last])})
    hand = trace_by_hand(model, batch, "visual")
    np.testing.assert_allclose(probe.trace_observations([seen]).data["visual"]["turn"], hand["turn"], rtol=1e-9)
    wrong = probe.trace_observations([planted]).data["visual"]
    np.testing.assert_allclose(wrong["turn"][:-1], hand["turn"][:-1], rtol=1e-9)
    assert abs(wrong["turn"][-1] - hand["turn"][-1]) > 0.05


def observation(states: torch.Tensor, visual: torch.Tensor) -> Observation:
    """An observation of given residual states (2L + 1, B, T, D)."""
    names = ["embedding"] + [f"block{i // 2}.{('attn', 'mlp')[i % 2]}" for i in range(len(states) - 1)]
    mask = build_mask(torch.ones_like(visual, dtype=torch.long))
    return Observation(dict(zip(names, states, strict=True)), [], [], mask, visual, ~visual)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.floats(-12, 12), ratio=st.floats(-6, 6), dtype=st.sampled_from(["32", "64"]))
def test_the_formula_explains_every_token(seed, size, ratio, dtype):
    """R1, R5: whatever the states, theory from each token's own n, C, φ is the measured turn.

    Tolerance: all angles are computed in float64 with an absolute error of some ulp of π. φ enters through the update,
    a difference of states that cancels when C is far below n: its error then is (n/C) ulp, and θ is about C/n of it.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(5, 2, 6, 8, generator=generator, dtype=getattr(torch, f"float{dtype}"))
    steps[1:] *= 10**ratio
    states = (10**size * steps).cumsum(0)
    visual = torch.arange(6).expand(2, 6) < 3
    trace = probe.trace_observations([observation(states, visual)])
    assert trace.formula_error["turn"] < 1e-14 and trace.formula_error["cosine"] < 1e-14
    h = states[:, visual].double().numpy()  # (5, M, D)
    for key, pairs in {
        "cosine": (h[:-1], h[1:]),
        "layer_cosine": (h[:-1:2], h[2::2]),
        "input_cosine": (h[:1], h),
    }.items():
        cosine = (pairs[0] * pairs[1]).sum(-1) / np.linalg.norm(pairs[0], axis=-1) / np.linalg.norm(pairs[1], axis=-1)
        np.testing.assert_allclose(trace.data["visual"][key], cosine.mean(1), atol=1e-14)
        np.testing.assert_allclose(trace.data["visual"][f"{key}_std"], cosine.std(1), atol=1e-8)
    norm = np.linalg.norm(h, axis=-1)
    np.testing.assert_allclose(trace.data["visual"]["state_norm"], norm.mean(1), rtol=1e-12)
    np.testing.assert_allclose(trace.data["visual"]["state_norm_std"], norm.std(1), rtol=1e-7)
    np.testing.assert_allclose(trace.data["visual"]["norm_harmonic"], 1 / (1 / norm[:-1]).mean(1), rtol=1e-12)


def test_means_mislead_and_the_harmonic_mean_less_so():
    """R6 on norms with a lognormal spread like LLaVA's, one update at a right angle."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(4000, 16, generator=generator).double(), dim=-1)
    norms = (torch.randn(4000, 1, generator=generator) * 0.91 + 3.3).exp()
    aside = torch.randn(4000, 16, generator=generator).double()
    aside = torch.nn.functional.normalize(aside - (aside * direction).sum(-1, keepdim=True) * direction, dim=-1)
    states = torch.stack([norms * direction, norms * direction + aside])[:, None]
    data = probe.trace_observations([observation(states, torch.ones(1, 4000, dtype=torch.bool))]).data["visual"]
    assert data["turn"][0] / data["turn_at_means"][0] > 1.8
    assert data["turn_at_harmonic"][0] == pytest.approx(data["turn"][0], rel=0.05)
    assert data["predicted_turn"][0] == pytest.approx(data["turn"][0], rel=1e-12)
    assert abs(data["direction_agreement"][0]) < 0.003  # A3 holds here: 4000 directions, 8 million pairs


def test_predictions_from_means_are_told_means_only():
    """The paper's view: one C and one φ for both modalities (A1, A2), the mean of theirs."""
    data = probe.trace(build_model(), build_batch()).data
    C, angle = (np.mean([data[modality][key] for modality in probe.MODALITIES], axis=0) for key in ("update", "angle"))
    for rows in data.values():
        np.testing.assert_allclose(rows["turn_at_shared"], step_angle(rows["norm"], C, angle))
        np.testing.assert_allclose(rows["turn_at_means"], step_angle(rows["norm"], rows["update"], rows["angle"]))
        assert np.abs(rows["turn_at_shared"] - rows["turn_at_means"]).max() > 0.01


def test_direction_agreement_is_the_mean_cosine_of_pairs():
    seen = probe.observe(build_model().double(), build_batch())
    states = [state[seen.visual] for state in seen.states.values()]
    sideways = []
    for h, after in pairwise(states):
        d = after - h
        d = d - (d * h).sum(-1, keepdim=True) / h.square().sum(-1, keepdim=True) * h
        sideways.append(torch.nn.functional.normalize(d, dim=-1))
    pairs = [(u @ u.T)[~torch.eye(len(u), dtype=torch.bool)].mean().item() for u in sideways]
    data = probe.trace_observations([seen]).data["visual"]
    np.testing.assert_allclose(data["direction_agreement"], pairs, rtol=1e-9)


@settings(max_examples=12)
@given(power=st.integers(-8, 8), seed=st.integers(0, 100))
def test_the_first_branch_ignores_the_size_of_tokens(power, seed):
    """S1 with ε = 0: powers of two give the same bits, so C stays and the turn falls with the norm (R1)."""
    model, batch = build_model(seed, eps=0.0), build_batch(seed)
    plain, scaled = (probe.observe(model, batch, visual_scale=2.0**p) for p in (0, power))
    assert torch.equal(plain.queries[0], scaled.queries[0]) and torch.equal(plain.keys[0], scaled.keys[0])
    outputs = []
    attn = model.lm.layers[0].self_attn
    handle = attn.register_forward_hook(lambda _, args, out: outputs.append(out[0]))
    traces = [probe.trace_observations([probe.observe(model, batch, 2.0**p)]).data for p in (0, power)]
    handle.remove()
    assert torch.equal(outputs[0], outputs[1])
    plain_step, scaled_step = (data["visual"] for data in traces)
    rounding = 1e-6 * max(plain_step["norm"][0], scaled_step["norm"][0])  # of h + Δ, in float32
    assert scaled_step["update"][0] == pytest.approx(plain_step["update"][0], abs=rounding)
    assert scaled_step["norm"][0] == pytest.approx(2.0**power * plain_step["norm"][0], rel=1e-6)
    assert np.sign(scaled_step["turn"][0] - plain_step["turn"][0]) == -np.sign(power)
    assert traces[0]["text"]["turn"][0] == traces[1]["text"]["turn"][0]


def test_padding_and_text_only_rows_do_not_count():
    model, batch = build_model(), build_batch()
    wide = Batch(
        *(
            torch.nn.functional.pad(x, (0, 3), value=v)
            for x, v in ((batch.input_ids, 0), (batch.labels, IGNORE), (batch.document_ids, 0))
        ),
        pixels=batch.pixels,
    )
    words = Batch(torch.full((2, 17), 7), torch.full((2, 17), IGNORE), torch.ones(2, 17).long())
    mixed = Batch(
        *(torch.cat([getattr(words, f), getattr(wide, f)]) for f in ("input_ids", "labels", "document_ids")),
        pixels=batch.pixels,
    )
    expected, found = probe.trace(model, batch), probe.trace(model, [mixed, words])
    assert expected.tokens == found.tokens == {"visual": 12, "text": 27}
    assert_same_numbers(expected.data, found.data)
    assert_same_numbers(attention.attention_mass(model, batch), attention.attention_mass(model, [mixed, words]))
    assert_same_numbers(probe.interface_norms(model, batch), probe.interface_norms(model, [mixed, words]))


def test_packed_documents_count_like_separate_rows():
    """Two documents in one row, one of them without an image."""
    model, batch = build_model(), build_batch(rows=1)
    words = torch.full((1, 5), 9)
    packed = Batch(
        torch.cat([words, batch.input_ids], 1),
        torch.cat([torch.full((1, 5), IGNORE), batch.labels], 1),
        torch.cat([torch.ones(1, 5).long(), 2 * batch.document_ids], 1),
        pixels=batch.pixels,
    )
    assert_same_numbers(probe.trace(model, batch).data, probe.trace(model, packed).data)
    assert_same_numbers(attention.attention_mass(model, batch), attention.attention_mass(model, packed))
    np.testing.assert_allclose(
        attention.attention_map(model, batch)["maps"], attention.attention_map(model, packed)["maps"], atol=1e-6
    )


def test_batches_add_up():
    model, batches = build_model(), [build_batch(seed) for seed in range(3)]
    expected, found = probe.trace(model, join(*batches)), probe.trace(model, batches)
    assert expected.tokens == found.tokens
    assert_same_numbers(expected.data, found.data)
    assert_same_numbers(attention.attention_mass(model, join(*batches)), attention.attention_mass(model, batches))
    assert_same_numbers(probe.interface_norms(model, join(*batches)), probe.interface_norms(model, batches))


def test_memory_does_not_grow_with_the_number_of_batches():
    """No state outlives its turn: while a batch is made, only the one before it may still be held."""
    model, alive = build_model(), []

    def observations():
        for seed in range(6):
            assert sum(ref() is not None for ref in alive) <= 1
            seen = probe.observe(model, build_batch(seed))
            alive.append(weakref.ref(seen))
            yield seen
            del seen

    assert probe.trace_observations(observations()).tokens["visual"] == 6 * 12


def test_post_norm_blocks_are_steps_too():
    model = build_model(post_norm=True)
    trace = probe.trace(model, build_batch())
    assert trace.formula_error["turn"] < 1e-14
    first, last = trace.data["visual"], trace.data["text"]
    assert first["state_norm"][-1] == pytest.approx(last["state_norm"][-1], rel=0.2)  # no token can stay loud there


def test_results_go_to_json_even_where_nothing_moves():
    model = build_model()
    torch.nn.init.zeros_(model.lm.layers[1].self_attn.o_proj.weight)
    trace = probe.trace(model, build_batch())
    found = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert found["steps"][:3] == ["block0.attn", "block0.mlp", "block1.attn"]
    step = {
        key: found["data"]["visual"][key][2] for key in ("update", "angle", "turn", "cosine", "direction_agreement")
    }
    assert step == {"update": 0, "angle": None, "turn": 0, "cosine": 1, "direction_agreement": None}
    json.dumps(probe.plain(probe.interface_norms(model, build_batch())), allow_nan=False)


def test_what_cannot_be_measured_is_refused():
    words = Batch(torch.full((2, 5), 9), torch.full((2, 5), IGNORE), torch.ones(2, 5).long())
    refusals = {
        probe.trace: "no visual token in any batch",
        attention.attention_mass: "no text token comes after an image",
        content.visual_states: "no batch holds an image",
        probe.interface_norms: "no batch holds an image",
    }
    for measure, message in refusals.items():
        for batches in (words, []):
            with pytest.raises(ValueError, match=message):
                measure(build_model(), batches)
    model = build_model()
    torch.nn.init.zeros_(model.projector.fc2.weight)
    torch.nn.init.zeros_(model.projector.fc2.bias)
    with pytest.raises(ValueError, match="state 'embedding': a visual token is zero"):
        probe.trace(model, build_batch())
    torch.nn.init.constant_(model.lm.layers[1].mlp.down_proj.weight, math.nan)
    model.projector.fc2.reset_parameters()
    with pytest.raises(ValueError, match=r"state 'block1.mlp': a visual token is zero or not finite"):
        probe.trace(model, build_batch())


# Attention -----------------------------------------------------------------------------------------------------------


def test_recomputed_attention_is_the_models():
    model, batch = build_model(), build_batch()
    seen = probe.observe(model, batch)
    _, calls = hooked(model, batch)
    for layer, (x, out), q, k in zip(model.lm.layers, calls[::2], seen.queries, seen.keys, strict=True):
        weights = attention.attention(q, k, seen.mask)[1]  # (B, nh, T, T)
        v = layer.self_attn.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
        mixed = layer.self_attn.o_proj((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed, out, rtol=1e-4, atol=1e-6)


def test_attention_mass_by_loops():
    model, batch = build_model(), build_batch()
    seen = probe.observe(model, batch)
    total, uniform, queries = np.zeros(3), 0.0, 0
    for b in range(3):
        for t in range(6, int(batch.document_ids[b].sum())):  # text that follows the image
            queries += 1
            uniform += N / (t + 1)
            for i in range(3):
                for head in range(4):
                    scores = seen.keys[i][b, head // 2, : t + 1] @ seen.queries[i][b, head, t] / math.sqrt(8)
                    total[i] += scores.softmax(0)[2:6].sum().item() / 4
    found = attention.attention_mass(model, batch)
    np.testing.assert_allclose(found["mass"], total / queries, rtol=1e-5)
    assert found["uniform"] == pytest.approx(uniform / queries, rel=1e-6) and found["queries"] == queries


def test_attention_map_looks_from_where_the_answer_is_decided():
    model, batch = build_model(), build_batch()
    seen, found = probe.observe(model, batch), attention.attention_map(model, batch)
    assert found["maps"].shape == (3, 3, 2, 2) and found["positions"].tolist() == [10, 10, 10]
    weights = attention.attention(seen.queries[1], seen.keys[1], seen.mask)[1]
    by_hand = weights[:, :, 10, 2:6].mean(1).reshape(3, 2, 2)  # row-major: the first two tokens are the upper row
    np.testing.assert_allclose(found["maps"][:, 1], by_hand, atol=1e-6)
    elsewhere = attention.attention_map(model, batch, positions=torch.tensor([6, 8, 9]))["maps"]
    np.testing.assert_allclose(elsewhere[1, 1], weights[1, :, 8, 2:6].mean(0).reshape(2, 2), atol=1e-6)


def test_a_prompt_without_an_answer_asks_at_its_last_token():
    batch = build_batch()
    batch.labels[:] = IGNORE
    assert attention.asking_positions(batch).tolist() == [13, 12, 11]


def test_attention_map_refuses_rows_it_cannot_map():
    model, batch = build_model(), build_batch()
    with pytest.raises(ValueError, match=r"same number of visual tokens, > 0; got \[2, 4, 4\]"):
        attention.attention_map(model, batch, positions=torch.tensor([3, 8, 9]))
    for positions in ([8, 8, 14], [8, -1, 8], [8, 8]):
        with pytest.raises(ValueError, match="positions must be 3 numbers from 0 to 13, one a row"):
            attention.attention_map(model, batch, positions=torch.tensor(positions))
    with pytest.raises(ValueError, match="2 visual tokens are not one square image"):
        attention.attention_map(model, batch, positions=torch.tensor([3, 3, 3]))


# Signal --------------------------------------------------------------------------------------------------------------

RELEVANT = torch.tensor([[True, False, False, False], [False, True, True, False], [False, False, False, True]])


def test_signal_by_loops():
    model, batch = build_model(), build_batch()
    seen, found = (
        probe.observe(model, batch, visual_scale=0.5),
        attention.signal(model, batch, RELEVANT, scales=[1, 0.5]),
    )
    expected = {key: np.zeros(3) for key in ("difference", "standardised", "mass")}
    best = np.zeros((3, 4))
    for i in range(3):
        for b in range(3):
            for head in range(4):
                scores = (
                    (seen.keys[i][b, head // 2, :11] @ seen.queries[i][b, head, 10] / math.sqrt(8)).double().numpy()
                )
                hit = np.zeros(11, dtype=bool)
                hit[2:6] = RELEVANT[b]
                others = scores[2:6][~RELEVANT[b].numpy()]
                difference = scores[hit].mean() - others.mean()
                expected["difference"][i] += difference / 12
                expected["standardised"][i] += difference / others.std() / 12
                expected["mass"][i] += (np.exp(scores) / np.exp(scores).sum())[hit].sum() / 12
                best[i, head] += difference / others.std() / 3
    for key, values in expected.items():
        np.testing.assert_allclose(found[key][1], values, rtol=1e-4, atol=1e-6, err_msg=key)
    np.testing.assert_allclose(found["standardised_best"][1], best.max(1), rtol=1e-4)
    assert found["relevant_share"] == pytest.approx(1 / 3)


def test_signal_of_the_first_layer_cannot_depend_on_the_visual_norm():
    """S1: its queries and keys see directions only. Deeper layers do depend on it."""
    found = attention.signal(build_model(eps=0.0), build_batch(), RELEVANT, scales=[0.25, 1, 8])
    np.testing.assert_allclose(found["norm_visual"] / found["norm_visual"][1], [0.25, 1, 8], rtol=1e-6)
    for key in ("difference", "standardised", "standardised_best", "mass"):
        assert len(set(found[key][:, 0])) == 1 and len(set(found[key][:, 1])) == 3


def test_signal_refuses_a_mask_that_leaves_nothing_to_compare():
    model, batch = build_model(), build_batch()
    with pytest.raises(ValueError, match="row 1 needs at least 1 relevant and 2 irrelevant"):
        attention.signal(
            model,
            batch,
            torch.tensor([[True, False, False, False], [True, True, True, False], [True] * 2 + [False] * 2]),
        )
    with pytest.raises(ValueError, match=r"relevant must be booleans \(3, 4\), got torch.bool \(3, 5\)"):
        attention.signal(model, batch, torch.ones(3, 5, dtype=torch.bool))


# Content -------------------------------------------------------------------------------------------------------------


def test_content_probe_reads_what_is_there():
    """Classes that are linear in the states are read; noise is read at chance; the size of channels does not matter."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(0, 5, (80, N), generator=generator)
    noise = torch.randn(80, N, 12, generator=generator)
    told = noise + 6 * torch.randn(5, 12, generator=generator)[cells]
    faint = noise + torch.randn(5, 12, generator=generator)[cells]  # a probe can tell some of it
    uneven = faint * 2.0 ** torch.arange(-18, 6, 2)
    found = content.content_probe([told, noise, faint, uneven], cells)
    assert found["accuracy"][0] > 0.97 and abs(found["accuracy"][1] - 0.2) < 0.12
    assert found["accuracy"][2] == found["accuracy"][3] < 0.97
    assert found["tokens"] == 160
    rare = torch.zeros(80, N, dtype=torch.long)
    rare[:, 0] = 1
    assert content.content_probe([noise], rare)["chance"] == 0.75


def test_content_probe_holds_out_whole_images():
    """A mark that all tokens of an image share tells its class only to a probe that has seen the image."""
    generator = torch.Generator().manual_seed(0)
    marks = torch.randn(60, 1, 200, generator=generator).expand(60, N, 200)
    cells = torch.randint(0, 2, (60, 1), generator=generator).expand(60, N)
    assert content.content_probe([marks], cells)["accuracy"][0] < 0.75


def test_content_probe_leaves_out_tokens_without_a_class():
    generator = torch.Generator().manual_seed(0)
    states, cells = torch.randn(20, N, 6, generator=generator), torch.randint(0, 2, (20, N), generator=generator)
    cells[:, 1:3] = -1
    assert content.content_probe([states], cells)["tokens"] == 20
    with pytest.raises(ValueError, match="must share"):
        content.content_probe([states], cells[:, :2])
    with pytest.raises(ValueError, match="leave no token"):
        content.content_probe([states], cells, test_fraction=0.0)


def test_visual_states_are_images_of_every_layer():
    model, batches = build_model(), [build_batch(0), build_batch(1)]
    states = content.visual_states(model, batches)
    assert [tuple(layer.shape) for layer in states] == [(6, N, 32)] * 4
    torch.testing.assert_close(states[0][3:], model.visual_tokens(**batches[1].images()).detach())
    seen = probe.observe(model, batches[0])
    torch.testing.assert_close(states[2][1], seen.states["block1.mlp"][1, 2:6])


# Interface -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_token", [False, True])
def test_interface_norms_follow_the_visual_tokens_into_the_lm(class_token):
    model, batch = build_model(arm="gwc", class_token=class_token), build_batch()
    with torch.no_grad():
        model.lm.embed_tokens.weight[1] = 0  # a row that was never used does not count in T
        if class_token:
            model.vision.cls_token.fill_(5)  # louder than any patch, and no visual token
    found = probe.interface_norms(model, batch)
    features, states = model.vision(batch.images()["pixel_values"], return_states=True)
    norm = lambda x: x.detach().norm(dim=-1)  # noqa: E731
    for key, values in {
        "encoder": features,
        "projector": model.projector(features),
        "visual": model.visual_tokens(features=features),
    }.items():
        assert found[key]["mean"] == pytest.approx(norm(values).mean().item(), rel=1e-5)
        assert found[key]["std"] == pytest.approx(norm(values).std(correction=0).item(), rel=1e-3, abs=1e-6)
    blocks = [
        norm(states[name][:, int(class_token) :]).mean().item()
        for name in ("embedding", "block0.mlp", "block1.mlp", "block2.mlp")
    ]
    assert found["encoder_blocks"]["mean"] == pytest.approx(blocks, rel=1e-5)
    assert found["encoder"]["mean"] == pytest.approx(found["encoder_blocks"]["mean"][2])  # feature_layer -2
    T = text_norm(model.lm.embed_tokens.weight)
    assert found["vocabulary"]["mean"] == pytest.approx(T, rel=1e-6)
    text = norm(model.lm.embed_tokens(batch.input_ids[(batch.document_ids > 0) & (batch.input_ids != IMAGE)]))
    assert found["text"]["mean"] == pytest.approx(text.mean().item(), rel=1e-5)
    assert found["ratio_vocabulary"] == pytest.approx(found["visual"]["mean"] / T, rel=1e-6)
    gain = model.arm.weight.detach()
    assert found["gain"]["mean"] == pytest.approx(gain.abs().mean().item())
    assert found["gain"]["norm"] == pytest.approx(gain.norm().item())


def test_interface_norms_from_features_have_no_blocks():
    model, batch = build_model(), build_batch()
    expected = probe.interface_norms(model, batch)
    with torch.no_grad():
        cached = replace(batch, pixels=None, features=model.vision(**batch.images()))
    found = probe.interface_norms(model, cached)
    assert "encoder_blocks" not in found and found["gain"] is None
    assert_same_numbers(
        {k: v for k, v in expected.items() if k not in ("encoder_blocks", "gain")},
        {k: v for k, v in found.items() if k != "gain"},
    )
    assert_same_numbers(probe.trace(model, batch).data, probe.trace(model, cached).data)
