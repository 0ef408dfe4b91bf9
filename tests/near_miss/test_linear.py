"""Functions that are nearly a recurrence of linear attention: none of them is taken, and each says why."""

# ruff: noqa: E501 (an edit is a line)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.passes.matching.linear import proving, running, substitutes
from attn_compiler.spec.linear import LinearSpec
from tests.near_miss import linear_variants
from tests.thinned import further

DELTA, BY_TOKEN = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
CHANNEL, SSD, UPDATE = "chunk_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update"

_ROLES = {
    DELTA: ("q", "k", "v", "g", "beta", "state"),
    BY_TOKEN: ("q", "k", "v", "g", "beta", "state"),
    CHANNEL: ("q", "k", "v", "g", "beta", "state"),
    SSD: ("x", "dt", "A", "B", "C", "D", "dt_bias", "state"),
    UPDATE: ("x", "dt", "A", "B", "C", "D", "dt_bias", "state"),
}
_CHUNK = 16
_SCALED = "query = query * scaling\n\n    # Pad"
_BETA = "v_beta = value * beta"
_SOFTPLUS = "        dt = F.softplus(dt)\n    dt = torch.clamp"


def said(folder: Path, name: str, edits: Mapping[str, str], *, length: Any = 50, heads: int = 4, batch: int = 2) -> str:
    """ "" where the function is taken."""
    function = linear_variants.variant(folder, name, edits)
    proposed = substitutes.proposal(function)
    assert proposed is not None
    given = {
        "chunk_size": _CHUNK,
        "use_qk_l2norm_in_kernel": True,
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
    }
    form = running.form_of(proposed, _ROLES[name], given, channel=name == CHANNEL)
    grouped = heads if name == CHANNEL else max(heads // 4, 2)
    spec = LinearSpec(
        form=form,
        batch=batch,
        length=1 if name == UPDATE else length,
        num_heads_k=grouped,
        num_heads_v=heads,
        head_dim_k=8,
        head_dim_v=8,
        dtype="float32",
        device="cpu",
    )
    reason = proving.why_not(proposed, spec, store=None)
    return "" if reason is None else reason.observed


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        (DELTA, {}),
        (DELTA, {"ut_system": "tri", _SCALED: _SCALED.replace("query * scaling", "scaling * query")}),
        (DELTA, {"sequence_length + pad_size": "pad_size + sequence_length", "decay = g": "decay = 1.0 * g"}),
        (DELTA, {"def l2norm": "SCALE = 1.0\n\n\ndef l2norm", _SCALED: _SCALED.replace("scaling", "scaling * SCALE")}),
        (BY_TOKEN, {}),
        (CHANNEL, {}),
        (SSD, {}),
        (SSD, {"output = output + D_residual": "output = D_residual + output"}),
        (UPDATE, {}),
    ],
)
def test_the_function_and_other_spellings_of_it_are_taken(tmp_path: Path, name: str, edits: dict[str, str]) -> None:
    assert said(tmp_path, name, edits) == ""


_FIRST = "    initial_dtype = query.dtype\n    batch_size, sequence_length, num_k_heads, k_head_dim = key.shape\n    num_v_heads, v_head_dim = value.shape[-2:]\n    recurrent"
_GROUPED = "query = query.repeat_interleave(num_v_heads // num_k_heads, dim=2)"

NEAR_MISSES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    # The prototype's.
    ("base 2", DELTA, {"pairwise_decay.exp()": "pairwise_decay.exp2()"}, "exp2"),
    ("decay after the write", DELTA, {"(cum_decay[..., -1:] - cum_decay).exp()": "(cum_decay[..., -1:] - cum_decay + decay).exp()"}, "gives"),
    ("no scale", DELTA, {_SCALED: "query = query * 1.0\n\n    # Pad"}, "gives"),
    ("keys not normalised", DELTA, {"        key = l2norm(key, dim=-1, eps=1e-6)\n": ""}, "gives"),
    ("another eps", DELTA, {"eps=1e-6)\n    # And": "eps=1e-5)\n    # And"}, "gives"),
    ("the next token", DELTA, {".triu(1)\n": ".triu(2)\n"}, "gives"),
    ("heads grouped by repetition", DELTA, {_GROUPED: "query = query.repeat(1, 1, num_v_heads // num_k_heads, 1)"}, "repeat"),
    ("state lost between chunks", DELTA, {"last_recurrent_state * chunk_decay": "0 * last_recurrent_state * chunk_decay"}, "gives"),
    ("state detached between chunks", DELTA, {"v_new = new_values[:, :, i]": "last_recurrent_state = last_recurrent_state.detach()\n        v_new = new_values[:, :, i]"}, "gradient"),
    ("beta clamped", DELTA, {_BETA: f"beta = beta.clamp(max=1.0)\n    {_BETA}"}, "clamp"),
    ("decay clamped", DELTA, {"cum_decay = decay.cumsum": "decay = decay.clamp(min=-50.0)\n    cum_decay = decay.cumsum"}, "clamp"),
    ("minimum", DELTA, {_BETA: f"beta = torch.minimum(beta, torch.ones_like(beta) * 9e9)\n    {_BETA}"}, "minimum"),
    ("an operand written to", DELTA, {_FIRST: "    g.copy_(g * 1.0)\n" + _FIRST}, "writes to an operand"),
    ("dropout", DELTA, {"v_new = new_values[:, :, i] - k_cumdecay[:, :, i] @ last_recurrent_state": "v_new = F.dropout(new_values[:, :, i] - k_cumdecay[:, :, i] @ last_recurrent_state, 1e-9)"}, "reads F.dropout"),
    ("other for long sequences", DELTA, {"query.shape[-1] ** -0.5\n    query = query * scaling\n\n    # Pad": "query.shape[-1] ** -0.5 * (2 if sequence_length > 600 else 1)\n    query = query * scaling\n\n    # Pad"}, "branches on `sequence_length > 600`"),
    ("rounded inside", DELTA, {"inter_chunk_attn = query[:, :, i] @ last_recurrent_state": "inter_chunk_attn = (query[:, :, i] @ last_recurrent_state).bfloat16().to(query.dtype)"}, "gives"),
    ("D left out", SSD, {"        output = output + D_residual\n": "        pass\n"}, "gives"),
    ("dt squared", SSD, {"hidden_states * dt[..., None].float()": "hidden_states * (dt * dt)[..., None].float()"}, "gives"),
    ("softplus with beta 2", SSD, {_SOFTPLUS: "        dt = F.softplus(dt, beta=2)\n    dt = torch.clamp"}, "softplus with"),
    ("a narrower clamp", SSD, {"max=dt_limit[1])": "max=min(dt_limit[1], 90.0))"}, "calls min"),
    ("strictly causal", SSD, {"dtype=torch.bool), diagonal=0)": "dtype=torch.bool), diagonal=-1)"}, "gives"),
    # Further ones.
    ("a clamp of other numbers", SSD, {"max=dt_limit[1])": "max=90.0)"}, "clamp to"),
    ("relu of beta", DELTA, {_BETA: f"beta = F.relu(beta)\n    {_BETA}"}, "relu"),
    ("absolute keys", DELTA, {"scaling = query": "key = key.abs()\n    scaling = query"}, "abs"),
    ("where", DELTA, {_BETA: f"beta = torch.where(beta > 5.0, 5.0, beta)\n    {_BETA}"}, "compares `beta > 5.0`"),
    ("tanh of the state", DELTA, {"key[:, :, i].transpose(-1, -2) @ v_new": "key[:, :, i].transpose(-1, -2) @ torch.tanh(v_new)"}, "tanh"),
    ("maximum of the decay", DELTA, {"cum_decay = decay.cumsum": "decay = torch.amax(decay, dim=-1, keepdim=True) + 0 * decay\n    cum_decay = decay.cumsum"}, "amax"),
    ("other for large batches", DELTA, {_SCALED: "query = query * (scaling if batch_size > 64 else scaling * 1.0)\n\n    # Pad"}, "branches on `batch_size > 64`"),
    ("other for many heads", DELTA, {_SCALED: "query = query * [scaling, scaling * 2][num_v_heads > 99]\n\n    # Pad"}, "compares `num_v_heads > 99`"),
    ("other on a device", DELTA, {_SCALED: "query = query * (2 * scaling if query.is_cuda else scaling)\n\n    # Pad"}, "branches on `query.is_cuda`"),
    ("other for a dtype", DELTA, {_SCALED: "query = query * (2 if initial_dtype == torch.float16 else 1) * scaling\n\n    # Pad"}, "branches on"),
    ("a branch on data", DELTA, {_SCALED: "query = query * (2 if g.sum() else 1) * scaling\n\n    # Pad"}, "branches on `g.sum()`"),
    ("read before it is written", DELTA, {"torch.zeros_like(new_values)": "torch.empty_like(new_values)"}, "empty"),
    ("noise of zero", DELTA, {_BETA: f"beta = beta + 0 * torch.randn_like(beta)\n    {_BETA}"}, "rand"),
    ("values seen by beta twice", DELTA, {_BETA: "v_beta = value * (beta * beta).unsqueeze(-1).squeeze(-1)"}, "gives"),
    ("a chunk more of decay", DELTA, {"chunk_decay = cum_decay[..., -1]": "chunk_decay = 2 * cum_decay[..., -1]"}, "gives"),
    ("the state of the chunk before", DELTA, {"inter_chunk_attn = query[:, :, i] @ last_recurrent_state": "inter_chunk_attn = query[:, :, i] @ (last_recurrent_state * chunk_decay[:, :, i])"}, "gives"),
    ("no delta rule", BY_TOKEN, {"delta = (v_t - kv_mem) * beta_t": "delta = v_t * beta_t"}, "gives"),
    ("read before the write", BY_TOKEN, {"kv_mem = (last_recurrent_state * k_t.unsqueeze(-1)).sum(dim=-2)": "kv_mem = (last_recurrent_state * k_t.unsqueeze(-1)).sum(dim=-2) * decay_t[..., 0]"}, "gives"),
    ("keys sorted", BY_TOKEN, {"q_t, k_t, v_t = query[:, :, i], key[:, :, i]": "q_t, k_t, v_t = query[:, :, i], key[:, :, i].sort(dim=-1).values"}, "sort"),
    ("a decay that is rounded", BY_TOKEN, {"decay[:, :, i].exp()": "decay[:, :, i].exp().round(decimals=12)"}, "round"),
    ("one decay for all channels", CHANNEL, {"g = g.cumsum(dim=-2)": "g = g[..., :1].expand_as(g).cumsum(dim=-2)"}, "gives"),
    ("a mask of scores", CHANNEL, {"attn_intra = (q_i": "attn_intra = F.threshold(attn_inter[..., :1], -9e9, 0.0) * 0 + (q_i"}, "threshold"),
    ("groups the other way", SSD, {"B = B.float().repeat_interleave(num_heads // num_groups, dim=2, output_size=num_heads)": "B = B.float().flip(2).repeat_interleave(num_heads // num_groups, dim=2, output_size=num_heads)"}, "flip"),
    ("dt without its bias", SSD, {"dt = dt + dt_bias.to(dt.dtype)": "dt = dt + 0 * dt_bias.to(dt.dtype)"}, "gives"),
    ("the state not decayed", UPDATE, {"ssm_states = state * dA + dBx": "ssm_states = state + dBx"}, "gives"),
    ("D of the old state", UPDATE, {"out = (out + hidden_states * D).to(out.dtype)": "out = (out + hidden_states * D * D).to(out.dtype)"}, "gives"),
)  # fmt: skip


@pytest.mark.parametrize("case", further(NEAR_MISSES, daily=NEAR_MISSES[::2]), ids=lambda case: case[0])
def test_what_is_nearly_a_recurrence_is_not_taken(tmp_path: Path, case: tuple[str, str, dict[str, str], str]) -> None:
    _, name, edits, why = case
    assert why in said(tmp_path, name, edits)


@pytest.mark.parametrize(
    "edits",
    [
        {_SCALED: "query = torch.cat([query[:, :7], -query[:, 7:]], 1) * scaling\n\n    # Pad"},
        {
            f"{x}.repeat_interleave(num_v_heads // num_k_heads, dim=2)": f"torch.cat([{x}.repeat_interleave(2, dim=2)] * "
            "(num_v_heads // num_k_heads // 2), 2)"
            for x in ("query", "key")
        },
    ],
    ids=["the eighth head", "groups of four"],
)
def test_heads_that_few_heads_do_not_stand_for_are_told_at_any_batch(tmp_path: Path, edits: dict[str, str]) -> None:
    for batch in (2, 1 << 20):
        assert "from the recurrence's" in said(tmp_path, DELTA, edits, heads=16, batch=batch)
        assert said(tmp_path, DELTA, {}, heads=16, batch=batch) == ""


def test_a_text_that_nobody_read_is_not_taken_for_every_length(tmp_path: Path) -> None:
    edited = {"sequence_length + pad_size": "pad_size + sequence_length"}
    assert "the length is not known" in said(tmp_path, DELTA, edited, length="s77")
    assert said(tmp_path, DELTA, {}, length="s77") == ""
