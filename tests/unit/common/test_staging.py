"""Arrays staged to the device arrive whole, whatever was staged before them."""

import numpy as np
import pytest
import torch

from vllm_tokenswift.common.staged_arrays import ArrayShape, StagedArrays
from vllm_tokenswift.common.staging import Staging


def test_arrays_of_one_layout_are_staged_again_and_again() -> None:
    staging = Staging(torch.device("cpu"))
    for start in range(3):
        rows, values = np.arange(start, start + 5), np.full((2, 3), start, np.float32)
        rows_d, values_d = staging.to_device(rows, values)
        assert rows_d.tolist() == rows.tolist()
        assert values_d.tolist() == values.tolist()
        assert (rows_d.dtype, values_d.dtype) == (torch.int64, torch.float32)


def test_layouts_of_other_shapes_and_types_do_not_mix() -> None:
    staging = Staging(torch.device("cpu"))
    for count in (1, 7, 300, 3000, 7, 1):  # the buffer grows on the way
        ids, wide = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int64) * 2
        [ids_d] = staging.to_device(ids)
        assert ids_d.tolist() == ids.tolist()
        [wide_d, ids_d] = staging.to_device(wide, ids)
        assert wide_d.tolist() == wide.tolist()
        assert ids_d.tolist() == ids.tolist()


def test_more_layouts_than_are_kept() -> None:
    staging = Staging(torch.device("cpu"))
    for count in range(600):
        [staged] = staging.to_device(np.arange(count, dtype=np.int32))
        assert staged.tolist() == list(range(count))


@pytest.mark.parametrize("in_part", [False, True])
def test_named_arrays_keep_their_place(in_part: bool) -> None:
    shapes = {
        "flags": ArrayShape((3,), np.bool_),
        "chances": ArrayShape((2, 5), np.float32),
        "ids": ArrayShape((4,), np.int64),
    }
    arrays = StagedArrays(torch.device("cpu"), shapes)
    before = {name: tensor.data_ptr() for name, tensor in arrays.device.items()}
    for step in range(1, 3):
        arrays.host["flags"][:] = [True, False, step == 2]
        arrays.host["chances"][:] = step / 4
        arrays.host["ids"][:] = np.arange(4) * step
        arrays.to_device(arrays.start("ids") if in_part else None)
        assert arrays.device["flags"].tolist() == [True, False, step == 2]
        assert arrays.device["chances"].tolist() == [[step / 4] * 5] * 2
        copied = [0] * 4 if in_part else [i * step for i in range(4)]
        assert arrays.device["ids"].tolist() == copied
    assert {name: tensor.data_ptr() for name, tensor in arrays.device.items()} == before
    arrays.device["chances"].fill_(0.5)
    arrays.to_host("chances")
    assert (arrays.host["chances"] == 0.5).all()
    assert arrays.host["flags"].tolist() == [True, False, True]
