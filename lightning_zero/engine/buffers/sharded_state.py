"""A state of an optimizer as the program sees it between steps: this rank's segment, which never passes for the whole.

Rows and masks are cut, element-wise writes and norms are right, everything else is refused, as of a gradient in the
step window (``sharded_gradient.py``). In methods of the optimizer the shape is the segment's. Its ``step`` sees plain
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.parameter import operation_of
from lightning_zero.engine.buffers.sharded_gradient import Cut, ShardedGradient
from lightning_zero.errors import ShardedGradientError

__all__ = ["ShardedState", "sharded_state_class"]

_FLATTENING = frozenset(["view", "reshape"])


class ShardedState(ShardedGradient):
    """This rank's segment of a state: (segment numel,), 1-D."""

    noun = "optimizer state"
    in_methods: ClassVar[type[ShardedState]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``view(-1)`` too, whose elements are in the same order; else as of gradients."""
        cut = cls.cut
        is_flat = operation_of(func) in _FLATTENING and args[1:] in ((-1,), ((-1,),)) and not kwargs
        if is_flat and cut is not None and cut.part is None:
            flat = cut._replace(shape=torch.Size([cut.shape.numel()]))
            with torch._C.DisableTorchFunctionSubclass():
                viewed: torch.Tensor = args[0].view(-1)
            made = sharded_state_class(cls.communicator, flat)
            return viewed.as_subclass(made if cls.whole is not None else made.in_methods)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def remedy(cls) -> str:
        """Return where a whole state is."""
        return "A checkpoint (`trainer.save_checkpoint(path)` on every rank) has the whole one"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the segment, which this rank may put back."""
        with torch.no_grad():
            copied = self.detach().as_subclass(torch.Tensor).clone()
        copied.__class__ = type(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: the file would have this rank's segment only."""
        raise ShardedGradientError(
            f"`pickle` (`torch.save`, a process that is started) needs a whole {self.noun}, but this rank holds one"
            f" segment of it. {self.remedy()}."
        )


def sharded_state_class(communicator: Communicator, cut: Cut) -> type[ShardedState]:
    """Return the class of the states of one parameter, whose norms are finished over ``communicator``."""
    body = {"communicator": communicator, "cut": cut, "whole": cut}
    made: type[ShardedState] = type("ShardedState", (ShardedState,), body)
    made.in_methods = type("ShardedState", (made,), {"whole": None})
    return made
