"""The parts of benchmarks/drill.py."""
