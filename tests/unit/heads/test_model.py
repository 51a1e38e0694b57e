from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_tokenswift.heads.model import DraftHeads


def _filled(form: str) -> DraftHeads:
    torch.manual_seed(0)
    heads = DraftHeads(form, num_heads=3, hidden_size=16, eps=1e-5)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def test_the_linear_form_is_equation_1_of_the_paper() -> None:
    heads, h0 = _filled("linear"), torch.randn(5, 16)
    f1, f2, f3 = (layer.linear.weight for layer in heads.layers)
    h1 = h0 @ f1.T + h0
    h2 = h1 @ f2.T + h1
    h3 = h2 @ f3.T + h2
    assert heads.reads == "post_norm"
    for read, expected in zip(heads(h0), (h1, h2, h3), strict=True):
        torch.testing.assert_close(read, expected)


def test_the_released_form_norms_before_the_linear_layer_and_before_the_lm_head() -> None:
    heads, hidden = _filled("released"), torch.randn(5, 16)
    assert heads.reads == "pre_norm"
    for layer, read in zip(heads.layers, heads(hidden), strict=True):
        normed = F.rms_norm(hidden, (16,), layer.input_layernorm.weight, eps=1e-5)
        hidden = hidden + normed @ layer.linear.weight.T
        expected = F.rms_norm(hidden, (16,), layer.post_layernorm.weight, eps=1e-5)
        torch.testing.assert_close(read, expected)


def test_the_sequential_form_also_reads_the_token_before_the_one_it_predicts() -> None:
    heads, hidden, embedded = _filled("sequential"), torch.randn(5, 16), torch.randn(3, 5, 16)
    assert heads.reads == "pre_norm"
    assert heads.is_sequential
    for layer, token, read in zip(
        heads.layers, embedded, heads(hidden, list(embedded)), strict=True
    ):
        both = torch.cat(
            [
                F.rms_norm(hidden, (16,), layer.input_layernorm.weight, eps=1e-5),
                F.rms_norm(token, (16,), layer.token_layernorm.weight, eps=1e-5),
            ],
            dim=1,
        )
        assert layer.up.weight.shape == (32, 32)
        hidden = hidden + F.silu(both @ layer.up.weight.T) @ layer.down.weight.T
        expected = F.rms_norm(hidden, (16,), layer.post_layernorm.weight, eps=1e-5)
        torch.testing.assert_close(read, expected)


@pytest.mark.parametrize("form", ["linear", "released", "sequential"])
def test_new_heads_start_from_what_the_hidden_state_says(form: str) -> None:
    heads, hidden = DraftHeads(form, 2, 16, eps=1e-5), torch.randn(3, 16)
    expected = hidden if form == "linear" else F.rms_norm(hidden, (16,), eps=1e-5)
    for read in heads(hidden, [torch.randn(3, 16)] * 2):
        torch.testing.assert_close(read, expected)


@pytest.mark.parametrize("form", ["linear", "released", "sequential"])
def test_bfloat16_heads_take_and_give_bfloat16(form: str) -> None:
    heads = _filled(form).to(torch.bfloat16)
    hidden = torch.randn(2, 16).bfloat16()
    assert all(read.dtype == torch.bfloat16 for read in heads(hidden, [hidden] * 3))


def test_no_heads_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads is 0"):
        DraftHeads("linear", 0, 16, eps=1e-5)
