"""Other frameworks' arrays.

NumPy needs no adapter; torch's and JAX's are imported when the first such array arrives.
"""

from pccl._arrays import Adapter, Array, Buffer, Node, Shared, as_array, overlaps, register
from pccl._device import Device, Staged

__all__ = [
    "Adapter",
    "Array",
    "Buffer",
    "Device",
    "Node",
    "Shared",
    "Staged",
    "as_array",
    "overlaps",
    "register",
]
