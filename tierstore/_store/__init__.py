"""Stores: tables that are committed together, their versions, locks, payload and housekeeping."""
