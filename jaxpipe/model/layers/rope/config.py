"""Settings of rotary positions, and the rules between them."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Self

from msgspec import Struct
from msgspec.structs import fields

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.family import Positive
from jaxpipe.model.layers.moe.config import MixtureConfig, NotNegative

Scaling = Literal["llama3", "yarn", "longrope", "linear", "dynamic"]
# The settings that each scaling reads, besides `rope_factor`.
SCALINGS: dict[str, tuple[str, ...]] = {
    "llama3": ("rope_original_positions", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": (
        "rope_original_positions", "rope_beta_fast", "rope_beta_slow", "rope_truncate",
        "rope_attention_factor", "rope_mscale", "rope_mscale_all_dim",
    ),
    "longrope": (
        "rope_original_positions", "rope_short_factors", "rope_long_factors",
        "rope_attention_factor",
    ),
    "linear": (),
    "dynamic": (),
}  # fmt: skip


# The scalings that read a setting.
_USERS = {
    name: [scaling for scaling, read in SCALINGS.items() if name in read]
    for name in dict.fromkeys(name for names in SCALINGS.values() for name in names)
}


class RotaryConfig(MixtureConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder whose positions rotate queries and keys."""

    rope_theta: PositiveFloat = 500000.0  # base of the rotary wavelengths
    # which wavelengths rope_factor multiplies. llama3, yarn: long ones; linear: all; dynamic: none
    # up to max_seq_len, and only inference goes beyond it; longrope: none, since rope_short_factors
    # or rope_long_factors multiply them
    rope_scaling: Scaling = "llama3"
    rope_factor: PositiveFloat = 1.0  # multiplies wavelengths; 1: no scaling
    rope_original_positions: Positive = 8192  # original context, over which rotations are counted
    rope_low_freq_factor: PositiveFloat = 1.0  # llama3: rotations below which scaling is full
    rope_high_freq_factor: PositiveFloat = 4.0  # llama3: rotations above which there is none
    rope_beta_fast: PositiveFloat = 32.0  # yarn: rotations above which there is no scaling
    rope_beta_slow: PositiveFloat = 1.0  # yarn: rotations below which scaling is full
    rope_truncate: bool = True  # yarn: round the bounds outwards to whole pairs of dims
    # longrope: factor of each wavelength if max_seq_len is at most rope_original_positions
    rope_short_factors: tuple[PositiveFloat, ...] = ()
    # longrope: factor of each wavelength if max_seq_len is larger
    rope_long_factors: tuple[PositiveFloat, ...] = ()
    # factor on cosines and sines. 0: longrope takes sqrt(1 + ln(rope_factor) /
    # ln(rope_original_positions)), and yarn 1 + 0.1 ln(rope_factor) or, if both mscales are given,
    # (1 + 0.1 rope_mscale ln(rope_factor)) / (1 + 0.1 rope_mscale_all_dim ln(rope_factor))
    rope_attention_factor: NotNegative = 0.0
    rope_mscale: NotNegative = 0.0  # yarn: factor on 0.1 ln(rope_factor); 0: not given
    rope_mscale_all_dim: NotNegative = 0.0  # yarn: the same in the denominator; 0: not given

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it."""
        return self

    @property
    def has_positions(self) -> bool:
        """Whether the layers of a configuration from `of_kind` rotate queries and keys."""
        return True

    @property
    def rotary_size(self) -> int:
        """Number of a head's dims that rotate."""
        return self.head_size

    @property
    def rotary_scale(self) -> float:
        """Factor on the cosines and sines of all positions."""
        if self.rope_scaling not in ("yarn", "longrope"):
            return 1.0
        if self.rope_attention_factor:
            return self.rope_attention_factor
        if self.rope_scaling == "longrope":
            longer = math.log(max(self.rope_factor, 1)) / math.log(self.rope_original_positions)
            return math.sqrt(1 + longer)
        if self.rope_mscale and self.rope_mscale_all_dim:
            return self.yarn_scale(self.rope_mscale) / self.yarn_scale(self.rope_mscale_all_dim)
        return self.yarn_scale(1.0)

    @property
    def longrope_factors(self) -> tuple[float, ...]:
        """Factor of every wavelength, the same for all sequences of a model.

        transformers chooses by the longest sequence of a batch; slices, shards and cached keys of a
        sequence must agree.
        """
        is_long = self.max_seq_len > self.rope_original_positions
        return self.rope_long_factors if is_long else self.rope_short_factors

    def yarn_scale(self, mscale: float) -> float:
        """0.1 `mscale` ln(rope_factor) + 1, and 1 without scaling (Peng et al. 2023, section 3.4).

        >>> sizes = {"n_layers": 1, "d_model": 8, "vocab_size": 8, "n_heads": 1, "d_ff": 8}
        >>> RotaryConfig(**sizes, rope_scaling="yarn", rope_factor=40.0).yarn_scale(1.0)
        1.3688879454113936
        """
        return 1 + 0.1 * mscale * math.log(max(self.rope_factor, 1))

    def broken_rotary_rules(self) -> Iterator[str]:
        """Yield a sentence for every rule that the settings of rotary positions break.

        `model.head_dim`, or `model.d_model` / `model.n_heads`, must be even, and so must the share
        of it that rotates (`model.rotary_share`).

        `model.rope_high_freq_factor` must be at least `model.rope_low_freq_factor`, and
        `model.rope_beta_fast` at least `model.rope_beta_slow`.

        `model.rope_beta_fast`, and any other setting that only some `model.rope_scaling` read, must
        be left out with the others.

        `model.rope_scaling='dynamic'` needs `model.max_seq_len`, and `'yarn'` a `model.rope_theta`
        above 1.

        `model.rope_scaling='longrope'` needs `model.max_seq_len`, `model.rope_original_positions`
        above 1, and `model.rope_short_factors` and `model.rope_long_factors`: a factor for each
        pair of dims.
        """
        width = self.rotary_size
        if width % 2 or not width:
            yield (
                f"the rotated width of a head is {width} but rotary positions turn pairs: use an "
                f"even model.head_dim, or another model.rotary_share in families that have it."
            )
        bounds = ("rope_low_freq_factor", "rope_high_freq_factor")
        if self.rope_high_freq_factor < self.rope_low_freq_factor:
            yield self._wrong_order(*bounds, "must be at least")
        if self.rope_beta_fast < self.rope_beta_slow:
            yield self._wrong_order("rope_beta_slow", "rope_beta_fast", "must be at least")
        yield from self._unread_scaling()
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            yield (
                f"model.rope_theta={self.rope_theta} must exceed 1 with model.rope_scaling='yarn', "
                f"which looks wavelengths up by their logarithm: raise it."
            )
        if self.rope_scaling == "longrope":
            yield from self._unmet_by_longrope(width // 2)
        if self.rope_scaling == "dynamic" and not self.max_seq_len:
            yield (
                "model.rope_scaling='dynamic' leaves wavelengths as they are up to "
                "model.max_seq_len tokens, but model.max_seq_len=0 has no limit: give it."
            )

    def _unmet_by_longrope(self, pairs: int) -> Iterator[str]:
        """Yield a sentence for everything that `longrope` lacks for `pairs` pairs of dims."""
        for name in ("rope_short_factors", "rope_long_factors"):
            if (found := len(getattr(self, name))) != pairs:
                yield (
                    f"model.{name} has {found} factors but a head rotates {pairs} pairs of dims: "
                    f"give model.rope_scaling='longrope' one for each pair."
                )
        if not self.max_seq_len or self.rope_original_positions == 1:
            yield (
                f"model.rope_scaling='longrope' compares model.max_seq_len={self.max_seq_len} with "
                f"model.rope_original_positions={self.rope_original_positions}, of which it takes "
                f"the logarithm: give the first, and at least 2 for the second."
            )

    def _wrong_order(self, low: str, high: str, relation: str) -> str:
        return (
            f"model.{high}={getattr(self, high)} {relation} model.{low}={getattr(self, low)}: "
            f"wavelengths between them are blended."
        )

    def _unread_scaling(self) -> Iterator[str]:
        """Yield a sentence for every given setting that only other scalings read."""
        for name, kinds in _USERS.items():
            value = getattr(self, name)
            if self.rope_scaling not in kinds and value != _defaults(type(self))[name]:
                yield (
                    f"model.{name}={value!r} is of model.rope_scaling="
                    f"{' or '.join(map(repr, kinds))}, but that is {self.rope_scaling!r}: change "
                    f"it, or leave model.{name} out."
                )


@cache  # msgspec evaluates all annotations of the class
def _defaults(record: type[Struct]) -> dict[str, Any]:
    """The default of every setting of a record."""
    return {field.name: field.default for field in fields(record)}
