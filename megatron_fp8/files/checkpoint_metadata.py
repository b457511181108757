"""torch.distributed.checkpoint's ``.metadata``: safe unpickling, and checks of what it describes.

The unpickler creates the classes of the format and nothing else, so a file of a stranger runs no code. The checks find
tensors that the checkpoint's folder cannot contain.
"""

from __future__ import annotations

import io
import math
import pickle
from importlib import import_module
from typing import Any, ClassVar

import torch

from .manifest import is_plain_name

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip
"""Classes whose objects have state. Only the pickle itself creates such objects."""
PLAIN = {
    ("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    *((module, name) for module, names in _RECORDS.items() for name in names),
}  # fmt: skip


class MetadataUnpickler(pickle._Unpickler):
    """Creates the classes that torch.distributed.checkpoint writes into .metadata, and nothing else.

    This is the standard library's unpickler in Python, which can restrict whose state is set. With the one in C, a
    pickle can modify the classes, functions and enum members that it names, in this process.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._records = {
            getattr(import_module(module), name) for module, names in _RECORDS.items() for name in names
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's .metadata")

    def load_build(self) -> None:
        """Set an object's state if this pickle has created the object."""
        changed = self.stack[-2]
        if type(changed) not in self._records:
            name = getattr(changed, "__name__", type(changed).__name__)
            raise pickle.UnpicklingError(f"it changes {name}, which it has not made")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]

    dispatch[pickle.BUILD[0]] = load_build


def check_metadata(metadata: Any) -> None:
    """Raise an exception unless each tensor's chunks cover it, in files of this folder and with the right lengths."""
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        size, dtype = tuple(entry.size), entry.properties.dtype
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is no tensor")
        values = 0
        for chunk in entry.chunks:
            window = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
            place, part = places[name, chunk.offsets], math.prod(chunk.sizes)
            if not is_plain_name(place.relative_path):
                raise ValueError(f"{name} lies outside, in {place.relative_path!r}")
            if place.transform_descriptors or place.offset < 0 or place.length < part * dtype.itemsize:
                raise ValueError(f"{name} is not stored as it should be in {place.relative_path}")
            if not all(0 <= offset <= offset + count <= whole for offset, count, whole in window):
                raise ValueError(f"{name} has a part outside its shape {list(size)}")
            values += part
        if values != math.prod(size):
            raise ValueError(f"{name} has {values} values, and its shape is {list(size)}")
