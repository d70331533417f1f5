"""Measurements, each beside the naive way, a peer, or the hardware's ceiling in the same run."""
