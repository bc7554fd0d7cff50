"""`python -m megatron_splitkv` is the console script `splitkv`."""

import sys

from megatron_splitkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
