"""Until every built extension knows the new name."""

from pccl.result_pool import empty as empty
