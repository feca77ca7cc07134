"""Beginnings of programs that the documentation shows in part: the names that the part uses."""
