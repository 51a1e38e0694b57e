"""Windows that hold the history's end and a path, against one row at a time."""

import torch

from vllm_tokenswift.cuda.sampling.penalty_kernel import (
    penalise_windows,
    penalise_windows_reference,
)
from vllm_tokenswift.cuda.sampling.row_parameters import RowWindows


def penalty_case(device: torch.device) -> tuple[RowWindows[torch.Tensor], torch.Tensor]:
    """Windows and theta of three requests (short text, long text, window shorter than a path),
    seven rows."""
    generator = torch.Generator().manual_seed(0)
    int32 = torch.int32
    windows = RowWindows(
        history=torch.randint(0, 40, (3, 50), generator=generator, dtype=int32),
        history_lens=torch.tensor([7, 50, 50], dtype=int32),
        window_sizes=torch.tensor([50, 20, 2], dtype=int32),
        owners=torch.tensor([0, 0, 1, 1, 1, 2, 2], dtype=int32),
        path=torch.randint(0, 40, (7, 4), generator=generator, dtype=int32),
        depths=torch.tensor([0, 3, 0, 1, 4, 3, 1], dtype=int32),
    )
    theta = torch.tensor([1.1, 1.1, 1.2, 1.2, 1.0, 2.0, 2.0])
    return RowWindows(*(values.to(device) for values in windows)), theta.to(device)


def test_rows_are_penalised_as_one_by_one(device: torch.device) -> None:
    windows, theta = penalty_case(device)
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)).to(device)
    actual, expected = logits.clone(), logits.clone()
    penalise_windows(actual, windows, theta, chunk=16)
    penalise_windows_reference(expected, windows, theta)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[4], logits[4])  # theta 1


def test_a_token_that_stands_often_is_penalised_once(device: torch.device) -> None:
    windows, theta = penalty_case(device)
    windows.history.fill_(5)
    windows.path.fill_(5)
    logits = torch.full((7, 10), -1.0, device=device)
    penalise_windows(logits, windows, theta, chunk=16)
    assert torch.equal(logits[:, 5], -theta)
    assert (logits[:, :5] == -1).all()
    assert (logits[:, 6:] == -1).all()
