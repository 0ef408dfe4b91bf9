"""Options of the user: `Options`, and `split_options`, which parses torch.compile's `mode=` and `options=`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.reasons.errors import InvalidOption, UnknownOption, nearest
from attn_compiler.spec.fp8_recipe import Fp8Recipe
from attn_compiler.torch_private import inductor as torch_inductor

PREFIX = "attn."
DUMP_DIR_VARIABLE = "ATTN_COMPILER_DUMP_DIR"
CACHE_VARIABLE = "ATTN_COMPILER_CACHE_REWRITES"
TIME_VARIABLE = "ATTN_COMPILER_TIME_KERNELS"
INNER_COMPILERS = ("inductor", "aot_eager", "eager")
KEEP_ATTENTION = "keep_attention"
CHECKPOINTS = ("recompute", KEEP_ATTENTION)
PRECISIONS = ("exact", "fla")
#: Removed options, with the advice of their UnknownOption.
GONE: Mapping[str, str] = {
    "autotune": "It is gone since 0.3.0: leave it out. The tiles of our Triton kernels come from a table.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Every option of ours, checked when built (InvalidOption).

    lowering: use this one alone. A site that it refuses stays untouched, with the reasons in the report. A lowering of attention leaves
        linear attention alone, and the other way round; "untouched" holds for both.
    lowerings: consider only these, in this order.
    strict: raise any failure on our side. Otherwise it is a warning, and the failed part is compiled as the model made it.
    dump_dir: write each pass's graphs there. The environment variable ATTN_COMPILER_DUMP_DIR is its default. "" means nowhere, as in the
        variable; "." is the current directory.
    check_invariants: verify the graph between passes.
    verify: on the first call of each graph, compare every recovered mask and bias, every lowered output and the graph's outputs with the
        model's own on the real inputs, and the gradients in its first backward. VerificationMismatch if they differ. Beside
        context_parallel: masks, biases and outputs, with the attention over the whole sequence.
    inner: the compiler of the rewritten graph. "aot_eager" and "eager" are for debugging and ignore Inductor's options.
    fp8_recipe: run attention in FP8 where the recipe applies and a kernel can (fp8_recipe.py). Without it no attention runs in FP8.
    unpad: leave padding out. Only real tokens are computed, and the graph's outputs are 0 at padding (docs/unpad.md).
    share_prefix: compute once what rows of a batch share as their prompt (docs/shared_prompts.md). Outputs and gradients are the model's.
    context_parallel: each rank has a part of every sequence. Attention is that of the whole (docs/context_parallel.md).
    checkpoint: attention under gradient checkpointing. "recompute" computes it again in the backward, as everything else.
        "keep_attention" keeps its output and its logsumexp, so that its forward runs once a step (docs/checkpoints.md). Not beside
        context_parallel.
    linear_precision: of `linear_triton` in bfloat16. "exact": at most twice the error of the model's own function. "fla": faster, with
        the error of flash-linear-attention (docs/linear.md).
    cache_rewrites: keep the passes' results on disk, beside Inductor's, and repeat them in a later process instead of running the passes.
        The environment variable ATTN_COMPILER_CACHE_REWRITES=0 turns the default off.
    time_kernels: on a GPU, time several lowerings for sites without a measured row, and take the fastest (docs/choosing.md). The
        environment variable ATTN_COMPILER_TIME_KERNELS=1 turns the default on.
    """

    lowering: str | None = None
    lowerings: tuple[str, ...] | None = None
    # An option that changes no compiled code must not cost a recompilation.
    strict: bool = field(default=False, metadata={"changes_code": False})
    dump_dir: str | None = field(default=None, metadata={"changes_code": False})
    check_invariants: bool = field(default=True, metadata={"changes_code": False})
    verify: bool = field(default=False, metadata={"changes_code": False})
    inner: str = "inductor"
    fp8_recipe: Fp8Recipe | None = None
    unpad: bool = False
    share_prefix: bool = False
    context_parallel: ContextParallel | None = None
    checkpoint: str = "recompute"
    linear_precision: str = "exact"
    cache_rewrites: bool = field(default=True, metadata={"changes_code": False})
    time_kernels: bool = False

    def __post_init__(self) -> None:
        _require(isinstance(self.lowering, str | None), "lowering", "a lowering's name or None", self.lowering)
        _require(_is_names(self.lowerings), "lowerings", "a non-empty list of lowerings' names or None", self.lowerings)
        _require(isinstance(self.strict, bool), "strict", "True or False", self.strict)
        _require(isinstance(self.dump_dir, str | os.PathLike | None), "dump_dir", "a path or None", self.dump_dir)
        _require(isinstance(self.check_invariants, bool), "check_invariants", "True or False", self.check_invariants)
        _require(isinstance(self.verify, bool), "verify", "True or False", self.verify)
        _require(self.inner in INNER_COMPILERS, "inner", f"one of {', '.join(map(repr, INNER_COMPILERS))}", self.inner)
        _require(isinstance(self.fp8_recipe, Fp8Recipe | None), "fp8_recipe", "a Fp8Recipe or None", self.fp8_recipe)
        _require(isinstance(self.unpad, bool), "unpad", "True or False", self.unpad)
        _require(isinstance(self.share_prefix, bool), "share_prefix", "True or False", self.share_prefix)
        _require(
            isinstance(self.context_parallel, ContextParallel | None),
            "context_parallel",
            "a ContextParallel or None",
            self.context_parallel,
        )
        _require(
            self.checkpoint in CHECKPOINTS, "checkpoint", f"one of {', '.join(map(repr, CHECKPOINTS))}", self.checkpoint
        )
        expected = f"one of {', '.join(map(repr, PRECISIONS))}"
        _require(self.linear_precision in PRECISIONS, "linear_precision", expected, self.linear_precision)
        if self.is_context_parallel:
            # An untouched attention would attend to a part of the sequence only.
            object.__setattr__(self, "strict", True)
            for name in ("unpad", "share_prefix"):
                _require(not getattr(self, name), name, "False beside context_parallel", getattr(self, name))
            _require(not self.keeps_attention, "checkpoint", "'recompute' beside context_parallel", self.checkpoint)
        _require(isinstance(self.cache_rewrites, bool), "cache_rewrites", "True or False", self.cache_rewrites)
        _require(isinstance(self.time_kernels, bool), "time_kernels", "True or False", self.time_kernels)
        if self.lowering is not None and self.lowerings is not None:
            raise InvalidOption(option="lowerings", expected="nothing while 'lowering' is given", value=self.lowerings)
        if self.lowerings is not None:
            object.__setattr__(self, "lowerings", tuple(self.lowerings))
        if self.dump_dir is not None:
            object.__setattr__(self, "dump_dir", os.fsdecode(self.dump_dir) or None)

    @property
    def asked(self) -> tuple[str, ...] | None:
        """The lowerings that `lowering` or `lowerings` names, in order."""
        return self.lowerings if self.lowering is None else (self.lowering,)

    @property
    def is_context_parallel(self) -> bool:
        """True if several ranks share a sequence."""
        return self.context_parallel is not None and self.context_parallel.size > 1

    @property
    def packs(self) -> bool:
        """True if tokens that need not be computed are to be taken out of each batch."""
        return self.unpad or self.share_prefix

    @property
    def follows_positions(self) -> bool:
        """True if positions of a sequence are followed through the whole graph, from op to op."""
        return self.packs or self.is_context_parallel

    @property
    def keeps_attention(self) -> bool:
        """True if attention in a checkpoint runs once a step."""
        return self.checkpoint == KEEP_ATTENTION

    @property
    def sequence_group(self) -> str | None:
        """The name of the group whose ranks share a sequence; None if none do."""
        return self.context_parallel.group_name if self.context_parallel and self.is_context_parallel else None

    def digest(self) -> str:
        """Return a short hash that differs whenever two Options could lead to different code, the same in every process."""
        changing = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("changes_code", True)
        }
        return hashlib.sha256(json.dumps(changing, sort_keys=True, default=_for_json).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return all options, for JSON."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in given.items()}

    def changed(self) -> str:
        """Return the options that change code and are not the default, as JSON."""
        known = {f.name: f.default for f in dataclasses.fields(self) if f.metadata.get("changes_code", True)}
        said = {name: value for name, value in self.to_dict().items() if name in known and value != known[name]}
        return json.dumps(said, sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, ContextParallel):
        return value.to_dict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _for_json(value: Any) -> dict[str, Any]:
    """Return a nested dataclass with its class name, since classes may share fields. A mesh differs by rank, so its digest stands in."""
    if isinstance(value, ContextParallel):
        return {"class": type(value).__name__, "digest": value.digest}
    return {"class": type(value).__name__, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}


OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Options))


def split_options(
    mode: str | None, options: Options | Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ
) -> tuple[Options, dict[str, Any]]:
    """Return our options, and the config patches for Inductor: those of `mode` and Inductor's keys of `options`.

    A key that is one of ours, or starts with "attn.", is ours. torch.compile allows either `mode` or `options`; to use both, unpack
    `torch._inductor.list_mode_options(mode)` into the options. Raises UnknownOption for an unknown key, InvalidOption for a value of the
    wrong type or an unknown mode.
    """
    if isinstance(options, Options):
        defaults = Options()
        given = {name: getattr(options, name) for name in OPTION_NAMES}
        options = {name: value for name, value in given.items() if value != getattr(defaults, name)}
    if not isinstance(options, Mapping | None):
        raise InvalidOption(option="options", expected="a dict of options, or attn_compiler.Options", value=options)
    ours: dict[str, Any] = {}
    inductors: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = own_name(key)
        if name is None:
            inductors[key] = value
        elif name in ours:
            raise InvalidOption(option=key, expected=f"no second value: {name!r} is given twice", value=value)
        else:
            ours[name] = value
    if environ.get(DUMP_DIR_VARIABLE):
        ours.setdefault("dump_dir", environ[DUMP_DIR_VARIABLE])
    if environ.get(CACHE_VARIABLE) == "0":
        ours.setdefault("cache_rewrites", False)
    if environ.get(TIME_VARIABLE) == "1":
        ours.setdefault("time_kernels", True)
    return Options(**ours), torch_inductor.inductor_patches(_known_mode(mode), _known_inductor_options(inductors))


def own_name(key: str) -> str | None:
    """Return the field of Options for `key`, None if it isn't ours. Raises UnknownOption for a removed or unknown option of ours."""
    if not isinstance(key, str):
        raise UnknownOption(option=str(key), ours=OPTION_NAMES)
    name = key.removeprefix(PREFIX)
    if name in OPTION_NAMES:
        return name
    if key.startswith(PREFIX) or name in GONE:
        raise UnknownOption(option=key, ours=OPTION_NAMES, instead=GONE.get(name, ""))
    return None


def check_lowering_names(options: Options, names: Callable[[], Iterable[str]]) -> None:
    """Raise InvalidOption, naming the nearest, if the options ask for a lowering that does not exist. names: gives those that do."""
    option, asked = (
        ("lowerings", options.lowerings or ()) if options.lowering is None else ("lowering", (options.lowering,))
    )
    known = tuple(names()) if asked else ()
    for name in asked:
        if name not in known:
            close = nearest(name, known)
            hint = f" (nearest: {', '.join(map(repr, close))})" if close else ""
            raise InvalidOption(option=option, expected=f"names among {', '.join(known)}{hint}", value=name)


def _known_mode(mode: str | None) -> str:
    modes = torch_inductor.inductor_modes()
    if mode is not None and mode not in modes:
        raise InvalidOption(option="mode", expected=f"one of {', '.join(map(repr, modes))}", value=mode)
    return mode or "default"


def _known_inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    if not options:
        return options
    known = torch_inductor.inductor_option_names()
    for key, value in options.items():
        if key.replace("-", "_") not in known:
            raise UnknownOption(option=key, ours=OPTION_NAMES, inductors=tuple(sorted(known)))
        expected = torch_inductor.inductor_option_type(key.replace("-", "_"))
        if expected is not None and not isinstance(value, expected):
            raise InvalidOption(option=key, expected=f"{expected.__name__} (an option of Inductor)", value=value)
    return options


def _require(holds: bool, option: str, expected: str, value: Any) -> None:
    if not holds:
        raise InvalidOption(option=option, expected=expected, value=value)


def _is_names(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, tuple | list) and len(value) > 0 and all(isinstance(name, str) for name in value)
