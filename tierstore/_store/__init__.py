"""Stores: tables that are committed together, with versions, locks, payloads and upkeep."""
