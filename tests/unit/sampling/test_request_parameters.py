"""Per-request parameters: what is allowed, and what is said about the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from vllm_tokenswift.sampling.request_parameters import PlainDefaults, RequestOptions, validate


def parse(**extra: object) -> RequestOptions:
    params = SamplingParams(extra_args=extra)
    return RequestOptions.from_sampling_params(params, PlainDefaults(1.2, 512))


def test_a_request_that_says_nothing_gets_the_defaults() -> None:
    assert parse() == RequestOptions(1.2, 512, None, None, True)
    none_at_all = RequestOptions.from_sampling_params(SamplingParams(), PlainDefaults())
    assert none_at_all == RequestOptions(1.0, 1024, None, None, True)


def test_what_a_request_says_wins() -> None:
    found = parse(penalty_theta=1, penalty_window=8.0, eta_epsilon=0.04, tokenswift=0)
    assert found == RequestOptions(1.0, 8, 0.04, 0.2, False)
    assert parse(eta_epsilon=0.04, eta_alpha=0.5).eta_alpha == 0.5


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("penalty_theta", 0.9, "at least 1 and at most 10"),
        ("penalty_theta", 10.5, "at least 1 and at most 10"),
        ("penalty_theta", "1.2", "must be a number"),
        ("penalty_theta", True, "must be a number"),
        ("penalty_theta", float("nan"), "must be a number"),
        ("penalty_window", 0, "a whole number, at least 1"),
        ("penalty_window", 2.5, "a whole number, at least 1"),
        ("penalty_window", float("inf"), "a whole number, at least 1"),
        ("eta_epsilon", 0, "above 0 and below 1"),
        ("eta_epsilon", 1, "above 0 and below 1"),
        ("tokenswift", "yes", "allowed are true and false"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=name) as error:
        parse(**{name: value})
    assert allowed in str(error.value)
    assert repr(value) in str(error.value)


def test_alpha_is_bounded_and_needs_epsilon() -> None:
    with pytest.raises(ValueError, match=r"eta_alpha is 1\.5: .* above 0 and at most 1"):
        parse(eta_epsilon=0.1, eta_alpha=1.5)
    with pytest.raises(ValueError, match="without eta_epsilon"):
        parse(eta_alpha=0.5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("penalty_thetta", "penalty_theta"),
        ("penalty_windows", "penalty_window"),
        ("eta_eps", "eta_epsilon"),
        ("token_swift", "tokenswift"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(written: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{written} is not .* did you mean {meant}"):
        parse(**{written: 1})


@pytest.mark.parametrize("name", ["session_id", "penalty_alpha", "eta", "target_token", "top_a"])
def test_other_peoples_arguments_are_left_alone(name: str) -> None:
    assert parse(**{name: "anything"}) == parse()


def test_defaults_of_a_plain_server_come_from_the_same_place_as_the_options() -> None:
    config = SimpleNamespace(additional_config={"tokenswift": {"penalty_theta": 1.1}})
    assert PlainDefaults.from_vllm_config(config) == PlainDefaults(1.1, 1024)  # type: ignore[arg-type]
    config = SimpleNamespace(additional_config={})
    assert PlainDefaults.from_vllm_config(config) == PlainDefaults(1.0, 1024)  # type: ignore[arg-type]


def test_validation_refuses_thinking_budgets_and_bad_values() -> None:
    validate(SamplingParams(min_p=0.1, logit_bias={1: 2.0}))
    with pytest.raises(ValueError, match="thinking_token_budget is 5"):
        validate(SamplingParams(thinking_token_budget=5))
    with pytest.raises(ValueError, match="penalty_theta is 0"):
        validate(SamplingParams(extra_args={"penalty_theta": 0}))
