"""The disk tier: a base file (a plain array), and deltas with the rows changed since."""
