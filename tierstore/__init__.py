"""tierstore: a parameter store for embedding tables larger than the GPU and RAM."""
