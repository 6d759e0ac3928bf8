"""Maps from keys to rows: codes of keys, open addressing, and texts in bulk."""
