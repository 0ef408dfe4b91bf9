"""The run time of unpadding: find the real tokens before each call, then run the packed graph, or the padded one.

The padded graph runs if a condition of the packed graph does not hold (a label at padding counts, for example), or if there are fewer than
two real tokens. It also runs, without a wait, if earlier batches had little padding. It is compiled when it is first needed. These are two
compiled functions, and no `torch.cond`: both are differentiated as any graph is, and their strides may differ.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

from attn_compiler.passes.unpad.batches_before import BatchesBefore
from attn_compiler.reporting.facts import LITTLE_SAVED, STEPS_KEPT, Steps, UnpaddedStep
from attn_compiler.torch_private.packed import Guards

CompiledFn = Callable[..., Any]

#: the least tokens of a packed batch: a compiler specialises sizes of 0 and 1
LEAST_TOKENS = 2
#: the most compilations of one packed graph, for numbers of tokens with different guards
MOST_CODES = 4
#: the most sizes of batches that are known to be too small
MOST_SIZES = 256


#: lengths between a power of two and the next one: 1.6% of the tokens are padding on average
_STEPS_PER_OCTAVE = 32


def in_steps(number: int) -> int:
    """Round the number of tokens up to one of a few lengths."""
    step = max(1, (1 << max(number - 1, 1).bit_length() - 1) // _STEPS_PER_OCTAVE)
    return -(-number // step) * step


@dataclass(frozen=True)
class Batch:
    """Places of the real tokens of a batch: the further inputs of a packed graph, in its order.

    tokens: int64 (T,), the index of each token among all B · S.
    rows, positions: int64 (T,), its batch row and its position there.
    begins, ends: int32 (T,), where the keys of its row begin and end among the tokens.
    starts: int64 (B + 1,), where each row begins among the tokens.

    Where rows share tokens, `begins` and `ends` are places in `keys`, and `begins` is (W, T), for each window.
    keys: int64 (B · S,), the token that each key of each row is. places: int64 (B · S,), the token that stands for each position.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    keys: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @staticmethod
    def like(number: Any, rows: Any, device: torch.device, *, positions: Any = None, windows: int = 1) -> Batch:
        """Allocate a batch of so many tokens and rows, unfilled. positions: of the whole batch, if rows share tokens."""
        dtypes = {
            **dict.fromkeys(("tokens", "rows", "positions"), torch.int64),
            "begins": torch.int32,
            "ends": torch.int32,
        }
        of_tokens = {name: torch.empty(number, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        starts = torch.empty(rows + 1, dtype=torch.int64, device=device)
        if positions is None:
            return Batch(**of_tokens, starts=starts)
        of_tokens["begins"] = torch.empty((windows, number), dtype=torch.int32, device=device)
        keys, places = (torch.empty(positions, dtype=torch.int64, device=device) for _ in range(2))
        return Batch(**of_tokens, starts=starts, keys=keys, places=places)

    @staticmethod
    def from_mask(packed: torch.Tensor, real: torch.Tensor | None = None) -> Batch:
        """Find the tokens. packed: bool (B, S), the tokens. real: bool (B, S), the tokens that are keys, last in each row; None: all.

        It is as long as if all positions were packed, so that no device has to be asked: behind the tokens stand all other positions, in
        order. These are keys of no query, and see no key.
        """
        batch, seqlen = packed.shape
        within = packed.cumsum(1)
        starts = torch.nn.functional.pad(within[:, -1], (1, 0)).cumsum(0)
        flat = torch.arange(batch * seqlen, device=packed.device)
        among = (within + starts[:-1, None]).reshape(-1)
        place = torch.where(packed.reshape(-1), among - 1, starts[-1] + flat - among)
        # A permutation, so each index is written once.
        tokens = torch.empty_like(flat).scatter(0, place, flat)
        rows = tokens // seqlen
        bounds = starts.to(torch.int32)
        begins = bounds[:-1] if real is None else bounds[1:] - real.sum(1, dtype=torch.int32)
        is_token = flat < starts[-1]
        return Batch(
            tokens=tokens,
            rows=rows,
            positions=tokens % seqlen,
            begins=torch.where(is_token, begins[rows], bounds[-1]),
            ends=torch.where(is_token, bounds[1:][rows], bounds[-1]),
            starts=starts,
        )

    def first(self, number: int) -> Batch:
        """Return the first `number` entries: all tokens and perhaps some padding behind them. No device is asked."""
        names = ("tokens", "rows", "positions", "begins", "ends")
        return dataclasses.replace(self, **{name: getattr(self, name)[..., :number] for name in names})

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        given = (self.tokens, self.rows, self.positions, self.begins, self.ends, self.starts, self.keys, self.places)
        return tuple(x for x in given if x is not None)


#: what leaving padding out takes on one thread of a CPU, as multiply-adds: for each call, and for each attention and each of its rows
_OF_CALL, _OF_SITE, _OF_ROW = 1.5e7, 5e6, 6e5
#: the share of a token's work that it takes to take the token out and to put it back
_OF_TOKEN = 1 / 32


@dataclass(frozen=True, kw_only=True)
class PackedWork:
    """The work of one call on a CPU, as multiply-adds.

    products: with weights, for one token. pairs: of attention, for one token and one key. sites: the number of attentions.
    """

    products: int
    pairs: int
    sites: int

    def is_saved(self, number: int, positions: int, rows: int) -> bool:
        """Return whether it is faster to compute so many tokens than so many positions of so many rows."""
        spent = _OF_CALL + self.sites * (_OF_SITE + _OF_ROW * rows)
        of_token = self.products + self.pairs * positions / max(rows, 1)
        return (positions - number * (1 + _OF_TOKEN)) * of_token > spent * torch.get_num_threads()


@dataclass(frozen=True, kw_only=True)
class PackedCode:
    """A compiled packed graph. run: takes the model's inputs and those of `Batch`. guards: on the number of tokens."""

    run: CompiledFn
    guards: Guards


class Unpadded:
    """A compiled graph without padding, with the padded graph beside.

    first: the packed graph's code. again: compiles the packed graph for a number of tokens that no code serves; None if it can't. before:
    returns int64, the number of tokens and then 1 for each fact that holds, bool (B, S), the tokens, and what `places` takes besides these
    to make a `Batch`, which is made only for batches that are packed. facts: the names of these facts.
    original: compiles the padded graph. work: of a call; None: batches are packed however little that saves. sizes: the part of a call's
    inputs that its numbers of rows and positions depend on. has_steps: numbers of tokens are rounded up with padding, so that few occur.
    are_awaited: the host has to wait for the results of `before`, as on a GPU.
    """

    def __init__(
        self,
        *,
        first: PackedCode,
        again: Callable[[int], PackedCode | None],
        before: CompiledFn,
        places: Callable[..., Batch],
        facts: Sequence[str],
        original: Callable[[], CompiledFn],
        steps: Steps,
        work: PackedWork | None = None,
        sizes: Callable[[Sequence[Any]], Hashable] = lambda args: None,
        has_steps: bool = False,
        are_awaited: bool = False,
    ) -> None:
        self._codes = [first]
        self._again: Callable[[int], PackedCode | None] | None = again
        self._before, self._places = before, places
        self._facts = tuple(facts)
        self._compile_original = original
        self._original: CompiledFn | None = None
        self._lock = threading.Lock()
        self._steps = steps
        self._work, self._sizes = work, sizes
        self._too_small: set[Hashable] = set()
        self._has_steps = has_steps
        self._batches = BatchesBefore(steps=steps, read=self._read, are_awaited=are_awaited)
        self._unasked = 0

    def __call__(self, *args: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in args):
            return self.original(*args)
        # Each of these reads waits for the device.
        if self._steps.are_all_padded and self._unasked < STEPS_KEPT:
            self._unasked += 1
            return self.original(*args)
        self._unasked = 0
        sizes = None if self._work is None else self._sizes(args)
        if sizes in self._too_small:
            return self.original(*args)
        if self._batches.are_better_padded():
            return self._unawaited(*args)
        # On a GPU, the tokens' places are computed before the wait: the device is idle from then until the packed graph runs.
        told, tokens, *found = self._before(*args)
        step = self._weighed(self._read(told.tolist(), tokens.numel()), len(tokens), sizes)
        length = self._length(step.number, step.positions)
        # In the caller's grad mode, which decides on the compiled code.
        code = None if step.failed else self._code(length, args)
        if code is None and not step.failed:
            step = dataclasses.replace(step, failed=(f"there is code for {length} tokens",))
        self._batches.add(step)
        if code is None:
            return self.original(*args)
        return code.run(*args, length, *self._places(tokens, *found).first(length).inputs)

    def _unawaited(self, *args: Any) -> Any:
        """Run the padded graph, and ask for the batch's numbers while it runs, to predict later ones."""
        given = self.original(*args)
        if not self._batches.are_enough_under_way:
            told, tokens, *_ = self._before(*args)
            self._batches.send(told, tokens.numel())
        return given

    def _length(self, number: int, positions: int) -> int:
        """Return the length of the packed graph's inputs, for so many tokens of so many positions."""
        return min(in_steps(number), positions) if self._has_steps else number

    def _read(self, numbers: Sequence[int], positions: int) -> UnpaddedStep:
        """Make a step. numbers: results of `before` for a batch of so many positions."""
        number, *holds = numbers
        groups = holds.pop() if len(holds) > len(self._facts) else None
        failed = tuple(fact for fact, does in zip(self._facts, holds, strict=True) if not does)
        if number < LEAST_TOKENS:
            failed = (*failed, f"{LEAST_TOKENS} tokens are real")
        return UnpaddedStep(number=number, positions=positions, groups=groups, failed=failed)

    def _weighed(self, step: UnpaddedStep, rows: int, sizes: Hashable) -> UnpaddedStep:
        """Return the step, failed where packing is no faster. Batches of sizes that never gain are not asked again."""
        if self._work is None or step.failed:
            return step
        if self._work.is_saved(step.number, step.positions, rows):
            return step
        if not self._work.is_saved(LEAST_TOKENS, step.positions, rows) and len(self._too_small) < MOST_SIZES:
            self._too_small.add(sizes)
        return dataclasses.replace(step, failed=(LITTLE_SAVED,))

    def _code(self, number: int, args: Sequence[Any]) -> PackedCode | None:
        """Return code that serves so many tokens; None if there is none."""
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
        """Call the padded graph."""
        with self._lock:
            if self._original is None:
                self._original = self._compile_original()
        return self._original(*args)
