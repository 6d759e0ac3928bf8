"""Tables: rows by id over the tiers. Ids are checked here, and fields become byte ranges."""
