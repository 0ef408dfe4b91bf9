"""Linear attention: calls of models' own functions, with heads that share one of k, states, padding, and lengths around those of chunks."""

from __future__ import annotations

import torch

from tests.fuzz.grammar.draft import Draft

#: what such programs are compiled with
LINEAR_LOWERINGS: tuple[tuple[str, ...] | None, ...] = (
    *[("linear_reference",)] * 3,
    ("linear_triton", "linear_reference"),
    None,
)
_LENGTHS = (1, 2, 5, 15, 16, 17, 33, 63, 64, 65, 70, 130, 200)
#: of functions that go token by token, where Dynamo may trace each
_FEW = (1, 2, 5, 17, 70)
#: of sums of which one that is rounded shows
_LONG = (5, 64, 65, 130, 200, 200)
_CHUNKS = (16, 64)
_KINDS = (
    *("delta_rule", "kimi_delta", *["state_space"] * 3, "delta_rule_by_token", "delta_rule_by_token"),
    *("kimi_delta_by_token", "own", "own"),
)


def linear_attention(draft: Draft) -> None:
    """One call, and perhaps a second one that goes on from its state."""
    kind = draft.pick(*_KINDS)
    if draft.dtype == torch.float64:
        # The functions compute in float32 all the same, and a result in float64 has no roundings of its own.
        draft.dtype = torch.float32
    lengths = {"own": _FEW[:-1], "state_space": _LONG}.get(kind, _FEW if kind.endswith("by_token") else _LENGTHS)
    draft.sizes["q"] = draft.pick(*lengths)
    draft.sizes["k"] = draft.sizes["q"]
    if kind == "state_space":
        _state_space(draft)
    elif kind == "own":
        _changed(draft)
    else:
        _delta(draft, kind)


def _changed(draft: Draft) -> None:
    """A function that rests on what is set before each call, which finds it otherwise in the second one."""
    kind = draft.pick("by_setting", "by_helper", "by_gradient")
    by = draft.new("p", ("b", "q"), "filled")
    draft.sizes["fill"], draft.others = 0, {**draft.sizes, "fill": 1}
    draft.dtype = torch.float32
    draft.lines.append(f'apart("import tests.fuzz.own_functions as own; own.turn(x)", {by})')
    draft.sizes["kv"] = draft.sizes["h"]
    _delta(draft, kind)


def _delta(draft: Draft, kind: str) -> None:
    is_kimi, by_token = kind.startswith("kimi"), not kind.endswith(("rule", "delta"))
    heads = "h" if is_kimi else "kv"
    q, k = draft.new("q", ("b", "q", heads, "d")), draft.new("k", ("b", "q", heads, "d"))
    v, beta = draft.new("v", ("b", "q", "h", "e")), draft.new("c", ("b", "q", "h"))
    decay = draft.new("g", ("b", "q", "h", "d") if is_kimi else ("b", "q", "h"))
    _pad(draft, (q, k, v))
    is_normal = not kind.startswith("by_") and draft.maybe()
    if not is_normal:
        # A key that is longer than 1 makes the delta rule grow.
        draft.lines.append(f"{k} = F.normalize({k}, dim=-1)")
    draft.lines += [
        f"{decay} = -F.softplus({decay}.to(W){draft.pick('', ' - 3', ' * 3')})",
        f"{beta} = {beta}.sigmoid()",
    ]
    at = draft.number(0, draft.sizes["q"] - 1)
    if by_token and draft.maybe(3):
        # A reset: the state is forgotten. By chunks the models' own functions give NaN there.
        draft.lines.append(f"{decay} = {decay}.index_fill(1, torch.tensor([{at}], device={decay}.device), -inf)")
    settings = [f"g={decay}", f"beta={beta}", f"use_qk_l2norm_in_kernel={is_normal}"]
    if not by_token:
        settings.append(f"chunk_size={draft.pick(*_CHUNKS)}")
    if by_token and at and draft.maybe(3):
        _not_a_number(draft, at, (q, k, decay, beta), v)
    names = ("initial_state", "output_final_state")
    _call(draft, kind, (q, k, v), settings, names, ("b", "h", "d", "e"))


def _not_a_number(draft: Draft, at: int, names: tuple[str, ...], v: str) -> None:
    """From a token on v is NaN, and only what comes before it is asked for. Gradients of other operands there would be 0 times NaN."""
    late = f"(torch.arange({draft.sizes['q']}, device={v}.device) >= {at})"
    for name, number in (*((name, 0.5) for name in names), (v, "float('nan')")):
        more = ", None" * (len(next(x for x in draft.inputs if x.name == name).shape) - 2)
        draft.lines.append(f"{name} = {name}.masked_fill({late}[None, :{more}], {number})")
    draft.last.append(f"o = o[:, :{at}]")


def _state_space(draft: Draft) -> None:
    x, dt = draft.new("x", ("b", "q", "h", "e")), draft.new("t", ("b", "q", "h"))
    # Its gradient is a sum of what nearly cancels out.
    rate = draft.new("a", ("h",), grad=draft.grads)
    skip, bias = (draft.new(name, ("h",)) for name in ("w", "r"))
    k, q = draft.new("k", ("b", "q", "kv", "d")), draft.new("q", ("b", "q", "kv", "d"))
    _pad(draft, (x, k, q))
    draft.lines.append(f"{rate} = -{rate}.to(W){draft.pick('.exp()', '.exp() * 4', *['.sigmoid() * 15 - 1'] * 2)}")
    # Steps from 0.001 on, or so long that a chunk forgets all before it.
    draft.lines.append(f"{dt} = {dt} {draft.pick('* 1', '* 4', '* 4', '* 3 - 4')}")
    settings = [f"chunk_size={draft.pick(*_CHUNKS)}", "dt_softplus=True", "dt_limit=(0.0, inf)"]
    settings += [f"D={skip}"] * draft.maybe() + [f"dt_bias={bias}"] * draft.maybe()
    names = ("initial_states", "return_final_states")
    _call(draft, "state_space", (x, dt, rate, k, q), settings, names, ("b", "h", "e", "d"))


def _pad(draft: Draft, names: tuple[str, ...]) -> None:
    """As transformers does it: what is of padding is 0 before the call, and its decay is not 1."""
    if draft.maybe(3):
        real = draft.new("p", ("b", "q"), draft.pick("padding", "filled"))
        draft.lines += [f"{x} = {x} * {real}[:, :, None, None].to({x}.dtype)" for x in names]


def _call(
    draft: Draft,
    kind: str,
    operands: tuple[str, ...],
    settings: list[str],
    names: tuple[str, str],
    state: tuple[str, ...],
) -> None:
    """names: of the first state and of whether the last one is given."""
    first, wants_last = names
    has_last = not draft.last and draft.maybe()
    settings.append(f"{first}={draft.new('s', state)}.to(W)" if draft.maybe() else f"{first}=None")
    called = f"{kind}({', '.join((*operands, *settings))}, {wants_last}={{}})"
    if not has_last:
        # The state space gives its result alone then.
        draft.lines.append(f"o = {called.format(False)}" + ("" if kind == "state_space" else "[0]"))
        draft.outputs.append("o")
        return
    draft.lines.append(f"o, last = {called.format(True)}")
    draft.outputs += ["o", "last"]
