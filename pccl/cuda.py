"""Whether this build reduces CUDA memory directly."""

__all__ = ["is_available"]

is_cuda_available = False


def is_available() -> bool:
    """True when this build has CUDA support; no device is probed."""
    return is_cuda_available
