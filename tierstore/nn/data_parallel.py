"""DistributedDataParallel over a model with rows: it is told to leave them alone.

Its reducer takes the shape of each parameter when it is made, and copies gradients of that shape
into buckets. The parameter of rows has another shape after each backward pass, and its gradient is
exchanged with the rows by the layer itself. torch has a list of parameters to ignore for that, on
the model that is wrapped; a layer cannot know which model that will be, so what is wrapped is
looked through where it is wrapped: by a script, or by Lightning, Accelerate or transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tierstore.nn.rows import RowsParameter

_IGNORED = "_ddp_params_and_buffers_to_ignore"


def leave_rows_alone() -> None:
    """Have DistributedDataParallel ignore the rows of models that it wraps from now on.

    A model that trains nothing else is wrapped as it is: torch refuses one without parameters.
    """
    if not torch.distributed.is_available():
        return
    kind: Any = torch.nn.parallel.DistributedDataParallel
    init = kind.__init__

    @functools.wraps(init)
    def ignoring(self: Any, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        parameters = dict(module.named_parameters())
        rows = {name for name, each in parameters.items() if isinstance(each, RowsParameter)}
        if rows and any(parameters[name].requires_grad for name in parameters.keys() - rows):
            before = getattr(module, _IGNORED, ())
            kind._set_params_and_buffers_to_ignore_for_model(module, [*{*before, *rows}])
        init(self, module, *args, **options)

    kind.__init__ = ignoring
