"""`python -m pccl` is the `pccl` command."""

import sys

from pccl.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
