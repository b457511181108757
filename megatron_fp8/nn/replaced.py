"""Who wrote a model's weights last: its training, or somebody else?

Delayed scaling asks, where it evaluates (linear/fitted.py). A weight that the training wrote may lie a little beyond its
scale, as optimizers let weights grow, and evaluation then saturates it as the training's forward does. One that somebody
else wrote is not to be saturated at all. What tells them apart is noted where the training is known to have written
last: when an optimizer of the model has stepped, and when an iteration ends. A deep copy has its original's notes. No
value is looked at, and a weight that nobody noted is not the training's.

A note is of a parameter's memory and version, and refers to no tensor: torch.utils.swap_tensors, by which modules may
move, takes none that has a weak reference. Moves go through the layers, which note there what was the training's before.

A write into ``.data`` leaves no trace in a tensor's version. Of a frozen weight, which no optimizer writes, none is
needed: adapters are merged into such. Of others it shows by its size alone. Another parameter or other memory in the
place of what was trained is a write too, unless FSDP puts it there, which does so around each forward.

In another process there are no notes, and the weights that go with loaded histories come before or after those. So saved
histories say how large each weight was, and until the next iteration none may lie beyond its scale that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..linear.fitted import Known


class _Left(NamedTuple):
    """A weight as training left it. ``version``: None of an inference tensor, which has none."""

    memory: StorageWeakRef  # no other memory gets its number
    version: int | None
    kind: tuple[torch.device, torch.dtype]
    frozen: bool

    @staticmethod
    def now(weight: torch.Tensor, *, frozen: bool) -> _Left:
        """As it is."""
        memory = StorageWeakRef(weight.untyped_storage())
        return _Left(memory, _version(weight), _kind(weight), frozen)

    def is_so(self, weight: torch.Tensor) -> bool:
        """Whether nobody has written it since, as far as its memory and version say."""
        now = _Left.now(weight, frozen=self.frozen)
        return (now.memory, now.version) == (self.memory, self.version)


class LeftByTraining:
    """The weights of a model's linears as its training left them.

    Attributes:
        told: the model's user was told of a weight that does not fit its scale.
    """

    def __init__(self) -> None:
        self.told = False
        self._sharded = False
        self._left: dict[int, _Left] = {}
        self._saved: dict[str, float] = {}

    def note(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """The training may have written them until now."""
        self._sharded, self._saved, self._left = False, {}, {}
        for weight in weights:
            if hasattr(weight, "to_local"):
                self._sharded = True  # forwards have others in its place
            elif id(weight) not in self._left:
                self._left[id(weight)] = _Left.now(weight, frozen=not weight.requires_grad)

    def unwritten(self, weights: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that nobody has written since they were noted."""
        left = ((weight, self._left.get(id(weight))) for weight in weights)
        return [weight for weight, one in left if one is not None and one.is_so(weight)]

    def note_again(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """These were written, and are what they were."""
        for weight in weights:
            self._left[id(weight)] = _Left.now(weight, frozen=not weight.requires_grad)

    @property
    def resumed(self) -> bool:
        """Whether loaded histories, and none of its own iterations, say what the training left."""
        return bool(self._saved)

    def note_saved(self, name: str, amax: float) -> None:
        """A linear's histories were loaded, and when they were saved its weight was so large as training left it; 0: it
        did not lie beyond its scale."""
        self._saved[name] = amax

    def note_copies(self, of: LeftByTraining, name: str, copies: Iterable[tuple[torch.Tensor, Any]]) -> None:
        """A linear was copied that is noted elsewhere: (parameter of its weight, this model's copy) of each."""
        self._sharded = self._sharded or of._sharded
        if name in of._saved:
            self._saved[name] = of._saved[name]
        for weight, copied in copies:
            left = of._left.get(id(weight))
            if left is not None and left.is_so(weight) and isinstance(copied, torch.Tensor):
                self._left[id(copied)] = _Left.now(copied, frozen=left.frozen)

    @contextmanager
    def moving(self, weights: Callable[[], Sequence[torch.Tensor]]) -> Iterator[None]:
        """Around a move or a conversion of these parameters: what the training left before it, it has left after it."""
        before = []
        for weight in weights():
            left = self._left.get(id(weight))
            # Of another kind it was moved already, by a module that shares it.
            is_so = left is not None and (left.kind != _kind(weight) or left.is_so(weight))
            before.append((left, is_so))
        yield
        for (left, is_so), weight in zip(before, weights(), strict=True):
            if left is not None:
                same = is_so and not weight.is_meta  # where values are left behind
                now = _Left.now(weight, frozen=left.frozen) if same else left._replace(kind=_kind(weight))
                self._left[id(weight)] = now

    def known(self, name: str, weights: Collection[torch.Tensor]) -> Known:
        """What is known of a linear's weight now, by the parameters that it is or is computed from; of none, nothing."""
        if (amax := self._saved.get(name)) is not None:
            return Known(amax=amax, told=self.told)
        left = [self._left.get(id(weight)) for weight in weights]
        if self._sharded and None in left:  # FSDP puts others there, around each forward
            return Known(told=self.told)
        found = [(one, weight) for one, weight in zip(left, weights, strict=True) if one is not None]
        written = any(not one.is_so(weight) for one, weight in found) or (bool(self._left) and None in left)
        if written or None in left or (found and all(one.frozen for one, _ in found)):
            return Known(1.0, written=written, told=self.told)
        return Known(told=self.told)


def _kind(weight: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return weight.device, weight.dtype


def _version(weight: torch.Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
