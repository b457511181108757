"""Checksums of long records are TensorBoard's own, and so are the records around them."""

from __future__ import annotations

import io
import random

import pytest
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_fp8.files.tfevents import crc32c, framed


@pytest.mark.parametrize("length", [4, 5, 8, 1023, 1024, 1025, 2047, 2048, 5000, 70_001])
def test_any_length(length):
    record = random.Random(length).randbytes(length)
    assert crc32c(record) == pywrap_tensorflow.crc32c(record)
    assert crc32c(bytes(length)) == pywrap_tensorflow.crc32c(bytes(length))


@pytest.mark.parametrize("length", [0, 3, 1999, 2000, 9000])
def test_records_are_tensorboard_s(length):
    record, file = random.Random(length).randbytes(length), io.BytesIO()
    RecordWriter(file).write(record)
    assert framed(record) == file.getvalue()
