"""What runs when padding was taken out of a graph: before each call, where the real tokens are; then the packed graph, or the model's own.

The model's own runs where something does not hold that the packed graph rests on (a label at padding counts, say), and where there are
fewer than two real tokens. It is compiled when it is first needed. Two compiled functions, and no `torch.cond`: both are differentiated as
any graph is, and neither is asked to give the same strides as the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor

from attn_compiler.torch_private.packed import Guards

CompiledFn = Callable[..., Any]

#: fewer are no packed batch: sizes of 0 and 1 mean other things to a compiler
LEAST_TOKENS = 2
#: compilations of one packed graph, for numbers of tokens that differ in what a compiler makes of them
MOST_CODES = 4
_STEPS_KEPT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedStep:
    """One call. fill: the share of tokens that are real. failed: what did not hold, so that padding was computed."""

    fill: float
    failed: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True, eq=False)
class Steps:
    """The last calls of one graph that were asked for their padding."""

    last: deque[UnpaddedStep] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    @property
    def are_all_padded(self) -> bool:
        """Whether none of so many calls could be packed."""
        return len(self.last) == _STEPS_KEPT and all(step.failed for step in self.last)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the real tokens of a batch are: the further inputs of a packed graph, in its order.

    tokens: int64 (T,), the place of each token among all B · S.
    rows, positions: int64 (T,), its batch row and its position there.
    begins, ends: int32 (T,), where the keys of its row begin and end among the tokens.
    starts: int64 (B + 1,), where each row begins among the tokens.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor

    @staticmethod
    def like(number: Any, rows: Any, device: torch.device) -> Batch:
        """Unfilled: of so many tokens and batch rows."""
        dtypes = {
            **dict.fromkeys(("tokens", "rows", "positions"), torch.int64),
            "begins": torch.int32,
            "ends": torch.int32,
        }
        of_tokens = {name: torch.empty(number, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        return Batch(**of_tokens, starts=torch.empty(rows + 1, dtype=torch.int64, device=device))

    @staticmethod
    def of(packed: torch.Tensor, real: torch.Tensor | None = None) -> Batch:
        """packed: bool (B, S), the tokens. real: those that are keys, bool (B, S), the last ones of each row; None: all of them.

        As long as if all tokens were packed, so that no device has to be asked: what `first` leaves out means nothing.
        """
        seqlen = packed.shape[1]
        starts = torch.nn.functional.pad(packed.sum(1).cumsum(0), (1, 0))
        tokens = torch.nonzero_static(packed.reshape(-1), size=packed.numel(), fill_value=0).view(-1)
        rows = tokens // seqlen
        bounds = starts.to(torch.int32)
        begins = bounds[:-1] if real is None else bounds[1:] - real.sum(1, dtype=torch.int32)
        return Batch(
            tokens=tokens,
            rows=rows,
            positions=tokens % seqlen,
            begins=begins[rows],
            ends=bounds[1:][rows],
            starts=starts,
        )

    def first(self, number: int) -> Batch:
        """The same of a batch of which so many tokens are real. No device is asked for anything."""
        *of_tokens, starts = self.inputs
        tokens, rows, positions, begins, ends = [x[:number] for x in of_tokens]
        return Batch(tokens=tokens, rows=rows, positions=positions, begins=begins, ends=ends, starts=starts)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.rows, self.positions, self.begins, self.ends, self.starts


@dataclass(frozen=True, kw_only=True)
class PackedCode:
    """A compiled packed graph. run: takes the model's inputs and those of `Batch`. guards: what it asks of the number of tokens."""

    run: CompiledFn
    guards: Guards


class Unpadded:
    """A compiled graph without padding, with the model's own beside.

    first: the packed graph's code. again: compiles the packed graph for a number of tokens that no code serves; None where that can't be
    done. before: see `Packed`. facts: what it tells of. original: compiles the model's own graph.
    """

    def __init__(
        self,
        *,
        first: PackedCode,
        again: Callable[[int], PackedCode | None],
        before: CompiledFn,
        facts: Sequence[str],
        original: Callable[[], CompiledFn],
        steps: Steps,
    ) -> None:
        self._codes = [first]
        self._again: Callable[[int], PackedCode | None] | None = again
        self._before = before
        self._facts = tuple(facts)
        self._compile_original = original
        self._original: CompiledFn | None = None
        self._lock = threading.Lock()
        self._steps = steps
        self._unasked = 0

    def __call__(self, *args: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in args):
            return self.original(*args)
        # Each question is a wait for the device.
        if self._steps.are_all_padded and self._unasked < _STEPS_KEPT:
            self._unasked += 1
            return self.original(*args)
        self._unasked = 0
        with torch.no_grad():
            packed, told, *real = self._before(*args)
            # Asked of the device before it is waited for: nothing runs there from then until the packed graph does.
            whole = Batch.of(packed, *real)
            number, *holds = told.tolist()
        failed = tuple(fact for fact, does in zip(self._facts, holds, strict=True) if not does)
        if number < LEAST_TOKENS:
            failed = (*failed, f"{LEAST_TOKENS} tokens are real")
        # In the caller's grad mode, which decides what is compiled.
        code = None if failed else self._code(number, args)
        if code is None and not failed:
            failed = (f"there is code for {number} tokens",)
        self._steps.last.append(UnpaddedStep(fill=number / max(packed.numel(), 1), failed=failed))
        if code is None:
            return self.original(*args)
        return code.run(*args, *whole.first(number).inputs)

    def _code(self, number: int, args: Sequence[Any]) -> PackedCode | None:
        """Code that serves so many tokens; None if there is none."""
        found = next((code for code in self._codes if code.guards.hold(number, args)), None)
        if found is not None or self._again is None:
            return found
        with self._lock:
            made = None if len(self._codes) == MOST_CODES or self._again is None else self._again(number)
            if made is None:
                self._again = None
                return None
            self._codes.append(made)
        return made if made.guards.hold(number, args) else None

    def original(self, *args: Any) -> Any:
        """Call the model's own graph."""
        with self._lock:
            if self._original is None:
                self._original = self._compile_original()
        return self._original(*args)
