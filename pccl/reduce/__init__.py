"""Reductions of trees: one request, and the routes that one can take."""
