"""Output layers that were tied to an embedding which a layer over a table has replaced."""

from __future__ import annotations

from typing import Any

from tierstore.errors import InvalidInputError
from tierstore.nn.embedding import TieredEmbedding


def check_tied(model: Any) -> None:
    """Raise InvalidInputError for an output layer that was tied to what a layer replaced.

    It would train the old weight alone. Models of transformers tell which layers those are, also
    inside another module.
    """
    for part in model.modules():
        if not getattr(getattr(part, "config", None), "tie_word_embeddings", False):
            continue
        head = part.get_output_embeddings() if hasattr(part, "get_output_embeddings") else None
        if not hasattr(head, "weight"):
            continue
        emb = part.get_input_embeddings()
        if isinstance(emb, TieredEmbedding):
            raise InvalidInputError(
                f"this {type(part).__name__} ties its output layer to its input embedding, which "
                f"is now a layer over table {emb.table.name!r}, and the output layer kept the old "
                "weight: call tierstore.integrations.transformers.set_embedding(model, emb) in "
                "place of model.set_input_embeddings(emb), or set config.tie_word_embeddings to "
                "False"
            )
