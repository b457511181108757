"""One tensor by every recipe: the fewer elements share a scale, the less an outlier costs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from megatron_fp8.study.formats import scaling


def test_the_tensor_is_as_described():
    x, where = scaling.with_outliers(1024)
    assert x.shape == (scaling.ROWS, scaling.COLS) and int(where.sum()) == scaling.OUTLIERS
    assert bool((x[where].abs() == 1024).all()) and abs(float(x[~where].std()) - 1) < 0.01
    assert not bool(scaling.with_outliers(1)[1].any())


def test_finer_scales_bear_larger_outliers():
    largest = {
        (q.recipe, q.rule.split()[1]): q for q in scaling.by_recipe() if q.outlier == scaling.SIZES[-1]
    }
    order = [("tensorwise", "tensor"), ("rowwise", "row"), ("blockwise", "1x128"), ("mxfp8", "1x32")]
    noise = [largest[key].ordinary for key in order]
    lost = [largest[key].flushed for key in order]
    assert noise == sorted(noise) and noise[-1] > noise[0] + 10
    assert lost == sorted(lost, reverse=True) and lost[0] > 0.1


def test_tensorwise_is_what_another_library_casts():
    x, where = scaling.with_outliers(65536)
    scale = np.float32(448) / np.float32(65536)
    y = (x.numpy() * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale
    (mine,) = (q for q in scaling.by_recipe() if (q.recipe, q.outlier) == ("tensorwise", 65536))
    other = torch.from_numpy(y)
    assert abs(scaling.sqnr(x[~where], other[~where]) - mine.ordinary) < 1e-3
