"""Trains a tiny drafter at every parallel layout on this machine and prints how equal the runs are.

python3 tools/layouts.py    (up to 8 gloo ranks; about a minute on two cores)
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # the ranks import this file too
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.distributed.layouts import compare, table

    print(table(compare()))
