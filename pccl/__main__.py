"""`python -m pccl` is the `pccl` command."""

import sys

from pccl.cli import main

if __name__ == "__main__":
    sys.exit(main())
