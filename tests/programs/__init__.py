"""Programs that tests run in processes of their own; tests/README.md says how to write one.

Each is a function of a module of this package. Libraries that take long to load (torch, jax) are
imported inside the function: the test's process imports these modules, too.
"""
