"""Rope settings of a config.json → RopeConfig: old and new spellings, unknown variants refused.

Three spellings are read: `rope_scaling` with `type`, the same with `rope_type`, and `rope_parameters`,
which also holds `rope_theta`.
"""

from collections.abc import Mapping

from kvatlas.models.errors import ModelError, ModelErrorReason
from worker.model.rope import RopeConfig, yarn_attention_factor
from worker.model.values import Values

_NAMES = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", _ORIGINAL}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            _ORIGINAL,
        }
    ),
}


def read_rope(values: Values) -> tuple[RopeConfig, int]:
    """The resolved variant, and how many positions the model is made for."""
    trained = values.integer("max_position_embeddings")
    scaling = _scaling(values)
    theta = scaling.number("rope_theta", values.number("rope_theta", 10000.0))
    match _variant(scaling):
        case "linear":
            factor = scaling.number("factor")
            return RopeConfig("linear", theta, factor), int(trained * factor)
        case "dynamic":
            # The trained context is max_position_embeddings here, whatever else the file says.
            factor = scaling.number("factor")
            return RopeConfig("dynamic", theta, factor, trained), int(trained * factor)
        case "llama3":
            return _llama3(scaling, theta, _original_context(values, scaling, trained)), trained
        case "yarn":
            rope = _yarn(scaling, theta, _original_context(values, scaling, trained), trained)
            return rope, max(trained, int(rope.original_context * rope.factor))
    return RopeConfig("default", theta), trained


def _scaling(values: Values) -> Values:
    for key in ("rope_scaling", "rope_parameters"):
        found = values.raw.get(key)
        if isinstance(found, Mapping) and found:
            return Values(found, f"{values.where}: {key}")
        if found not in (None, {}):
            raise values.invalid(key, "an object")
    return Values({}, values.where)


def _variant(scaling: Values) -> str:
    variant = scaling.raw.get("rope_type", scaling.raw.get("type", "default"))
    known = _KEYS.get(variant) if isinstance(variant, str) else None
    if known is None:
        raise _unsupported(scaling, f"rope type {variant!r}")
    for key, value in scaling.raw.items():
        if value is not None and key not in known | _NAMES:
            raise _unsupported(scaling, f"{key} of rope type {variant!r}")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(scaling, f"partial_rotary_factor {scaling.raw['partial_rotary_factor']}")
    return str(variant)


def _unsupported(scaling: Values, what: str) -> ModelError:
    return ModelError(ModelErrorReason.UNSUPPORTED_ROPE, f"{scaling.where}: {what} is not supported")


def _original_context(values: Values, scaling: Values, trained: int) -> int:
    for source in (values, scaling):
        if _ORIGINAL in source:
            return source.integer(_ORIGINAL)
    return trained


def _llama3(scaling: Values, theta: float, original: int) -> RopeConfig:
    return RopeConfig(
        "llama3",
        theta,
        scaling.number("factor"),
        original,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
    )


def _yarn(scaling: Values, theta: float, original: int, trained: int) -> RopeConfig:
    factor = scaling.number("factor", trained / original)
    mscale, mscale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        attention_factor=scaling.number(
            "attention_factor", yarn_attention_factor(factor, mscale, mscale_all)
        ),
        truncate=scaling.flag("truncate", True),
    )
