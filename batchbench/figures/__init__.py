"""Figures, drawn from the tables alone."""
