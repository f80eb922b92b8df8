#!/usr/bin/env python
"""Write a Qwen3-Omni checkpoint of small sizes: every part, every file, 20 MB, made in seconds, no download."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to; made if it does not exist")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    arguments = parser.parse_args()

    from triton_omni.demo.checkpoint import write_checkpoint  # after --help: it loads torch

    began = time.monotonic()
    write_checkpoint(arguments.out, arguments.seed)
    size_mb = sum(file.stat().st_size for file in arguments.out.iterdir()) / 1e6
    print(f"{arguments.out}: {size_mb:.1f} MB in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
