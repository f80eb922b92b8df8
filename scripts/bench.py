#!/usr/bin/env python3
"""Loads a speaking server and measures what its clients see: ours over HTTP or gRPC, or vLLM-Omni's.

    scripts/bench.py run --url http://127.0.0.1:9000 --model demo --concurrency 1,16 --out rows.jsonl --plot rows.png
    scripts/bench.py run --url 127.0.0.1:9001 --api grpc --request-rate 5 --requests 100
    scripts/bench.py report rows.jsonl others.jsonl --plot all.png

Needs the packages of the extra "bench"; no GPU. The table ends with the definition of every figure.
"""

from __future__ import annotations

import sys

from triton_omni.bench.command_line import main

if __name__ == "__main__":
    sys.exit(main())
