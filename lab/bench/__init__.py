"""Benchmarks beside peers and other designs."""
