"""What proves and measures Penstock, from a clone: simulator, explorer, benchmarks beside peers."""
