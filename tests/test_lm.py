"""The decoder: the mask, positions, cache and packing change nothing that they should not; states are the residual."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillava.lm import LM, KVCache, Linear, LMConfig, RMSNorm, build_mask, build_positions, rotary_table, rotate

TINY = {"vocab_size": 40, "width": 24, "depth": 2, "heads": 3, "kv_heads": 1, "hidden": 32}
# Two fp32 evaluations of one sum in another order: logits here are of size 1 to 10, a few hundred roundings of 6e-8.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

documents = st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3).map(torch.tensor)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def make_lm(seed: int = 0, **changes) -> LM:
    """A tiny LM whose attention is far from uniform and whose norms have gains of their own."""
    torch.manual_seed(seed)
    lm = LM(LMConfig(**TINY | changes))
    for name, p in lm.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return lm


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- mask and positions


@given(documents)
def test_mask_is_causal_within_a_document_and_never_empty(document_ids):
    mask = build_mask(document_ids)
    B, S = document_ids.shape
    assert mask.shape == (B, 1, S, S)
    for b in range(B):
        for i in range(S):
            expected = [bool(j <= i and document_ids[b, i] == document_ids[b, j]) for j in range(S)]
            assert mask[b, 0, i].tolist() == expected
            assert any(expected)


@given(documents, st.integers(1, 7))
def test_mask_of_the_last_queries_is_the_end_of_the_whole_mask(document_ids, queries):
    assert torch.equal(build_mask(document_ids, queries), build_mask(document_ids)[:, :, -queries:])


@given(documents)
def test_positions_count_from_the_start_of_each_document(document_ids):
    for ids, positions in zip(document_ids.tolist(), build_positions(document_ids).tolist(), strict=True):
        assert positions[0] == 0
        for t in range(1, len(ids)):
            assert positions[t] == (positions[t - 1] + 1 if ids[t] == ids[t - 1] else 0)


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5))
def test_positions_do_not_depend_on_padding(left, length, right):
    ids = torch.tensor([[0] * left + [1] * length + [0] * right])
    assert build_positions(ids)[0, left : left + length].tolist() == list(range(length))


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_rotation_keeps_length_and_sees_only_the_distance(i, j, shift):
    """⟨R_i q, R_j k⟩ depends on i − j. Angles up to 400 rad are rounded to 400·2⁻²⁴ = 2.4e-5; q and k have norm √8."""
    q, k = draw(1, 1, 1, 8, seed=2), draw(1, 1, 1, 8, seed=3)

    def at(x, position):
        return rotate(x, rotary_table(torch.tensor([[position]]), 8, 10_000.0))

    near, far = (at(q, i) * at(k, j)).sum(), (at(q, i + shift) * at(k, j + shift)).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)
    torch.testing.assert_close(at(q, i).norm(), q.norm(), rtol=1e-6, atol=0)


# ---- what packing, padding and the cache must not change


@settings(max_examples=25)
@given(lengths, st.integers(0, 3))
@torch.no_grad()
def test_packed_documents_give_the_logits_of_separate_ones(lengths, padding):
    lm = make_lm()
    parts = [draw(1, n, 24, seed=i) for i, n in enumerate(lengths)]
    ids = [i + 1 for i, n in enumerate(lengths) for _ in range(n)] + [0] * padding
    packed = lm(torch.cat([*parts, draw(1, padding, 24, seed=99)], dim=1), torch.tensor([ids]))
    assert packed.isfinite().all()
    start = 0
    for part in parts:
        torch.testing.assert_close(packed[:, start : start + part.shape[1]], lm(part), **CLOSE)
        start += part.shape[1]


@torch.no_grad()
def test_documents_of_a_row_do_not_leak_into_each_other():
    """The test above compares values to a tolerance; this one changes one document wildly and asks for equal bits."""
    lm, x, ids = make_lm(), draw(1, 9, 24), torch.tensor([[1] * 4 + [2] * 5])
    other = x.clone()
    other[:, :4] = 1e3 * draw(1, 4, 24, seed=5)
    assert torch.equal(lm(x, ids)[:, 4:], lm(other, ids)[:, 4:])
    assert not torch.equal(lm(x, ids)[:, :4], lm(other, ids)[:, :4])


@torch.no_grad()
def test_no_token_sees_what_comes_after_it():
    lm, x = make_lm(), draw(1, 8, 24)
    for t in range(1, 8):
        later = x.clone()
        later[:, t:] = 1e3 * draw(1, 8 - t, 24, seed=t)
        assert torch.equal(lm(x)[:, :t], lm(later)[:, :t])


def test_padding_is_never_a_nan_forward_or_backward():
    lm, x = make_lm(), draw(3, 6, 24).requires_grad_()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    logits = lm(x, ids)
    assert logits.isfinite().all()
    logits[ids > 0].logsumexp(-1).sum().backward()
    assert x.grad.isfinite().all() and x.grad[ids > 0].any(-1).all()
    assert not x.grad[ids == 0].any()  # and nothing flows into padding


@settings(max_examples=25)
@given(lengths, st.integers(1, 2), st.sampled_from(["padded", "one document", "unsaid"]), st.booleans())
@torch.no_grad()
def test_any_way_of_feeding_the_cache_gives_the_logits_of_one_pass(chunks, B, documents, post_norm):
    lm, T = make_lm(post_norm=post_norm), sum(chunks)
    x = draw(B, T, 24)
    ids = torch.ones(B, T, dtype=torch.long)
    ids[0, : T // 2] = 0 if documents == "padded" else 1
    cache, pieces, start = KVCache(lm.config, B, T), [], 0
    for n in chunks:
        start += n
        seen = None if documents == "unsaid" else ids[:, :start]
        pieces.append(lm(x[:, start - n : start], seen, cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), lm(x, ids), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])  # 5 does not divide 24
def test_a_token_alone_is_multiplied_as_among_others(threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer, x = Linear(24, 24, bias=False).to(dtype), draw(1, 3, 24).to(dtype)
    many, one = x.clone().requires_grad_(), x[:, 1:2].clone().requires_grad_()
    whole, alone = layer(many), layer(one)
    torch.testing.assert_close(alone, whole[:, 1:2], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    whole[:, 1].sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    alone.sum().backward()
    torch.testing.assert_close(one.grad, many.grad[:, 1:2])
    torch.testing.assert_close(layer.weight.grad, expected)


# ---- the residual stream


def attention_by_hand(block, x, states, i, ids):
    """o_proj of softmax(q·k) v with q and k from the states, one query head at a time: no fused kernel, no GQA flag."""
    values = block.self_attn.v_proj(x)  # one key-value head
    hidden = ~build_mask(ids)[:, 0]
    heads = []
    for h in range(3):
        scores = states[f"block{i}.q"][:, h] @ states[f"block{i}.k"][:, 0].mT / math.sqrt(8)
        heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ values)
    return block.self_attn.o_proj(torch.cat(heads, dim=-1))


def swiglu_by_hand(mlp, x):
    gate = x @ mlp.gate_proj.weight.T
    return (gate / (1 + (-gate).exp()) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


@pytest.mark.parametrize("post_norm", [False, True])
@torch.no_grad()
def test_states_are_the_residual_stream_and_observing_changes_nothing(post_norm):
    lm, x = make_lm(post_norm=post_norm), draw(2, 6, 24)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]])
    logits, states = lm(x, ids, return_states=True)
    assert torch.equal(logits, lm(x, ids))
    assert torch.equal(states["embedding"], x)
    assert list(states) == ["embedding", *(f"block{i}.{s}" for i in range(2) for s in ("attn", "mlp", "q", "k"))]
    before = x
    for i, block in enumerate(lm.layers):
        first, second = block.input_layernorm, block.post_attention_layernorm
        if post_norm:
            attn = first(before + attention_by_hand(block, before, states, i, ids))
            mlp = second(states[f"block{i}.attn"] + swiglu_by_hand(block.mlp, states[f"block{i}.attn"]))
        else:
            attn = before + attention_by_hand(block, first(before), states, i, ids)
            mlp = states[f"block{i}.attn"] + swiglu_by_hand(block.mlp, second(states[f"block{i}.attn"]))
        torch.testing.assert_close(states[f"block{i}.attn"], attn, **CLOSE)
        torch.testing.assert_close(states[f"block{i}.mlp"], mlp, **CLOSE)
        before = states[f"block{i}.mlp"]
    torch.testing.assert_close(logits, lm.lm_head(lm.norm(before)), **CLOSE)


@torch.no_grad()
def test_states_with_a_cache_hold_the_keys_of_all_tokens():
    lm, x = make_lm(), draw(1, 5, 24)
    _, whole = lm(x, return_states=True)
    cache = KVCache(lm.config, 1, 5)
    lm(x[:, :3], cache=cache)
    _, states = lm(x[:, 3:], cache=cache, return_states=True)
    assert states["block1.q"].shape == (1, 3, 2, 8) and states["block1.k"].shape == (1, 1, 5, 8)
    for name in ("block0.k", "block1.k"):
        torch.testing.assert_close(states[name], whole[name], **CLOSE)
    torch.testing.assert_close(states["block1.mlp"], whole["block1.mlp"][:, 3:], **CLOSE)


@torch.no_grad()
def test_a_loud_token_stays_loud_in_pre_norm_and_is_forgotten_in_post_norm():
    """The control of the experiment: the same parameters, and no inertia. Rows of RMSNorm have norm √D at unit gain."""
    pre, post = make_lm(), make_lm(post_norm=True)
    assert [name for name, _ in pre.named_parameters()] == [name for name, _ in post.named_parameters()]
    for block in post.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            torch.nn.init.ones_(norm.weight)
    quiet, loud = draw(1, 4, 24), draw(1, 4, 24)
    loud[:, 1] *= 1e4
    ratio = {}
    for name, lm in (("pre", pre), ("post", post)):
        norms = [lm(x, return_states=True)[1]["block1.mlp"].norm(dim=-1)[0, 1] for x in (quiet, loud)]
        ratio[name] = (norms[1] / norms[0]).item()
    assert ratio["pre"] > 100
    assert ratio["post"] == pytest.approx(1, abs=1e-4)


# ---- parts


@torch.no_grad()
def test_grouped_query_attention_is_full_attention_with_shared_keys_and_values():
    grouped, full = make_lm(heads=6, kv_heads=2), make_lm(heads=6, kv_heads=6)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight.view(2, 4, 24).repeat_interleave(3, dim=0).reshape(24, 24)  # each serves 3 heads
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(draw(2, 5, 24)), full(draw(2, 5, 24)), **CLOSE)


@given(st.floats(-6, 6))
def test_rms_norm_takes_its_statistics_in_fp32(exponent):
    x = (10.0**exponent * draw(4, 24)).to(torch.bfloat16)
    norm = RMSNorm(24, eps=1e-5)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.float32  # an fp32 gain, as under autocast
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)  # bf16 keeps 8 bits: one rounding


def test_tied_embeddings_are_one_parameter():
    tied, untied = make_lm(), make_lm(tie_embeddings=False)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    numel = {name: sum(p.numel() for p in lm.parameters()) for name, lm in (("tied", tied), ("untied", untied))}
    assert numel["untied"] - numel["tied"] == 40 * 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads=5 must divide width=24"),
        ({"heads": 8, "kv_heads": 1}, "even size"),  # heads of 3 channels have no pairs to turn
        ({"heads": 3, "kv_heads": 2}, "kv_heads=2 must divide heads=3"),
    ],
)
def test_bad_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LM(LMConfig(**TINY | changes))


def test_bad_document_ids_and_a_full_cache_are_refused():
    lm = make_lm()
    with pytest.raises(ValueError, match=r"document_ids must be \(1, 4\), one for each token, got \(1, 3\)"):
        lm(draw(1, 4, 24), torch.ones(1, 3, dtype=torch.long))
    cache = KVCache(lm.config, 1, 5)
    lm(draw(1, 4, 24), cache=cache)
    with pytest.raises(ValueError, match=r"document_ids must be \(1, 5\)"):
        lm(draw(1, 1, 24), torch.ones(1, 1, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="the cache holds 5 tokens, and these would make 6"):
        lm(draw(1, 2, 24), cache=cache)
