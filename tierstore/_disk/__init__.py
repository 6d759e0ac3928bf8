"""The disk tier: a base file that is a plain array, and deltas of the rows changed since."""
