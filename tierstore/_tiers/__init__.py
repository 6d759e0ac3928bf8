"""The tiers above the disk: caches of whole records, each over the tier below it."""
