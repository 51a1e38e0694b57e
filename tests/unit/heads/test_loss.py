from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_tokenswift.heads.loss import TOP, chunked_cross_entropy


def _problem(rows: int, vocab: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(rows, 8, generator=generator)
    labels = torch.randint(vocab, (rows,), generator=generator)
    return read, labels, torch.randn(vocab, 8, generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_loss_and_gradient_are_those_of_the_whole_cross_entropy(chunk: int) -> None:
    read, labels, lm_head = _problem(20)
    read.requires_grad_()
    whole = F.cross_entropy(read @ lm_head.T, labels)
    whole.backward()
    result = chunked_cross_entropy(read.detach(), labels, lm_head, chunk=chunk, scale=1 / 20)
    torch.testing.assert_close(result.loss.float() / 20, whole.detach())
    torch.testing.assert_close(result.grad, read.grad)


def test_accuracy_counts_the_label_among_the_best_guesses() -> None:
    read, labels, lm_head = _problem(200)
    ranks = (read @ lm_head.T).argsort(dim=-1, descending=True)
    expected = [int((ranks[:, : n + 1] == labels[:, None]).any(1).sum()) for n in range(TOP)]
    result = chunked_cross_entropy(read, labels, lm_head, chunk=32, scale=None)
    assert result.hits.tolist() == expected
    assert result.grad is None
    assert result.rows == 200


class _LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_grows_with_rows_times_vocabulary() -> None:
    read, labels, lm_head = _problem(rows=400, vocab=1000)
    with _LargestTensor() as seen:
        chunked_cross_entropy(read, labels, lm_head, chunk=16, scale=1.0)
    assert seen.largest == 16 * 1000
