"""torch, imported when it is first used.

Who only plans a merge or drives workers needs what methods declare, and not what they compute with: torch
takes longer to load than a model of 7B to plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch as module

            # From now on it is what it would have been.
            ours = f"{__package__}."
            for own in [each for name, each in tuple(sys.modules.items()) if name.startswith(ours)]:
                if vars(own).get("torch") is self:
                    own.torch = module
            return getattr(module, name)

    torch = _Torch()
