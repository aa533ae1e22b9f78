"""Membership: the members of each generation."""
