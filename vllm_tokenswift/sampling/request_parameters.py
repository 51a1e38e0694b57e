"""Per-request parameters of TokenSwift: read from ``SamplingParams.extra_args``.

Over HTTP they travel as ``vllm_xargs``. Keys we do not know are somebody else's
and stay untouched, unless they look like a misspelling of one of ours.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Protocol

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

DEFAULT_WINDOW = 1024
"""Tokens; the paper's W. Long, because a window shorter than a loop cannot break it."""

_NAMES = ("penalty_theta", "penalty_window", "eta_epsilon", "eta_alpha", "tokenswift")


class PenaltyDefaults(Protocol):
    """What a request that names no penalty gets: TokenSwift's options have both."""

    @property
    def penalty_theta(self) -> float: ...

    @property
    def penalty_window(self) -> int: ...


@dataclass(frozen=True)
class PlainDefaults:
    """Defaults on a server without speculation: no penalty, the paper's window."""

    penalty_theta: float = 1.0
    penalty_window: int = DEFAULT_WINDOW

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> PlainDefaults:
        """The defaults in ``additional_config["tokenswift"]``, which speculation reads too.

        Raises:
            ValueError: one of them is not allowed.
        """
        config = vllm_config.additional_config
        given = config.get("tokenswift", {}) if isinstance(config, dict) else {}
        return cls(
            _number("penalty_theta", given.get("penalty_theta", 1.0), 1.0, 10.0),
            _whole("penalty_window", given.get("penalty_window", DEFAULT_WINDOW)),
        )


@dataclass(frozen=True)
class RequestOptions:
    """TokenSwift's parameters of one request.

    Args:
        penalty_theta: the paper's theta, 1 to 10; 1 switches the windowed penalty off.
        penalty_window: the paper's W in tokens, at least 1.
        eta_epsilon: eta-sampling's epsilon, above 0 and below 1; None switches it off.
        eta_alpha: its alpha, above 0 and at most 1 (so that the likeliest token always
            stays: exp(-entropy) is never above its probability); sqrt(epsilon) unless given.
        tokenswift: whether the request may be speculated for.
    """

    penalty_theta: float
    penalty_window: int
    eta_epsilon: float | None
    eta_alpha: float | None
    tokenswift: bool

    @classmethod
    def from_sampling_params(
        cls, sampling_params: SamplingParams, defaults: PenaltyDefaults
    ) -> RequestOptions:
        """Reads and checks a request's ``extra_args``.

        Args:
            sampling_params: the request's.
            defaults: the penalty of requests that name none.

        Raises:
            ValueError: names the parameter that is wrong, or misspelled.
        """
        given = sampling_params.extra_args or {}
        _refuse_misspelled(given)
        theta = _number("penalty_theta", given.get("penalty_theta", defaults.penalty_theta), 1, 10)
        window = _whole("penalty_window", given.get("penalty_window", defaults.penalty_window))
        epsilon = alpha = None
        if "eta_epsilon" in given:
            epsilon = _number("eta_epsilon", given["eta_epsilon"], 0, 1, open_ends=(True, True))
            alpha = math.sqrt(epsilon)
        if "eta_alpha" in given:
            if epsilon is None:
                raise ValueError(
                    "eta_alpha is given without eta_epsilon: eta-sampling needs eta_epsilon, "
                    "a number above 0 and below 1"
                )
            alpha = _number("eta_alpha", given["eta_alpha"], 0, 1, open_ends=(True, False))
        # JSON true arrives as 1 through vllm_xargs, which knows no booleans.
        tokenswift = given.get("tokenswift", True)
        if tokenswift not in (True, False):
            raise ValueError(f"tokenswift is {tokenswift!r}: allowed are true and false")
        return cls(theta, window, epsilon, alpha, bool(tokenswift))


def validate(sampling_params: SamplingParams) -> None:
    """Refuses a request that TokenSwift cannot decode.

    Raises:
        ValueError: says what is wrong, or not supported.
    """
    RequestOptions.from_sampling_params(sampling_params, PlainDefaults())
    if sampling_params.thinking_token_budget is not None:
        raise ValueError(
            f"thinking_token_budget is {sampling_params.thinking_token_budget}: TokenSwift does "
            "not support thinking budgets; leave it out, or serve without TokenSwift"
        )


def _refuse_misspelled(given: dict[str, object]) -> None:
    for name in given:
        if name in _NAMES:
            continue
        # An abbreviation (eta_eps) shares less than a slip of the finger does.
        nearest = [known for known in _NAMES if "_" in name and known.startswith(name)]
        nearest = nearest or difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.8)
        if nearest:
            raise ValueError(f"{name} is not a parameter of TokenSwift: did you mean {nearest[0]}?")


def _number(
    name: str,
    value: object,
    low: float,
    high: float,
    open_ends: tuple[bool, bool] = (False, False),
) -> float:
    number = _as_float(value)
    above = number > low if open_ends[0] else number >= low
    below = number < high if open_ends[1] else number <= high
    if above and below:
        return number
    lower = f"above {low:g}" if open_ends[0] else f"at least {low:g}"
    upper = f"below {high:g}" if open_ends[1] else f"at most {high:g}"
    raise ValueError(f"{name} is {value!r}: it must be a number, {lower} and {upper}")


def _whole(name: str, value: object) -> int:
    # A whole number may arrive as 1024.0 through JSON.
    number = _as_float(value)
    if number.is_integer() and number >= 1:
        return int(number)
    raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")


def _as_float(value: object) -> float:
    """The number, or NaN (which no bound admits) for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan
