"""PyTorch, for modules that cannot do without; importing this names the extra if it is missing."""

from __future__ import annotations

from tierstore.errors import MissingExtraError

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("this needs PyTorch: pip install 'tierstore[torch]'") from None

__all__ = ["torch"]
