"""What the talker and code2wav cost each other on one GPU: what scripts/bench_placement.py measures."""
