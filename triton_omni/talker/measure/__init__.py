"""How fast the talker is: what scripts/bench_talker.py measures."""
