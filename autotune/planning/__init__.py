"""Answers without a search: plan, compare, check, and published observations."""
