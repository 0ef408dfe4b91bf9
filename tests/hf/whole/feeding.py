"""Arguments of a model's forward by their names: what its config says of sizes, and a batch and a length.

A name leaves several shapes open: the first that the model runs with is taken.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.hf.today.model import Kwargs


class NoInput(Exception):
    """An argument that no rule makes."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """length: of text. scale: of images and sounds, in their own size."""

    batch: int
    length: int
    scale: float = 1.0


#: the second is the first of these that a model takes
FIRST = Size(batch=2, length=512)
SECONDS = (Size(batch=3, length=384, scale=1.5), Size(batch=3, length=384), Size(batch=3, length=512))
#: of a model that reads numbers, and is on the CPU for it
SHORT = 8
#: shapes that are tried
_MOST = 64
#: arguments that models read numbers of
READ = frozenset({"grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "image_sizes", "feature_lens"})
_MELS = (
    "num_mel_bins", "feature_size", "n_mels", "input_feat_size", "input_dim", "input_size", "input_channels",
    "feature_projection_input_dim", "input_feat_per_channel", "mel_bins", "num_mels", "codebook_dim",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Feed:
    model: Any
    size: Size

    @property
    def configs(self) -> list[Any]:
        return list(_all(self.model.config))

    def all(self, *names: str) -> list[Any]:
        """What the model's config, or one inside of it, has under these names."""
        found = [getattr(config, name, None) for name in names for config in self.configs]
        return list(dict.fromkeys(value for value in found if isinstance(value, int) and value))

    def get(self, *names: str, default: int) -> int:
        return next(iter(self.all(*names)), default)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def integers(self, *shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.long, device=self.device)

    @property
    def length(self) -> int:
        length = self.size.length if self.device.type == "meta" else self.size.length // SHORT
        return min(length, self.get("max_position_embeddings", "n_positions", default=4096) // 2)

    def tokens(self) -> list[torch.Tensor]:
        books = self.all("num_codebooks", "num_channels", "audio_channels", "n_codes_total")
        flat = self.integers(self.size.batch, self.length, value=7)
        return (
            [flat, *(self.integers(self.size.batch, self.length, count, value=7) for count in books)]
            + [self.integers(self.size.batch, count, self.length, value=7) for count in books]
            + [self.integers(self.size.batch * count, self.length, value=7) for count in books]
        )

    def ones(self) -> torch.Tensor:
        return self.integers(self.size.batch, self.length, value=1)

    def embedded(self) -> list[torch.Tensor]:
        names = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "output_dim")
        widths = self.all(*names, "input_dim", "feature_size", "backbone_hidden_size", "input_size")
        found = [self.zeros(self.size.batch, self.length, width) for width in widths]
        if not found:
            raise NoInput("no config has a width")
        return found

    def grid(self) -> list[torch.Tensor]:
        side = 8 if self.size.scale == 1.0 else 12
        return [torch.tensor([[1, side, side]] * self.size.batch, device=self.device)]

    def patches(self) -> list[torch.Tensor]:
        """What a grid is of."""
        side = 8 if self.size.scale == 1.0 else 12
        patch = self.get("patch_size", default=14)
        channels = self.get("in_channels", "in_chans", "num_channels", default=3)
        area = channels * patch * patch
        times = [self.get("temporal_patch_size", default=1), 1]
        rows = self.size.batch * side * side
        flat = [self.zeros(rows, area * time) for time in dict.fromkeys(times)]
        return [*flat, self.zeros(rows, channels, patch, patch), self.zeros(1, rows, channels, patch, patch)]

    def strips(self) -> list[torch.Tensor]:
        """Images of 8 by 8 patches, as rows of them."""
        patch = self.get("patch_size", default=14)
        shape = (3, patch, patch * 64)
        return [self.zeros(self.size.batch, *shape), self.zeros(1, *shape[:2], shape[2] * self.size.batch)]

    def images(self) -> list[torch.Tensor]:
        found = []
        for high, wide in self._image_sizes():
            channels = self.get("num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
            image = (channels, high, wide)
            frames = self.get("num_frames", "frames_per_clip", "n_frames", default=4)
            found += [self.zeros(self.size.batch, *image), self.zeros(self.size.batch, frames, *image)]
            found += [self.zeros(self.size.batch, 2, *image), self.zeros(self.size.batch, channels, frames, high, wide)]
            found += [self.zeros(self.size.batch, 1, *image), self.zeros(self.size.batch, 3, high, wide)]
            found += [self.zeros(self.size.batch, 1, 4, *image)]
        patch, counted = self.get("patch_size", default=14), self.get("num_patches", default=256)
        return [*found, self.zeros(self.size.batch, counted, 3 * patch * patch)]

    def _image_sizes(self) -> list[tuple[int, int]]:
        names = ("image_size", "img_size", "crop_size", "input_size")
        given = [value for name in names for config in self.configs if (value := getattr(config, name, None))]
        pairs = [_pair(size) for size in [*given, 224, 512]]
        sizes = [(int(high * self.size.scale), int(wide * self.size.scale)) for high, wide in pairs]
        return list(dict.fromkeys(sizes))[:3]

    def features(self) -> list[torch.Tensor]:
        """Frames of a spectrogram: as many as an encoder has places for, or some."""
        places = [2 * count for count in self.all("max_source_positions") if count < 4096]
        lengths = [int(256 * self.size.scale), *places, *self.all("max_length", "spec_size"), 3000]
        mels = list(dict.fromkeys([*self.all(*_MELS), 80, 128, 160, 320, 560]))
        batch = self.size.batch
        shapes = [
            [(batch, length, mel), (batch, mel, length), (batch, 1, length, mel)] for length in lengths for mel in mels
        ]
        return [self.zeros(*shape) for shape in itertools.chain(*shapes)]

    def waves(self) -> list[torch.Tensor]:
        length = int(16_000 * self.size.scale)
        return [self.zeros(self.size.batch, length), self.zeros(self.size.batch, 1, length), *self.features()]

    def series(self) -> list[torch.Tensor]:
        length = self.get("context_length", default=64)
        channels = self.get("num_input_channels", "input_size", default=1)
        lagged = length + max(next((found for c in self.configs if (found := getattr(c, "lags_sequence", None))), [0]))
        return [
            self.zeros(self.size.batch, length, channels),
            *(self.zeros(self.size.batch, n) for n in (length, lagged)),
        ]

    def times(self, *, past: bool) -> list[torch.Tensor]:
        """Features of times, beside a series with lags."""
        length = self.get("prediction_length", default=16)
        return [self.zeros(self.size.batch, self.series()[-1].shape[1] if past else length, 1)]


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of an image, however a config has them."""
    if isinstance(size, Mapping):
        size = tuple(size.values())
    numbers = tuple(size)[-2:] if isinstance(size, (list, tuple)) else (size,)
    return numbers[0], numbers[-1]


def _all(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _all(value)


MADE: Mapping[str, Callable[[Feed], Sequence[Any]]] = {
    "input_ids": Feed.tokens,
    "decoder_input_ids": Feed.tokens,
    "attention_mask": lambda feed: [feed.ones()],
    "inputs_embeds": Feed.embedded,
    "hidden_states": Feed.embedded,
    "pixel_values": Feed.images,
    "pixel_values_videos": Feed.images,
    "input_features": Feed.features,
    "input_values": Feed.waves,
    "past_values": Feed.series,
    "bbox": lambda feed: [feed.integers(feed.size.batch, feed.length, 4)],
    "encoder_hidden_states": Feed.embedded,
    "flattened_patches": lambda feed: [feed.zeros(feed.size.batch, 256, 770)],
    "audio_mel": Feed.features,
    "inputs": Feed.embedded,
    "noise_embeds": Feed.embedded,
    "task_inputs": Feed.tokens,
    "visual_feats": lambda feed: [feed.zeros(feed.size.batch, 36, feed.get("visual_feat_dim", default=2048))],
    "visual_pos": lambda feed: [feed.zeros(feed.size.batch, 36, 4)],
    "aspect_ratio_ids": lambda feed: [feed.integers(feed.size.batch, 1, value=1)],
    "aspect_ratio_mask": lambda feed: [feed.integers(feed.size.batch, 1, 4, value=1)],
    "cross_attention_states": Feed.embedded,
    "past_time_features": lambda feed: feed.times(past=True),
    "past_observed_mask": lambda feed: [feed.series()[-1] + 1],
    "future_values": lambda feed: [feed.times(past=False)[0][..., 0]],
    "future_time_features": lambda feed: feed.times(past=False),
    "pixel_position_ids": lambda feed: [feed.integers(feed.size.batch, 256, 2)],
    "target_sizes": lambda feed: [feed.integers(feed.size.batch, 2, value=8)],
    "feature_lens": lambda feed: [feed.integers(feed.size.batch, value=200)],
    "aftercnn_lens": lambda feed: [feed.integers(feed.size.batch, value=100)],
    "grid_thw": Feed.grid,
    "image_grid_thw": Feed.grid,
}
#: not required, and still what people give
_GIVEN = (
    "decoder_input_ids", "bbox", "input_ids", "pixel_values", "grid_thw", "image_grid_thw", "flattened_patches",
    "visual_feats", "visual_pos", "cross_attention_states", "target_sizes", "future_values", "future_time_features",
    "pixel_position_ids",
)  # fmt: skip
#: marks of what is no padding, as long as the sound or the text
_MARKS = ("input_features_mask", "audio_mel_mask", "mask")


def choices(model: nn.Module, size: Size, *, padded: bool = False) -> Iterator[Kwargs]:
    """Arguments that have no default and the model's main one, in each shape that they may have. padded: with a padding mask."""
    feed = Feed(model=model, size=size)
    taken = inspect.signature(model.forward).parameters
    mains = model.main_input_name if isinstance(model.main_input_name, (list, tuple)) else [model.main_input_name]
    needed = [name for name, one in taken.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    crossed = ["encoder_hidden_states"] if getattr(model.config, "add_cross_attention", False) else []
    wanted = list(dict.fromkeys([*needed, *(name for name in (*mains, *crossed) if name in taken)]))
    for more in ([], [name for name in _GIVEN if name in taken and name not in wanted]):
        names = [*wanted, *more]
        if not names or (more == [] and names != wanted):
            continue
        if "input_ids" in names and "inputs_embeds" in names:
            names.remove("inputs_embeds")
        marks = [name for name in _MARKS if name in taken]
        names = [name for name in names if name not in marks]
        made = [_made(feed, name, names) for name in names]
        for values in itertools.islice(itertools.product(*made), _MOST):
            given = dict(zip(names, values, strict=True))
            for mark in marks:
                longest = max(next(iter(given.values())).shape[1:])
                given[mark] = torch.ones(size.batch, longest, dtype=torch.bool, device=feed.device)
            if padded and "attention_mask" in taken and {"input_ids", "inputs_embeds"} & given.keys():
                given["attention_mask"] = feed.ones()
            if "use_cache" in taken:
                given["use_cache"] = False
            yield given


def _made(feed: Feed, name: str, names: Sequence[str]) -> Sequence[Any]:
    if name not in MADE:
        raise NoInput(f"no rule makes {name}")
    if name in ("hidden_states", "pixel_values") and {"grid_thw", "image_grid_thw"} & set(names):
        return feed.patches()
    if name == "pixel_values" and "target_sizes" in names:
        return feed.strips()
    if name == "input_features" and "feature_lens" in names:
        return [feed.zeros(feed.get(*_MELS, default=128), 200 * feed.size.batch)]
    return MADE[name](feed)
