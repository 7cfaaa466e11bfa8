"""Fits plans: which sender layer and heads each receiver layer reuses, and what that costs."""
