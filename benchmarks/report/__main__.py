"""Print the page of one file of records."""

import argparse
from pathlib import Path

from benchmarks.report import page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("file", type=Path, help="what a benchmark wrote with --json")
    print(page(parser.parse_args().file), end="")
